"""What a check says: a line for each thing that must hold."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from ..timing import relative_error


@dataclass
class Check:
    """What held and what didn't, a line each."""

    name: str
    lines: list[tuple[str, str]] = field(default_factory=list)  # (verdict, what it is about)
    attempted: bool = True

    @property
    def passed(self) -> bool:
        return self.attempted and all(verdict == "holds" for verdict, _ in self.lines)

    def holds(self, about: str, test: Callable[[], Any]) -> None:
        """One line. `test` returns whether it holds, or that and a figure; what it raises is told as a failure."""
        if not self.attempted:
            return
        try:
            result = test()
        except NotImplementedError:
            self.attempted = False
            return
        except Exception as error:
            reason = str(error).strip().partition("\n")[0][:120]
            self.lines.append(("FAILS", f"{about}: {type(error).__name__}: {reason}"))
            return
        passed, figure = result if isinstance(result, tuple) else (result, "")
        self.lines.append(("holds" if passed else "FAILS", f"{about}: {figure}" if figure else about))

    def summary(self) -> str:
        """One line without figures, the same on every machine."""
        if not self.attempted:
            return f"{self.name}: not attempted"
        failed = [about.partition(":")[0] for verdict, about in self.lines if verdict == "FAILS"]
        count = f"{self.name}: {len(self.lines) - len(failed)} of {len(self.lines)} checks hold"
        return f"{count}; not: {'; '.join(failed)}" if failed else count

    def __repr__(self) -> str:
        if not self.attempted:
            return f"{self.name}: not attempted"
        return "\n".join([self.name, *(f"  {verdict}  {about}" for verdict, about in self.lines)])


def close(tensors: Iterable[Tensor], expected: Iterable[Tensor], tolerance: float) -> tuple[bool, str]:
    """Whether each tensor's relative error is at most the tolerance, and the largest one."""
    error = float(np.max([relative_error(a, b) for a, b in zip(tensors, expected, strict=True)]))
    return error <= tolerance, f"relative error {error:.1e}"


def name_of(implementation: Any) -> str:
    return getattr(implementation, "__name__", type(implementation).__name__)
