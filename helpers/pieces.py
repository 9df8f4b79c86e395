"""A piece that a course's handout leaves to its reader: a stub, until a cell calls `use` with the reader's own.

    from helpers.pieces import use
    use(DynamicScaler)      # from here on `helpers.amp.DynamicGradScaler` is this class, for our trainers, too

`dlspeed course` writes stubs in the place of pieces. In a whole checkout nothing is cut, and `use` changes nothing.
A stub that nothing was used for looks for the exercise's name in `mine.py`, where a reader keeps what other notebooks
and scripts need.
"""

import abc
import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

# How a solution takes the place of a piece that is called otherwise.
FORMS: dict[str, Callable] = dict.fromkeys(("first_fit", "best_fit"), lambda fit, *given: _flat(fit(*given)))
FORMS |= dict.fromkeys(
    ("packed_attention", "_per_document"),
    lambda attend, layout, *_: lambda q, k, v, dropout=0.0: attend(q, k, v, layout.offsets),
)
FORMS["sinusoids"] = lambda make, length, width, device=None: make(width, length).table.to(device=device)
_CLASSES: dict[str, list[type]] = {}  # stubs by the exercise whose solution takes their place
_FUNCTIONS: dict[str, Callable] = {}  # solutions by name


def use(*solutions: Any) -> None:
    """Let solutions, by the names of their exercises, take the place of the library's pieces in this process."""
    for solution in solutions:
        name = solution.__name__
        _FUNCTIONS[name] = solution
        for stub in _CLASSES.get(name, ()):
            stub.__bases__ = (_taking_what_it_knows(solution),)
            abc.update_abstractmethods(stub)  # which Python counts when it makes a class


def cut(exercise: str) -> Callable[[Any], Any]:
    """Decorate the stub of a class or a function: until the exercise's solution is used, it raises, naming it."""

    def found() -> None:
        if importlib.util.find_spec("mine") and hasattr(mine := importlib.import_module("mine"), exercise):
            use(getattr(mine, exercise))
        else:
            about = f"solve {exercise}, then `use({exercise})`, or put it into mine.py"
            raise NotImplementedError(f"the handout leaves this piece to you: {about}")

    def begin(self: Any, *given: Any, **named: Any) -> None:
        found()
        self.__init__(*given, **named)  # its class has another base now

    def solved() -> Callable:
        if exercise not in _FUNCTIONS:
            found()
        return _FUNCTIONS[exercise]

    def call(*given: Any, **named: Any) -> Any:
        return _called(solved(), given, named)

    def decorate(piece: Any) -> Any:
        if piece.__name__ in FORMS:
            return functools.wraps(piece)(lambda *given, **named: FORMS[piece.__name__](solved(), *given, **named))
        if not isinstance(piece, type):
            return functools.wraps(piece)(call)
        if issubclass(piece, torch.autograd.Function):  # of which nobody makes an instance
            whole, missing = torch.autograd.Function, {"forward": lambda *_: found()}
        else:
            whole, missing = piece.__base__, {"__init__": begin}
        empty = type("Missing", (whole,), missing)
        stub = type(piece)(piece.__name__, (empty,), {"__module__": piece.__module__, "__doc__": piece.__doc__})
        _CLASSES.setdefault(exercise, []).append(stub)
        return stub

    return decorate


def _taking_what_it_knows(solution: Any) -> Any:
    """A class that drops arguments of the library's piece that the solution doesn't take, such as a seed."""
    if issubclass(solution, torch.autograd.Function):
        return solution

    def begin(self: Any, *given: Any, **named: Any) -> None:
        _called(functools.partial(solution.__init__, self), given, named)

    return type(solution)(solution.__name__, (solution,), {"__init__": begin})


def _flat(packs: list) -> tuple[np.ndarray, np.ndarray]:
    """A list of packs as the library's: the samples pack by pack, and where each pack begins and the last ends."""
    return np.array([index for pack in packs for index in pack]), np.cumsum([0, *map(len, packs)])


def _called(function: Callable, given: tuple, named: dict[str, Any]) -> Any:
    parameters = inspect.signature(function).parameters.values()
    kinds = [parameter.kind for parameter in parameters]
    if inspect.Parameter.VAR_POSITIONAL not in kinds:
        given = given[: sum(kind is not inspect.Parameter.KEYWORD_ONLY for kind in kinds)]
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        named = {name: value for name, value in named.items() if name in {each.name for each in parameters}}
    return function(*given, **named)
