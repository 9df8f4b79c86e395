"""A check of what times a model by module: modules that sleep say what is right, on a busy machine, too."""

import time
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .check import Checker, Line, at_most, equals

RUNS, SLACK_MS, SLACK = 3, 8.0, 0.25  # blocks, of which the fastest counts; what a time may be above its sleep
NAMES = "", "twice", "block", "block.first", "block.last"  # as `named_modules` has them


class Asleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.seconds = backward_s
        time.sleep(forward_s)
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        time.sleep(ctx.seconds)
        return 2 * gradient, None, None


class Sleeper(nn.Module):
    def __init__(self, forward_ms: int, backward_ms: int) -> None:
        super().__init__()
        self.ms = forward_ms, backward_ms

    def forward(self, x: Tensor) -> Tensor:
        return Asleep.apply(x, *(ms / 1000 for ms in self.ms))


class Model(nn.Module):
    """A module that is called twice, then one that holds two."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        drawn = np.random.default_rng(seed).integers(15, 40, (3, 2)).tolist()
        self.twice = Sleeper(*drawn[0])
        self.block = nn.Sequential()
        self.block.add_module("first", Sleeper(*drawn[1]))
        self.block.add_module("last", Sleeper(*drawn[2]))

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.twice(self.twice(x)))

    def right(self, direction: int) -> list[float]:
        """Milliseconds of `NAMES` forward, 0, or backward, 1."""
        twice, first, last = (part.ms[direction] for part in (self.twice, self.block.first, self.block.last))
        return [2 * twice + first + last, 2 * twice, first + last, first, last]


def _hooks(model: nn.Module) -> int:
    kinds = [kind for kind in vars(model) if "hooks" in kind]
    return sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)


@Checker
def module_times(make: Callable[[nn.Module], Any], seed: int = 0) -> Iterator[Line]:
    """`make(model)`, a context manager whose `times()` afterwards has by module's name (forward ms, backward ms).

    Both are sums over the calls in the block, and include the modules that a module calls.
    """

    def run(profiled: bool = True) -> tuple[dict[str, tuple[float, float]], list[Tensor], int]:
        model, x = Model(seed), torch.ones(3, requires_grad=True)
        if not profiled:
            y = model(x)
            return {}, [y, *torch.autograd.grad(y.sum(), x)], 0
        profiler = make(model)
        with profiler:
            y = model(x)
            gradient = torch.autograd.grad(y.sum(), x)
        return dict(profiler.times()), [y, *gradient], _hooks(model)

    @cache
    def fastest() -> list[list[float]]:
        """Forward and backward milliseconds of `NAMES`."""
        measured = [[times[name] for name in NAMES] for times in (run()[0] for _ in range(RUNS))]
        return np.min(np.array(measured, dtype=float), axis=0).T.tolist()

    def near(direction: int) -> Callable[[list[list[float]]], tuple[bool, str]]:
        def judge(given: list[list[float]]) -> tuple[bool, str]:
            pairs = zip(NAMES, given[direction], Model(seed).right(direction), strict=True)
            wrong = [f"{n or 'the model'} {ms:.0f} ms" for n, ms, low in pairs if not _within(ms, low)]
            return not wrong, f"wrong: {', '.join(wrong)}" if wrong else ""

        return judge

    hint = "A clock starts before a module's call and stops after it: two calls of a module add up."
    yield Line("forward times by module", fastest, near(0), hint)
    hint = "There are hooks before and after a module's backward, too; which of them sees the whole of it?"
    yield Line("backward times by module", fastest, near(1), hint)
    about, hint = "outputs and gradients are as without it", "A hook that returns something replaces what it was given."
    yield Line(
        about,
        lambda: all(torch.equal(a, b) for a, b in zip(run()[1], run(profiled=False)[1], strict=True)),
        hint=hint,
        conditional=True,
    )
    hint = "Each register_… returns a handle that removes it."
    yield Line("after the block no hook is left", lambda: run()[2], at_most(0, "hooks"), hint, conditional=True)
    about = "an error in the block comes through, and leaves no hook"
    yield Line(about, lambda: _after_an_error(make, seed), equals("KeyError, 0 hooks"), hint, conditional=True)


def _within(ms: float, low: float) -> bool:
    return 0.95 * low - 1 <= ms <= (1 + SLACK) * low + SLACK_MS


def _after_an_error(make: Callable[[nn.Module], Any], seed: int) -> str:
    model = Model(seed)
    try:
        with make(model):
            raise KeyError
    except KeyError:
        return f"KeyError, {_hooks(model)} hooks"
    return f"no error, {_hooks(model)} hooks"
