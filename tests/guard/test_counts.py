"""What a guard counts of a step, and for which line, against what the step does by hand."""

import pytest
import torch
from torch import nn

from helpers.guard.blocks import Guard
from helpers.guard.record import entry


@pytest.fixture
def counted(tmp_path):
    """The numbers of a step, as they are written down."""

    def numbers(step):
        with Guard(tmp_path / "speed_guard.json", tell=lambda text: None)("step") as counts:
            step()
        return entry(counts)

    return numbers


def test_operators_are_those_that_move_or_compute_something(counted):
    x = torch.ones(4, 8)
    numbers = counted(lambda: [x.t(), x.view(8, 4), x.detach(), torch.empty(3), x + 1, x.add_(0)])
    assert numbers["operators by name"] == {"add": 1, "add_": 1} and numbers["operators"] == 2


def test_what_goes_back_through_a_line_is_that_lines(counted):
    first, second, x = nn.Linear(8, 8), nn.Linear(8, 8), torch.ones(4, 8)

    def step():
        hidden = first(x)
        result = second(hidden)
        result.sum().backward()

    by_line = {text: numbers["FLOPs"] for text, numbers in counted(step)["lines"].items() if "FLOPs" in numbers}
    one = 2 * 4 * 8 * 8  # forward, and as many for the gradient of the weight and of the input
    assert by_line["test_counts.py: hidden = first(x)"] == 2 * one
    assert by_line["test_counts.py: result = second(hidden)"] == 3 * one
    assert by_line["test_counts.py: result.sum().backward()"] == 3 * one, "as it calls them"


def test_casts_copies_and_reads_are_counted_by_what_they_do(counted):
    x, mask = torch.ones(4, 8), torch.ones(4, dtype=torch.bool)

    def step():
        half, same = x.half(), x.clone()
        half.copy_(x)
        same.copy_(x)
        same.tolist()
        same[mask] = 1.0  # is filled in without a wait
        return same[mask], same[torch.tensor([0, 1])]

    numbers = counted(step)
    assert (numbers["casts"], numbers["copies"], numbers["bytes between host and device"]) == (2, 2, 0)
    assert numbers["host waits"] == 2  # the list, and the rows under a mask, whose number isn't known
