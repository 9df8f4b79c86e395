"""Classes of machines, and checks of arguments: a ValueError names the argument, its value and what is valid."""

from collections.abc import Iterable

CLASSES = ("cpu", "gpu", "big-gpu")  # of machines
PRESETS = ("small", *CLASSES)  # `small` takes seconds on any machine, and is never a result


def check_at_least(least: int, /, **sizes: int) -> None:
    """Raise a ValueError unless all sizes are integers (numpy's count) of at least `least`."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not hasattr(size, "__index__") or size < least:
            raise ValueError(f"{name} is {size!r}; it must be an integer of at least {least}")


def check_choice(valid: Iterable[str], /, **chosen: str) -> None:
    """Raise a ValueError unless all arguments are among the valid values."""
    valid = list(valid)
    for name, value in chosen.items():
        if value not in valid:
            raise ValueError(f"{name} is {value!r}; valid: {', '.join(map(repr, valid))}")
