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
    # For torch.export: the function rewritten so that it can be captured, or sizes declared as dynamic, or both.
    repaired: Callable[..., Any] | None = None
    dynamic: tuple[Any, ...] | None = None  # dynamic_shapes, one entry an argument


def squeeze(y: Tensor) -> Tensor:
    """Into (−1, 1), by torch's operations: what the lecture's example calls."""
    return y / (1 + y.abs())


def packed_size(x: Tensor) -> int:
    """How many bytes zlib, a C library, packs the tensor's bytes into. No tracer of torch sees into it."""
    return len(zlib.compress(x.numpy().tobytes()))


def branch_on_data() -> Case:
    """The lecture's function: which branch it takes depends on the values."""

    def f1(x: Tensor, y: Tensor) -> Tensor:
        if x.sum() < 0:
            return -y
        return squeeze(y)

    def repaired(x: Tensor, y: Tensor) -> Tensor:
        return torch.cond(x.sum() < 0, lambda y: -y, lambda y: squeeze(y), (y,))

    x, y = torch.ones(3), torch.linspace(-2, 2, 5)
    return Case(f1, (x, y), (-x, y), repaired=repaired)


def branch_on_shape() -> Case:
    """Which branch it takes depends on the number of rows."""

    def centre(x: Tensor) -> Tensor:
        if x.shape[0] < 4:
            return x * 1
        return x - x.mean(0)

    def repaired(x: Tensor) -> Tensor:
        return torch.cond(x.shape[0] < 4, lambda x: x * 1, lambda x: x - x.mean(0), (x,))

    rows = torch.arange(12.0).reshape(6, 2)
    return Case(centre, (rows,), (rows[:2].clone(),), repaired=repaired, dynamic=({0: torch.export.Dim.DYNAMIC},))


def branch_on_dtype() -> Case:
    """Which branch it takes depends on the dtype; no value is asked for."""

    def half(x: Tensor) -> Tensor:
        if x.is_floating_point():
            return x / 2
        return x // 2

    return Case(half, (torch.tensor([3.0, 5.0]),), (torch.tensor([3, 5]),))


def loop_on_data() -> Case:
    """The number of iterations depends on the values."""

    def shrink(x: Tensor) -> Tensor:
        while x.abs().max() > 1:
            x = x / 2
        return x

    def repaired(x: Tensor) -> Tensor:
        from torch._higher_order_ops.while_loop import while_loop

        return while_loop(lambda x: x.abs().max() > 1, lambda x: (x / 2,), (x,))[0]

    return Case(shrink, (torch.tensor([3.0, -1.0]),), (torch.tensor([90.0, 1.0]),), repaired=repaired)


def item() -> Case:
    """Reads a value of a tensor into Python and computes with it."""

    def normalised(x: Tensor) -> Tensor:
        largest = x.max().item()
        return x / largest

    return Case(normalised, (torch.tensor([1.0, 2.0]),), (torch.tensor([2.0, 8.0]),))


def printing() -> Case:
    """Prints at each call."""

    def noisy(x: Tensor) -> Tensor:
        print("called")
        return x + 1

    return Case(noisy, (torch.zeros(2),), (torch.ones(2),))


def appending_to_a_list() -> Case:
    """Appends to a list outside of it at each call."""
    log: list[str] = []

    def logged(x: Tensor) -> Tensor:
        log.append("called")
        return x + 1

    return Case(logged, (torch.zeros(2),), (torch.ones(2),), log=log)


class _Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls


class _CountedInABuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return x * self.calls


def counting_in_an_attribute() -> Case:
    """Counts its calls in a Python integer of the module; its output depends on the count."""
    return Case(_Counted(), (torch.ones(2),), (torch.ones(2),), repaired=_CountedInABuffer())


def reading_a_setting() -> Case:
    """Reads a dict outside of it, which changes between the calls."""
    settings = {"scale": 2.0}

    def scaled(x: Tensor) -> Tensor:
        return x * settings["scale"]

    return Case(scaled, (torch.ones(2),), (torch.ones(2),), between=lambda _: settings.update(scale=5.0))


def changing_its_input() -> Case:
    """Writes into its argument, which the caller sees."""

    def doubled(x: Tensor) -> Tensor:
        x.mul_(2)
        return x.sum()

    return Case(doubled, (torch.ones(2),), (torch.tensor([3.0, 4.0]),))


def numpy_call() -> Case:
    """Leaves torch for numpy and comes back."""

    def ranked(x: Tensor) -> Tensor:
        return torch.from_numpy(np.sort(x.numpy())) * 2

    return Case(ranked, (torch.tensor([3.0, 1.0, 2.0]),), (torch.tensor([1.0, 9.0, 5.0]),))


def c_call() -> Case:
    """Leaves torch for a C library and multiplies by its result, which depends on the values."""

    def weighted(x: Tensor) -> Tensor:
        return x * packed_size(x)

    noise = torch.rand(256, generator=torch.Generator().manual_seed(0))
    return Case(weighted, (torch.ones(256),), (noise,))


def dropout_mode() -> Case:
    """Captured in training; then the module is switched to evaluation, where dropout does nothing."""

    def evaluate(captured: nn.Module) -> None:
        captured.eval()

    return Case(nn.Sequential(nn.Dropout(0.5)), (torch.ones(64),), (torch.ones(64),), between=evaluate)


def random_numbers() -> Case:
    """Draws random numbers: after the same seed the same ones as eagerly, and at the next call others."""

    def noised(x: Tensor) -> Tensor:
        return x + F.dropout(torch.rand_like(x), 0.5)

    return Case(noised, (torch.zeros(64),), (torch.zeros(64),))


def string_argument() -> Case:
    """A string argument selects what is computed."""

    def reduced(x: Tensor, how: str) -> Tensor:
        if how == "sum":
            return x.sum()
        return x.mean()

    return Case(reduced, (torch.ones(4), "sum"), (torch.ones(4), "mean"))


CASES: dict[str, Callable[[], Case]] = {
    make.__name__.replace("_", " "): make
    for make in (
        branch_on_data,
        branch_on_shape,
        branch_on_dtype,
        loop_on_data,
        item,
        printing,
        appending_to_a_list,
        counting_in_an_attribute,
        reading_a_setting,
        changing_its_input,
        numpy_call,
        c_call,
        dropout_mode,
        random_numbers,
        string_argument,
    )
}
