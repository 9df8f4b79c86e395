"""What a profile shows: the account of a step, what bounds it, and the findings; as text, data or a table."""

import json
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd

from ..script.iterations import PHASE
from ..script.stacks import place
from .account import Spans
from .trace import Note

WIDTH = 100
MOST_FINDINGS = 3  # in the text; the others are a line each
# What broader findings, too, are made of: it gives them its remedy where it has half of their gain
SPECIFIC = {"products one by one", "losses one by one", "norms one by one", "missing package"}
LEAST = 0.01  # of the recorded time: a finding that could bring less is left out
MEASURED, ESTIMATE = "measured", "estimate"


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
    sure: str  # MEASURED or ESTIMATE
    spans: Spans = field(default_factory=list, repr=False, compare=False)  # when it happened
    detailed: bool = field(default=False, compare=False)  # whether only shapes or stacks show it
    urgent: bool = field(default=False, compare=False)  # it ends the training
    option: bool = field(default=False, compare=False)  # no fault, but what could be faster still
    spread: bool = field(default=False, compare=False)  # over many lines, so that no single change takes it away
    kinds: Mapping[str, float] = field(default_factory=dict, repr=False, compare=False)  # shares in other iterations

    @property
    def title(self) -> str:
        return f"option: {self.finding}" if self.option else self.finding

    @property
    def gain(self) -> str:
        share = f"{self.gain_share:.{0 if self.gain_share >= 0.01 else 1}%}"
        return f"up to {milliseconds(self.gain_ms)} a step ({share}; {self.sure})"


@dataclass(frozen=True)
class Line:
    """A line of the user's code, and the share of the wall time that it took while nothing was recorded."""

    where: str
    source: str
    activity: str
    share: float


@dataclass(frozen=True)
class Kind:
    """Iterations of a kind, and their share of the wall time: an ordinary step in each, of others what is beyond it.

    `spent` are shares of the wall time by activity, `where` the file, line and function that most of it passes through;
    `findings` what the findings explain of the share, and `unexplained` what none does.
    """

    name: str
    share: float
    count: int
    took_ms: float
    spent: Mapping[str, float]
    where: tuple[str, int, str] | None = None
    collected: float = 0.0  # of the wall time, in Python's garbage collector
    findings: tuple[tuple[str, float], ...] = ()
    unexplained: float = 0.0


Point = tuple[float, float, str]  # an iteration: when it ended, in seconds, how many it took, its kind


@dataclass(frozen=True)
class Wall:
    """The time from the first iteration to the stop, but for what was recorded and what other programs had the cores.

    `points` are iterations for a page.
    """

    seconds: float
    recorded_s: float
    others_s: float
    kinds: tuple[Kind, ...]
    points: Sequence[Point] = field(default=(), repr=False)


@dataclass(frozen=True, repr=False)
class Diagnosis:
    """Where the time of a step goes, and what to change first: the first of the `findings`, as the `verdict` says.

    `account` holds shares of the time from the first to the last device event: compute, and communication, copies and
    idle time while nothing computes; None on a CPU. `idle` divides the idle share by what the host did meanwhile.
    `host` divides a CPU's step. `step_ms` is the median. `source` is the profile's file, for a folder that of the rank.
    """

    verdict: str
    bound: str
    steps: int
    step_ms: float
    account: dict[str, float] | None
    idle: dict[str, float]
    host: dict[str, float] | None
    findings: tuple[Finding, ...]
    notes: tuple[Note, ...]
    warnings: tuple[Note, ...] = ()  # why the profile may mislead, and what to record again
    source: Path | None = None
    lines: tuple[Line, ...] = ()  # the user's most expensive, of the loop before it was recorded
    wall: Wall | None = None
    files: Mapping[str, str] = field(default_factory=dict)  # paths of the user's files, by their names in findings

    @property
    def parts(self) -> dict[str, float]:
        """The account on a GPU or a CPU: shares that add up to 1."""
        return self.host or {} if self.account is None else self.account

    @property
    def table(self) -> pd.DataFrame:
        """All findings, the largest gain first."""
        return pd.DataFrame([_row(finding) for finding in self.findings], columns=COLUMNS)

    @property
    def remarks(self) -> list[str]:
        """The notes, and a line for each further finding."""
        rest = self.findings[MOST_FINDINGS:]
        further = [f"further: {f.title} at {f.where}, {f.gain}: {f.advice}" for f in rest]
        return [*(note.text for note in self.notes), *further]

    def data(self) -> dict[str, Any]:
        """What `--json` prints."""
        data = {name: getattr(self, name) for name in ("verdict", "bound", "steps", "step_ms", "account", "idle")}
        warnings = [[warning.kind, warning.text] for warning in self.warnings]
        lines = [asdict(line) for line in self.lines]
        some: dict[str, Any] = {"host": self.host, "lines": lines, "warnings": warnings}
        some["wall"] = self.wall and asdict(replace(self.wall, points=()))
        data |= {name: value for name, value in some.items() if value}
        notes = [note.text for note in self.notes]
        return data | {"findings": [_row(finding) for finding in self.findings], "notes": notes}

    def json(self) -> str:
        return json.dumps(self.data(), indent=1)

    def __repr__(self) -> str:
        return "\n\n".join("\n".join(block) for block in _blocks(self) if block)


