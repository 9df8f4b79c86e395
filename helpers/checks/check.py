"""What a check says: a line for each thing that must hold.

A check is written as a generator of lines. `compute` of a line runs beside the implementation and returns numbers,
texts and tensors; `judge` compares them with what is right. A notebook runs one after the other. `dlspeed grade` runs
`compute` in a process of the solution's own and judges in another, where the solution can read and change nothing.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..lab.timing import relative_error

GIVES, RAISES, MISSING, REPEATED = "gives", "raises", "is missing", "repeats"  # the kinds of answers


@dataclass(frozen=True)
class Line:
    """One thing that must hold. `judge` returns whether it does, or that and a figure, which never is the right one.
    None: what is right isn't known here.

    A `conditional` one holds for what does nothing, too: it has points only where all that are not conditional hold.
    """

    about: str
    compute: Callable[[], Any]
    judge: Callable[[Any], Any] = bool
    hint: str | Callable[[Any], str] = ""  # one that depends on what was given is called with it
    conditional: bool = False


@dataclass
class Check:
    """What held and what didn't, a line each; `hint` is that of the first line that didn't."""

    name: str
    lines: list[tuple[str, str]] = field(default_factory=list)  # (holds, FAILS, noted or "as above", its words)
    attempted: bool = True
    hint: str = ""

    @property
    def passed(self) -> bool:
        return self.attempted and all(verdict == "holds" for verdict, _ in self.lines)

    def add(self, line: Line, kind: str, value: Any) -> None:
        if kind == GIVES:
            try:
                result = line.judge(value)
            except Exception as error:
                kind, value = RAISES, told(error)
        if kind == RAISES:
            result = False, value
        passed, figure = result if isinstance(result, tuple) else (result, "")
        verdict = "noted" if passed is None else "holds" if passed else "FAILS"
        if verdict == "FAILS" and not self.hint:
            self.hint = line.hint if isinstance(line.hint, str) else line.hint(value) if kind == GIVES else ""
        self.lines.append((verdict, f"{line.about}: {figure}" if figure else line.about))

    def summary(self) -> str:
        """One line without figures, the same on every machine."""
        if not self.attempted:
            return f"{self.name}: not attempted"
        failed = [about.partition(":")[0] for verdict, about in self.lines if verdict == "FAILS"]
        count = f"{self.name}: {sum(held == 'holds' for held, _ in self.lines)} of {len(self.lines)} checks hold"
        return f"{count}; not: {'; '.join(failed)}" if failed else count

    def __repr__(self) -> str:
        if not self.attempted:
            return f"{self.name}: not attempted"
        hint = [f"  hint   {self.hint}"] if self.hint else []
        return "\n".join([self.name, *(f"  {verdict}  {about}" for verdict, about in self.lines), *hint])


class Checker:
    """A generator of lines as a check: called with an implementation, it says what holds."""

    def __init__(self, lines: Callable[..., Iterator[Line]]) -> None:
        functools.update_wrapper(self, lines)
        self.lines = lines

    def __call__(self, implementation: Any, *arguments: Any, **options: Any) -> Check:
        lines = list(self.lines(implementation, *arguments, **options))
        return judged(name_of(implementation), lines, answers(lines))


def answers(lines: Iterable[Line]) -> Iterator[tuple[str, Any]]:
    """What the implementation gives for each line, as a kind and a value that `torch.load` reads without pickle."""
    failed: list[Callable] = []
    attempted = False
    for line in lines:
        if line.compute in failed:
            yield REPEATED, ""
            continue
        try:
            yield GIVES, plain(line.compute())
        except (Exception, SystemExit) as error:
            if isinstance(error, NotImplementedError) and not attempted:
                yield MISSING, ""
                return
            failed.append(line.compute)
            yield RAISES, told(error)
        attempted = True


def judged(name: str, lines: Iterable[Line], given: Iterable[tuple[str, Any]]) -> Check:
    """The check of an implementation from its answers; a missing one fails, an error is told once."""
    check, given, errors = Check(name), iter(given), set()
    for line in lines:
        kind, value = next(given, (REPEATED, ""))
        if kind == MISSING:
            return Check(name, attempted=False)
        if kind == GIVES or (kind == RAISES and value not in errors):
            check.add(line, kind, value)
            errors |= {value} if kind == RAISES else set()
        elif check.passed:  # nothing has failed so far
            check.add(line, RAISES, "no answer")
        else:
            check.lines.append(("as above", line.about))
    return check


def plain(value: Any) -> Any:
    """Tensors without their graph, lists, numbers and texts; what else there is becomes its text."""
    if isinstance(value, Tensor):
        return value.detach().cpu().as_subclass(Tensor).clone()
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, bytes):
        return value.decode("latin-1")
    if isinstance(value, np.generic):
        return value.item()
    return value if isinstance(value, (bool, int, float, str)) else str(value)


def close(tensors: Iterable[Tensor], expected: Iterable[Tensor], tolerance: float) -> tuple[bool, str]:
    """Whether each tensor's relative error is at most the tolerance, and the largest one or the first that differs."""
    largest = 0.0
    for ours, right in zip(tensors, expected, strict=True):
        if not isinstance(ours, Tensor):
            return False, f"{ours} instead of a tensor"
        ours, right = ours.detach(), right.detach()
        if ours.shape != right.shape:
            return False, f"shape {tuple(ours.shape)} instead of {tuple(right.shape)}"
        error = relative_error(ours, right)
        if not error <= tolerance:
            differences = (ours.double() - right.double()).abs().nan_to_num(torch.inf)
            place = tuple(int(i) for i in np.unravel_index(int(differences.argmax()), right.shape))
            there = f" at {list(place)}, where it is farthest off" if place else ""
            return False, f"wrong: {float(ours[place]):.4g}{there}"
        largest = max(largest, error)
    return True, f"relative error {largest:.1e}"


def equals(right: Any) -> Callable[[Any], tuple[bool, str]]:
    """A judge of numbers and texts."""
    return lambda given: (given == right, f"{given}")


def at_most(limit: float, unit: str) -> Callable[[float], tuple[bool, str]]:
    """A judge of counts and shares."""

    def judge(given: float) -> tuple[bool, str]:
        number = f"{given:,}" if isinstance(given, int) else f"{given:.3g}"
        return given <= limit, f"{number} {unit}" if given <= limit else f"{number} {unit}, at most {limit:,}"

    return judge


def name_of(implementation: Any) -> str:
    return getattr(implementation, "__name__", type(implementation).__name__)


def told(error: BaseException) -> str:
    """An error in one short line."""
    reason = str(error).strip().partition("\n")[0][:120]
    return f"{type(error).__name__}: {reason}" if reason else type(error).__name__
