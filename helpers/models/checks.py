"""What constructors ask of the sizes that they are given."""


def check_positive(**sizes: int) -> None:
    """A ValueError that names the first of the sizes that is no integer of at least 1."""
    check_at_least(1, **sizes)


def check_at_least(least: int, /, **sizes: int) -> None:
    """A ValueError that names the first of the sizes that is no integer of at least `least`."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < least:
            raise ValueError(f"{name} is {size!r}; it must be an integer of at least {least}")