def change_first(findings: Sequence[Finding]) -> str:
    """The verdict's end, made from the first finding, of which options come last."""
    if not findings:
        return ""
    first, where = findings[0], textwrap.shorten(findings[0].where, WIDTH - 40, placeholder=" …")
    promise = "which ends the training" if first.urgent else f"up to {first.gain_share:.0%} of the time"
    do = "Nothing wrong was found. What could be faster still" if first.option else "Change first"
    return f" {do}: {first.finding}, {promise} ({where})."


COLUMNS = ["finding", "part", "gain_ms", "gain_share", "where", "evidence", "advice", "sure", "option"]


def _row(finding: Finding) -> dict[str, Any]:
    return {name: getattr(finding, name) for name in COLUMNS}


def _blocks(diagnosis: Diagnosis) -> Iterator[list[str]]:
    """What is printed, in lines; an empty line stands between two blocks."""
    yield wrapped(diagnosis.verdict)
    if diagnosis.wall:
        yield list(_wall(diagnosis.wall, recorded(diagnosis)))
    else:
        yield [recorded(diagnosis)]
    if not diagnosis.wall or diagnosis.account:
        yield list(_bars(diagnosis))
    if diagnosis.lines:
        dearest = ["most expensive lines of the loop as it runs unrecorded:"]
        for line in diagnosis.lines:
            text = textwrap.shorten(f"{line.where}  {line.source}", WIDTH - 30, placeholder=" …")
            dearest += wrapped(f"{text}  ({line.activity})", f"  {line.share:4.0%}  ")
        yield dearest
    yield [line for warning in diagnosis.warnings for line in wrapped(warning.text, " ! ")]
    for number, finding in enumerate(diagnosis.findings[:MOST_FINDINGS], 1):
        title = wrapped(f"{finding.title}: {finding.gain}", f"{number}. ")
        where, evidence = wrapped(finding.where, "   where     "), wrapped(finding.evidence, "   evidence  ")
        yield title + where + evidence + wrapped(finding.advice, " → advice    ")
    if not diagnosis.findings:
        yield [f"No finding could bring {LEAST:.0%} or more."]
    yield [line for note in diagnosis.remarks for line in wrapped(note, "note: ")]


def _wall(wall: Wall, steps: str) -> Iterator[str]:
    """A bar for each kind of iterations, beginning where the one above ends, and what explains it."""
    first = wall.kinds[0]
    others = f"; {wall.others_s:.1f} s that other programs had the cores don't count" if wall.others_s >= 0.1 else ""
    yield from wrapped(
        f"wall time: {wall.seconds:.1f} s of {first.count:,} iterations ({steps} recorded beside{others})"
    )
    begin = 0.0
    for kind in (first, *(kind for kind in wall.kinds[1:] if kind.share >= LEAST)):
        parts = [f"{name} {share:.0%}" for name, share in kind.findings]
        parts += [place(*kind.where[:2])] if kind.where and kind.name == PHASE else []
        parts += [f"no finding {kind.unexplained:.0%}"] if kind.unexplained >= LEAST else []
        often = f"{kind.count:,} of {milliseconds(kind.took_ms)}: " if kind is not first or len(wall.kinds) > 1 else ""
        bar = f"{' ' * round(SHORT * begin)}{'█' * (round(SHORT * (begin + kind.share)) - round(SHORT * begin))}"
        yield from wrapped(f"{often}{', '.join(parts)}", f"  {kind.name:<20}{kind.share:>5.0%}  {bar:<{SHORT}}  ")
        begin += kind.share


def recorded(diagnosis: Diagnosis) -> str:
    """How much was recorded: "5 steps, median 12.3 ms"."""
    length = milliseconds(diagnosis.step_ms)
    return f"{diagnosis.steps} steps, median {length}" if diagnosis.steps > 1 else f"{diagnosis.steps} step of {length}"


BAR, SHORT = 60, 20  # columns


def _bars(diagnosis: Diagnosis) -> Iterator[str]:
    """A row for each part, beginning where the one above ends, so that the rows fill the width together."""
    begin = 0.0
    for name, share in diagnosis.parts.items():
        yield _bar(f"  {name}", begin, share, "█")
        if name == "idle":
            inside = begin
            for reason, part in idle_reasons(diagnosis).items():
                yield _bar(f"    {reason}", inside, part, "▒")
                inside += part
        begin += share


def _bar(name: str, begin: float, share: float, sign: str) -> str:
    first, last = round(BAR * begin), round(BAR * (begin + share))
    return printable(f"{name:<28}{share:>7.1%}  {' ' * first}{sign * (last - first)}").rstrip()


def idle_reasons(diagnosis: Diagnosis) -> dict[str, float]:
    """The reasons of the idle time, with what none of them explains, so that they add up to it."""
    rest = diagnosis.parts.get("idle", 0.0) - sum(diagnosis.idle.values())
    return diagnosis.idle | ({"unexplained": rest} if diagnosis.idle and rest > 0.001 else {})


def milliseconds(ms: float) -> str:
    return f"{ms:,.0f} ms" if abs(ms) >= 100 else f"{ms:.3g} ms"


def wrapped(text: str, indent: str = "") -> list[str]:
    """The text in lines of at most WIDTH columns but for longer words, the later ones indented as deep; [] if empty."""
    wrapper = textwrap.TextWrapper(WIDTH, indent, " " * len(indent), break_long_words=False, break_on_hyphens=False)
    return [printable(line) for line in wrapper.wrap(" ".join(text.split()))]


def printable(text: str) -> str:
    """The text without control characters, in signs that stdout's encoding has."""
    text = "".join(sign if sign.isprintable() else "?" for sign in text)
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return text.encode(encoding, "replace").decode(encoding)
