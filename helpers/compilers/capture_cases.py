"""Small functions that are hard to capture, each for one reason.

    case = CASES["branch on data"]()
    case.fn(*case.example)                # the call that is captured
    case.fn(*case.other)                  # the call on which the captured function is tested

Each call makes a new case with its own state, so that variants don't affect each other.
"""

import dataclasses
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclasses.dataclass(frozen=True)
class Case:
    """A function, the arguments that it is captured with, and others that lead to another path through it."""

    fn: Callable[..., Any]
    example: tuple[Any, ...]
    other: tuple[Any, ...]
    between: Callable[[Any], Any] = lambda captured: None  # runs between the two calls, on the captured function
    log: list[str] = dataclasses.field(default_factory=list)  # a list that the function may append to


def squeeze(y: Tensor) -> Tensor:
    """Into (−1, 1), by torch's operations: what the lecture's example calls."""
    return y / (1 + y.abs())


def f1(x: Tensor, y: Tensor) -> Tensor:
    """The lecture's function: which branch it takes depends on the values."""
    if x.sum() < 0:
        return -y
    return squeeze(y)


def centre(x: Tensor) -> Tensor:
    """Which branch it takes depends on the number of rows."""
    if x.shape[0] < 4:
        return x * 1
    return x - x.mean(0)


def half(x: Tensor) -> Tensor:
    """Which branch it takes depends on the dtype; no value is asked for."""
    if x.is_floating_point():
        return x / 2
    return x // 2


def shrink(x: Tensor) -> Tensor:
    """The number of iterations depends on the values."""
    while x.abs().max() > 1:
        x = x / 2
    return x


def normalised(x: Tensor) -> Tensor:
    """Reads a value of a tensor into Python and computes with it."""
    largest = x.max().item()
    return x / largest


def noisy(x: Tensor) -> Tensor:
    """Prints at each call."""
    print("called")
    return x + 1


def appending_to_a_list() -> Case:
    """Appends to a list outside of it at each call."""
    log: list[str] = []

    def logged(x: Tensor) -> Tensor:
        log.append("called")
        return x + 1

    return Case(logged, (torch.zeros(2),), (torch.ones(2),), log=log)


class Counted(nn.Module):
    """Counts its calls in a Python integer; its output depends on the count."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls


def reading_a_setting() -> Case:
    """Reads a dict outside of it, which changes between the calls."""
    settings = {"scale": 2.0}

    def scaled(x: Tensor) -> Tensor:
        return x * settings["scale"]

    return Case(scaled, (torch.ones(2),), (torch.ones(2),), between=lambda _: settings.update(scale=5.0))


def doubled(x: Tensor) -> Tensor:
    """Writes into its argument, which the caller sees."""
    x.mul_(2)
    return x.sum()


def ranked(x: Tensor) -> Tensor:
    """Leaves torch for numpy and comes back."""
    return torch.from_numpy(np.sort(x.numpy())) * 2


def packed_size(x: Tensor) -> int:
    """How many bytes zlib, a C library, packs the tensor's bytes into. No tracer of torch sees into it."""
    return len(zlib.compress(x.numpy().tobytes()))


def weighted(x: Tensor) -> Tensor:
    """Leaves torch for a C library and multiplies by its result, which depends on the values."""
    return x * packed_size(x)


def noised(x: Tensor) -> Tensor:
    """Draws random numbers: after the same seed the same ones as eagerly, and at the next call others."""
    return x + F.dropout(torch.rand_like(x), 0.5)


def reduced(x: Tensor, how: str) -> Tensor:
    """A string argument selects what is computed."""
    if how == "sum":
        return x.sum()
    return x.mean()


CASES: dict[str, Callable[[], Case]] = {
    "branch on data": lambda: Case(
        f1, (torch.ones(3), torch.linspace(-2, 2, 5)), (-torch.ones(3), torch.linspace(-2, 2, 5))
    ),
    "branch on shape": lambda: Case(centre, (torch.arange(12.0).reshape(6, 2),), (torch.arange(4.0).reshape(2, 2),)),
    "branch on dtype": lambda: Case(half, (torch.tensor([3.0, 5.0]),), (torch.tensor([3, 5]),)),
    "loop on data": lambda: Case(shrink, (torch.tensor([3.0, -1.0]),), (torch.tensor([90.0, 1.0]),)),
    "item": lambda: Case(normalised, (torch.tensor([1.0, 2.0]),), (torch.tensor([2.0, 8.0]),)),
    "printing": lambda: Case(noisy, (torch.zeros(2),), (torch.ones(2),)),
    "appending to a list": appending_to_a_list,
    "counting in an attribute": lambda: Case(Counted(), (torch.ones(2),), (torch.ones(2),)),
    "reading a setting": reading_a_setting,
    "changing its input": lambda: Case(doubled, (torch.ones(2),), (torch.tensor([3.0, 4.0]),)),
    "numpy call": lambda: Case(ranked, (torch.tensor([3.0, 1.0, 2.0]),), (torch.tensor([1.0, 9.0, 5.0]),)),
    "c call": lambda: Case(weighted, (torch.ones(256),), (torch.arange(256.0),)),
    # Captured in training; then the module is switched to evaluation, where dropout does nothing.
    "dropout mode": lambda: Case(
        nn.Sequential(nn.Dropout(0.5)), (torch.ones(64),), (torch.ones(64),), between=lambda captured: captured.eval()
    ),
    "random numbers": lambda: Case(noised, (torch.zeros(64),), (torch.zeros(64),)),
    "string argument": lambda: Case(reduced, (torch.ones(4), "sum"), (torch.ones(4), "mean")),
}
