"""What a profile shows: the account of a step, what bounds it, and the findings; as text, data or a table."""

import json
import textwrap
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

Spans = list[tuple[float, float]]  # µs on the profile's clock, in order and disjoint

WIDTH = 100
SHOWN = 5  # findings at most
LEAST = 0.01  # of the recorded time: a finding that could bring less is left out
MEASURED, BOUND, ESTIMATE = "measured", "upper bound", "estimate"


@dataclass(frozen=True)
class Finding:
    """One cause, and the most that removing it could bring."""

    finding: str
    part: str  # of the account
    gain_ms: float  # per step
    gain_share: float  # of the recorded time
    where: str
    evidence: str
    advice: str
    sure: str  # MEASURED, BOUND or ESTIMATE
    spans: Spans = field(default_factory=list, repr=False, compare=False)  # when it happened


@dataclass(frozen=True)
class Diagnosis:
    """Where the time of a step goes, and what to change first.

    `account` holds shares of the time from the first to the last device event: compute, and communication, copies and
    idle time while nothing computes; None on a CPU. `idle` divides the idle share by what the host did meanwhile.
    `host` divides a CPU's step. `step_ms` is the median.
    """

    verdict: str
    bound: str
    steps: int
    step_ms: float
    account: dict[str, float] | None
    idle: dict[str, float]
    host: dict[str, float] | None
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]

    @property
    def parts(self) -> dict[str, float]:
        """The account on a GPU or a CPU: shares that add up to 1."""
        return self.host or {} if self.account is None else self.account

    @property
    def table(self) -> pd.DataFrame:
        """The findings, the largest gain first."""
        return pd.DataFrame([_shown(finding) for finding in self.findings], columns=COLUMNS)

    def data(self) -> dict[str, Any]:
        """What `--json` prints."""
        names = ("verdict", "bound", "steps", "step_ms", "account", "idle")
        found = {name: getattr(self, name) for name in names} | ({"host": self.host} if self.host else {})
        return found | {"findings": [_shown(finding) for finding in self.findings], "notes": list(self.notes)}

    def json(self) -> str:
        return json.dumps(self.data(), indent=1)

    def __str__(self) -> str:
        return "\n".join(_lines(self))

    def _repr_html_(self) -> str:
        from .page import fragment

        return fragment(self)


COLUMNS = ["finding", "part", "gain_ms", "gain_share", "where", "evidence", "advice", "sure"]


def _shown(finding: Finding) -> dict[str, Any]:
    return {name: getattr(finding, name) for name in COLUMNS}


def _lines(diagnosis: Diagnosis) -> list[str]:
    wrapped = textwrap.wrap(diagnosis.verdict, WIDTH)
    steps = f"{diagnosis.steps} steps" if diagnosis.steps > 1 else "1 step"
    lines = [*wrapped, "", f"{steps}, median {diagnosis.step_ms:.4g} ms"]
    for name, share in sorted(diagnosis.parts.items(), key=lambda part: -part[1]):
        lines.append(f"  {name:<16}{share:>6.1%}  {'█' * round(50 * share)}")
        if name == "idle":
            lines += [f"    {reason:<24}{part:>6.1%}" for reason, part in diagnosis.idle.items() if part >= 0.001]
    for number, finding in enumerate(diagnosis.findings, 1):
        gain = f"up to {finding.gain_ms:.3g} ms a step ({finding.gain_share:.0%}), {finding.sure}"
        lines += ["", f"{number}. {finding.finding}: {gain}"]
        for text in (finding.where, finding.evidence, f"→ {finding.advice}"):
            lines += textwrap.wrap(text, WIDTH, initial_indent="   ", subsequent_indent="   ") if text else []
    if not diagnosis.findings:
        lines += ["", f"No finding could bring {LEAST:.0%} or more."]
    for note in diagnosis.notes:
        lines += textwrap.wrap(note, WIDTH, initial_indent="note: ", subsequent_indent="      ")
    return lines
