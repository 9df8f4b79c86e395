"""Checks of what captures a function: a tracer with guards, a function with graph breaks."""

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .check import Checker, Line, at_most, close, equals

Function = Callable[..., Tensor]


def _branch(x: Tensor, y: Tensor) -> Tensor:
    return -y if x.sum() < 0 else y / (1 + y.abs())


def _loop(x: Tensor) -> Tensor:
    while x.sum() > 1:
        x = x / 2
    return x


def _centred(x: Tensor) -> Tensor:
    return x * 2 if x.shape[0] < 4 else x - x.mean(0)


def _half(x: Tensor) -> Tensor:
    return x / 2 if x.is_floating_point() else x // 2


def _largest(x: Tensor) -> Tensor:
    return x / x.max().item()


def _ranked(x: Tensor) -> Tensor:
    return torch.from_numpy(np.sort(x.numpy())) * 2


A, Y = torch.tensor([1.0, 2.0]), torch.tensor([-1.0, 3.0])
# What is captured, with an example and with arguments that take another path.
FUNCTIONS: dict[str, tuple[Function, tuple[Tensor, ...], tuple[Tensor, ...]]] = {
    "branch on data": (_branch, (A, Y), (-A, Y)),
    "loop on data": (_loop, (A,), (8 * A,)),
    "branch on shape": (_centred, (torch.ones(6, 2),), (torch.ones(2, 2),)),
    "branch on dtype": (_half, (A,), (torch.tensor([3, 5]),)),
    "item": (_largest, (A,), (8 * A,)),
    "numpy": (_ranked, (A,), (-A,)),
}


WITHOUT_VALUES = "branch on data", "branch on shape", "branch on dtype"  # on one path, nothing else is a constant


@Checker
def guarded_trace(capture: Callable[[Function, tuple[Tensor, ...]], Function], guards: bool = True) -> Iterator[Line]:
    """`capture(fn, example)`, a function that gives what fn gives, and runs fn again only where its path is another.

    Without `guards` it is asked for the path of the example alone.
    """

    def called(fn: Function, sets: Sequence[tuple[Tensor, ...]]) -> list[Tensor]:
        captured = capture(fn, tuple(x.clone() for x in sets[0]))
        return [captured(*(x.clone() for x in arguments)) for arguments in sets]

    def right(fn: Function, sets: Sequence[tuple[Tensor, ...]], given: list[Tensor]) -> tuple[bool, str]:
        return close(given, [fn(*arguments) for arguments in sets], 1e-6)

    def runs() -> int:
        count = []

        def counted(x: Tensor, y: Tensor) -> Tensor:
            count.append(1)
            return _branch(x, y)

        captured = capture(counted, (A, Y))
        before = len(count)
        for factor in (1, 2, 3):
            captured(factor * A, Y)
        return len(count) - before

    about = "three calls on the captured path don't run the function"
    yield Line(about, runs, at_most(0, "runs"), "Where all guards hold, the captured graph is what runs.")
    for name in FUNCTIONS if guards else WITHOUT_VALUES:
        fn, example, other = FUNCTIONS[name]
        hint = "Which values did the function ask for that are no tensors? What are they for these arguments?"
        sets = (example, other if guards else tuple(2 * x for x in example), example)
        yield Line(
            f"{name}: the example, {'another path' if guards else 'other numbers'}, the example again",
            partial(called, fn, sets),
            partial(right, fn, sets),
            hint,
            conditional=True,
        )


@Checker
def graphs(fn: Function, count: int = 3) -> Iterator[Line]:
    """A function of x (4,) that Dynamo captures in so many graphs, and that gives the same compiled."""
    x = torch.tensor([1.0, -2.0, 3.0, 0.5])

    @cache
    def compiled() -> list:
        torch._dynamo.reset()
        captured: list[Any] = []

        def backend(graph: torch.fx.GraphModule, _example: Any) -> Function:
            captured.append(graph)
            return graph.forward

        whole = torch.compile(fn, backend=backend)
        return [whole(x.clone()), fn(x.clone()), len(captured)]

    hint = "What asks for a number, or does what no graph can, breaks the graph; an empty graph doesn't count."
    yield Line(f"Dynamo makes {count} graphs", compiled, lambda given: equals(count)(given[2]), hint)
    about = "compiled, it gives the same"
    yield Line(about, compiled, lambda given: close(given[:1], given[1:2], 1e-5), conditional=True)
