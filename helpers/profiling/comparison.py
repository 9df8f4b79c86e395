"""Two diagnoses of one loop, before and after a change: which part of the step shrank, which findings are gone?"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .diagnosis import Diagnosis, Finding, milliseconds, printable, wrapped

NO_DIFFERENCE = 0.03  # of a step: less is within what two recordings of one loop differ


@dataclass(frozen=True, repr=False)
class Comparison:
    """A step before and after, in ms; a change is negative where time was saved."""

    before: Diagnosis
    after: Diagnosis

    @property
    def parts(self) -> dict[str, tuple[float, float]]:
        """ms a step of each part of the account, before and after; they add up to the step's."""
        names = dict.fromkeys([*self.before.parts, *self.after.parts])
        return {name: (_ms(self.before, name), _ms(self.after, name)) for name in names}

    @property
    def gained_ms(self) -> float:
        return self.before.step_ms - self.after.step_ms

    @property
    def gone(self) -> list[Finding]:
        """What was found before and isn't now."""
        return [finding for finding in _all(self.before) if finding.finding not in _names(self.after)]

    @property
    def left(self) -> list[Finding]:
        """What is still found."""
        return [finding for finding in _all(self.after) if finding.finding in _names(self.before)]

    @property
    def new(self) -> list[Finding]:
        return [finding for finding in _all(self.after) if finding.finding not in _names(self.before)]

    @property
    def verdict(self) -> str:
        """One sentence on the step, one on the part that changed most, one on the findings that are gone."""
        return " ".join(_sentences(self))

    def data(self) -> dict[str, Any]:
        """What `--json` prints for two profiles."""
        named = {name: [finding.finding for finding in getattr(self, name)] for name in ("gone", "left", "new")}
        step = {"before": self.before.step_ms, "after": self.after.step_ms}
        parts = {name: {"before": before, "after": after} for name, (before, after) in self.parts.items()}
        changed = {"step_ms": step, "parts_ms": parts, "gained_ms": self.gained_ms}
        return {"verdict": self.verdict} | changed | named

    def json(self) -> str:
        return json.dumps(self.data(), indent=1)

    def __repr__(self) -> str:
        return "\n".join(_lines(self))


def compare(before: Diagnosis, after: Diagnosis) -> Comparison:
    """What changed between two profiles of one loop; a ValueError if only one of them is of a GPU."""
    if (before.account is None) != (after.account is None):
        raise ValueError("one profile has device events and the other has none: their steps can't be compared")
    return Comparison(before, after)


def _ms(diagnosis: Diagnosis, part: str) -> float:
    return diagnosis.parts.get(part, 0.0) * diagnosis.step_ms


def _all(diagnosis: Diagnosis) -> tuple[Finding, ...]:
    return diagnosis.findings + diagnosis.further


def _names(diagnosis: Diagnosis) -> set[str]:
    return {finding.finding for finding in _all(diagnosis)}


def _sentences(comparison: Comparison) -> Iterator[str]:
    before, after, gained = comparison.before.step_ms, comparison.after.step_ms, comparison.gained_ms
    change = f"{milliseconds(abs(gained))} ({abs(gained) / before:.0%}) {'less' if gained > 0 else 'more'}"
    lengths = f"{milliseconds(after)} a step instead of {milliseconds(before)}"
    yield f"{lengths}: {'no difference' if abs(gained) < NO_DIFFERENCE * before else change}."
    changes = {name: later - earlier for name, (earlier, later) in comparison.parts.items()}
    for most, sign, verb in ((min, -1, "shrank"), (max, 1, "grew")):
        name = most(changes, key=changes.__getitem__, default=None)
        if name and sign * changes[name] >= NO_DIFFERENCE * before:
            yield f"{name[0].upper()}{name[1:]} {verb} by {milliseconds(abs(changes[name]))}."
    names = ", ".join(f'"{finding.finding}"' for finding in comparison.gone)
    yield f"Gone: {names}." if names else "No finding is gone."


def _lines(comparison: Comparison) -> Iterator[str]:
    yield from wrapped(comparison.verdict)
    yield from ("", f"  {'ms a step':<28}{'before':>10}{'after':>10}{'change':>10}")
    step = (comparison.before.step_ms, comparison.after.step_ms)
    digits = 1 if step[0] >= 100 else 3
    for name, (before, after) in {**comparison.parts, "step": step}.items():
        figures = f"{before:>10,.{digits}f}{after:>10,.{digits}f}{after - before:>+10,.{digits}f}"
        yield printable(f"  {name[:27]:<28}{figures}")
    for name, findings in (("gone", comparison.gone), ("left", comparison.left), ("new", comparison.new)):
        yield from ("",) if findings else ()
        for finding in findings:
            yield from wrapped(f"{finding.finding}: {finding.gain}", f"  {name:<6}")
