"""What a start of two equal programs adds to the ratio of their times: the standard deviation of its logarithm."""

from ..estimate import LUCK
from ..machine import device

# From recorded trials of a program against itself on two cores of an EPYC, which `tests/lab/trials` keeps: 40 of
# programs that keep the pages of freed memory, 15 of such that return them, and get others back in each step.
KEPT, RETURNED = 0.034, 0.044


def start_noise(kept: bool) -> float:
    """What a trial assumes of programs that keep the pages of freed memory, or return them."""
    if device().type != "cpu":
        return LUCK
    return KEPT if kept else RETURNED
