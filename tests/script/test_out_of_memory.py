"""What is said of a device that is full; `tests/gpu` fills one."""

import pytest

from helpers.script.out_of_memory import GIB, GRADIENTS, HELD, SAVED, STATE, UNUSED, WEIGHTS, Filled

PARTS = {WEIGHTS: 2, GRADIENTS: 2, STATE: 4, HELD: 1, SAVED: 66, UNUSED: 3}


def full(asked=2.0, **parts):
    sizes = {name: int(GIB * parts.get(name, size)) for name, size in PARTS.items()}
    return Filled(int(GIB * asked), 80 * GIB, "train.py:4 loss.backward()", sizes)


def test_the_parts_are_told_with_the_place():
    lines = full().text()
    assert lines[0] == "out of memory at train.py:4 loss.backward(): 2 GiB were asked for, the device has 80 GiB"
    assert [line.split()[-2] for line in lines[1:7]] == ["2.00", "2.00", "4.00", "1.00", "66.00", "3.00"]


@pytest.mark.parametrize(
    ("device", "first"),
    [
        (full(asked=2), "PYTORCH_ALLOC_CONF=expandable_segments:True joins"),
        (full(asked=10), "a batch of at most 90% of the samples"),
        (full(asked=100), "bf16 autocast"),
        (full(asked=100, **{SAVED: 0}), "`dlspeed fit`"),
        (full(asked=100, **{SAVED: 0, STATE: 0}), "the optimizer's state isn't there yet"),
    ],
)
def test_the_cheapest_change_that_makes_room_comes_first(device, first):
    assert next(device.advice).startswith(first)
