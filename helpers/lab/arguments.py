"""Classes of machines, checks of arguments, whose ValueError names the value and what is valid, and forms of JSON."""

from collections.abc import Iterable
from typing import Any

LARGEST = 1e18  # of a file's numbers: larger ones overflow where they are multiplied
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


def has_form(value: Any, form: Any) -> bool:
    """Whether what JSON held is of a form: a type, [form of each], {str: form of each}, or {name: form} where named.

    `float` is any finite number below `LARGEST`, `int` a whole one; None is anything.
    """
    if isinstance(form, list):
        return isinstance(value, list) and all(has_form(item, form[0]) for item in value)
    if isinstance(form, dict):
        return isinstance(value, dict) and all(has_form(value[k], form.get(k, form.get(str))) for k in value)
    if form in (float, int):
        return isinstance(value, (int, form)) and abs(value) < LARGEST
    return form is None or isinstance(value, form)
