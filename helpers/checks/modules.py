"""A check of what times a model by module: modules that sleep say what is right, on a busy machine, too."""

import contextlib
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .check import Checker, Line, at_most, equals

RUNS, SLACK_MS, SLACK = 12, 5.0, 0.1  # blocks, of which the nearest counts; what a time may differ from its sleep
NAMES = "", "twice", "block", "block.first", "block.last"  # as `named_modules` has them


class Asleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, module: "Sleeper") -> Tensor:
        ctx.module = module
        module.sleep(0)
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx.module.sleep(1)
        return 2 * gradient, None


class Sleeper(nn.Module):
    """Sleeps in forward, 0, and backward, 1; `slept` are ms in all, which on a busy machine are more than `ms`."""

    def __init__(self, ms: list[int]) -> None:
        super().__init__()
        self.ms, self.slept = ms, [0.0, 0.0]

    def sleep(self, direction: int) -> None:
        begun = time.perf_counter()
        time.sleep(self.ms[direction] / 1000)
        self.slept[direction] += 1000 * (time.perf_counter() - begun)

    def forward(self, x: Tensor) -> Tensor:
        return Asleep.apply(x, self)


class Model(nn.Module):
    """A module that is called twice, then one that holds two."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        drawn = np.random.default_rng(seed).integers(15, 40, (3, 2)).tolist()
        self.twice = Sleeper(drawn[0])
        self.sleepers = [Sleeper(ms) for ms in drawn]
        self.twice, first, last = self.sleepers
        self.block = nn.Sequential(OrderedDict(first=first, last=last))

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.twice(self.twice(x)))

    def slept(self) -> np.ndarray:
        """Milliseconds, (2, NAMES)."""
        twice, first, last = (np.array(part.slept) for part in self.sleepers)
        return np.stack([twice + first + last, twice, first + last, first, last], axis=1)


def _hooks(model: nn.Module) -> int:
    kinds = [kind for kind in vars(model) if "hooks" in kind]
    return sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)


@Checker
def module_times(make: Callable[[nn.Module], Any], seed: int = 0) -> Iterator[Line]:
    """`make(model)`, a context manager whose `times()` afterwards has by module's name (forward ms, backward ms).

    Both are sums over the calls in the block, and include the modules that a module calls.
    """

    def run(profiled: bool = True) -> tuple[np.ndarray, list[Tensor], int]:
        """What the profiler says and what was slept, (2, 2, NAMES); output and gradient; how many hooks are left."""
        model, x = Model(seed), torch.ones(3, requires_grad=True)
        profiler: Any = make(model) if profiled else contextlib.nullcontext()
        with profiler:
            y = model(x)
            (gradient,) = torch.autograd.grad(y.sum(), x)
        times = dict(profiler.times()) if profiled else dict.fromkeys(NAMES, (0, 0))
        given = np.array([times[name] for name in NAMES], dtype=float).T
        return np.stack([given, model.slept()]), [y, gradient], _hooks(model)

    @cache
    def nearest() -> list[list[list[float]]]:
        best = run()[0]
        for _ in range(RUNS - 1):
            if np.all(_within(*best)):
                break
            best = min(best, run()[0], key=lambda pair: abs(pair[0] - pair[1]).max())
        return best.tolist()

    def near(direction: int) -> Callable[[list], tuple[bool, str]]:
        def judge(pair: list) -> tuple[bool, str]:
            rows = list(zip(NAMES, pair[0][direction], pair[1][direction], strict=True))
            wrong = [f"{name or 'the model'} {ms:.0f} ms" for name, ms, slept in rows if not _within(ms, slept)]
            return not wrong, f"wrong: {', '.join(wrong)}" if wrong else ""

        return judge

    hint = "A clock starts before a module's call and stops after it: two calls of a module add up."
    yield Line("forward times by module", nearest, near(0), hint)
    hint = "There are hooks before and after a module's backward, too; which of them sees the whole of it?"
    yield Line("backward times by module", nearest, near(1), hint)
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


def _within(ms: Any, slept: Any) -> Any:
    return abs(ms - slept) <= SLACK * slept + SLACK_MS


def _after_an_error(make: Callable[[nn.Module], Any], seed: int) -> str:
    model = Model(seed)
    try:
        with make(model):
            raise KeyError
    except KeyError:
        return f"KeyError, {_hooks(model)} hooks"
    return f"no error, {_hooks(model)} hooks"
