"""What a profile shows: the account of a step, what bounds it, and the findings; as text, data or a table."""

import json
import sys
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from .intervals import Spans
from .trace import Note

WIDTH = 100
MOST_FINDINGS = 5  # in the text; the others are a line each
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
    detailed: bool = field(default=False, compare=False)  # whether only shapes or stacks show it

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


@dataclass(frozen=True, repr=False)
class Diagnosis:
    """Where the time of a step goes, and what to change first.

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
    further: tuple[Finding, ...] = ()  # beyond the first five
    source: Path | None = None
    lines: tuple[Line, ...] = ()  # the user's dearest, of the loop before it was recorded

    @property
    def parts(self) -> dict[str, float]:
        """The account on a GPU or a CPU: shares that add up to 1."""
        return self.host or {} if self.account is None else self.account

    @property
    def table(self) -> pd.DataFrame:
        """All findings, the largest gain first."""
        return pd.DataFrame([_row(finding) for finding in self.findings + self.further], columns=COLUMNS)

    @property
    def remarks(self) -> list[str]:
        """The notes, and a line for each further finding."""
        further = [f"further: {f.finding} at {f.where}, {f.gain}: {f.advice}" for f in self.further]
        return [*(note.text for note in self.notes), *further]

    def data(self) -> dict[str, Any]:
        """What `--json` prints."""
        data = {name: getattr(self, name) for name in ("verdict", "bound", "steps", "step_ms", "account", "idle")}
        warnings = [[warning.kind, warning.text] for warning in self.warnings]
        some = {"host": self.host, "lines": [asdict(line) for line in self.lines], "warnings": warnings}
        data |= {name: value for name, value in some.items() if value}
        notes = [*(warning.text for warning in self.warnings), *self.remarks]
        return data | {"findings": [_row(finding) for finding in self.findings], "notes": notes}

    def json(self) -> str:
        return json.dumps(self.data(), indent=1)

    def __repr__(self) -> str:
        return "\n".join(_lines(self))


COLUMNS = ["finding", "part", "gain_ms", "gain_share", "where", "evidence", "advice", "sure"]


def _row(finding: Finding) -> dict[str, Any]:
    return {name: getattr(finding, name) for name in COLUMNS}


def _lines(diagnosis: Diagnosis) -> Iterator[str]:
    yield from wrapped(diagnosis.verdict)
    yield from ("", recorded(diagnosis), "")
    yield from _bars(diagnosis)
    if diagnosis.lines:
        yield from ("", "dearest lines of the loop as it runs unrecorded:")
    for line in diagnosis.lines:
        yield from wrapped(f"{line.where}  {line.source}  ({line.activity})", f"  {line.share:4.0%}  ")
    if diagnosis.warnings:
        yield ""
    for warning in diagnosis.warnings:
        yield from wrapped(warning.text, " ! ")
    for number, finding in enumerate(diagnosis.findings[:MOST_FINDINGS], 1):
        yield ""
        yield from wrapped(f"{finding.finding}: {finding.gain}", f"{number}. ")
        yield from wrapped(finding.where, "   where     ")
        yield from wrapped(finding.evidence, "   evidence  ")
        yield from wrapped(finding.advice, " → advice    ")
    if not diagnosis.findings:
        yield from ("", f"No finding could bring {LEAST:.0%} or more.")
    if diagnosis.remarks:
        yield ""
    for note in diagnosis.remarks:
        yield from wrapped(note, "note: ")


def recorded(diagnosis: Diagnosis) -> str:
    """How much was recorded: "5 steps, median 12.3 ms"."""
    length = milliseconds(diagnosis.step_ms)
    return f"{diagnosis.steps} steps, median {length}" if diagnosis.steps > 1 else f"{diagnosis.steps} step of {length}"


BAR = 60  # columns


def _bars(diagnosis: Diagnosis) -> Iterator[str]:
    """A row for each part, beginning where the one above ends, so that the rows fill the width together."""
    for name, place in _placed(diagnosis.parts, 1000, 0, BAR):
        yield _bar(f"  {name}", *place, "█")
        if name == "idle":
            reasons = _placed(idle_reasons(diagnosis), *place)
            yield from (_bar(f"    {reason}", *inside, "▒") for reason, inside in reasons if inside[0])


Place = tuple[int, int, int]  # thousandths, the first column, columns


def _placed(shares: dict[str, float], thousandths: int, column: int, cells: int) -> Iterator[tuple[str, Place]]:
    """Where each share of a row is drawn."""
    parts = zip(shares, divided(shares.values(), thousandths), divided(shares.values(), cells), strict=True)
    for name, part, width in parts:
        yield name, (part, column, width)
        column += width


def _bar(name: str, thousandths: int, column: int, cells: int, sign: str) -> str:
    cut = printable(name if len(name) <= 28 else f"{name[:27]}…")
    return f"{cut:<28}{thousandths / 10:>6.1f}%  {' ' * column}{printable(sign) * cells}".rstrip()


def idle_reasons(diagnosis: Diagnosis) -> dict[str, float]:
    """The reasons of the idle time, with what none of them explains, so that they add up to it."""
    rest = diagnosis.parts.get("idle", 0.0) - sum(diagnosis.idle.values())
    return diagnosis.idle | ({"unexplained": rest} if diagnosis.idle and rest > 0.001 else {})


def divided(shares: Iterable[float], units: int) -> list[int]:
    """Whole units in proportion to the shares; they add up to `units` (largest remainders are rounded up)."""
    shares = list(shares)
    total = sum(shares)
    exact = [share / total * units if total else 0.0 for share in shares]
    whole = [int(part) for part in exact]
    left = round(sum(exact)) - sum(whole)
    for index in sorted(range(len(exact)), key=lambda i: whole[i] - exact[i])[:left]:
        whole[index] += 1
    return whole


def milliseconds(ms: float) -> str:
    return f"{ms:,.0f} ms" if abs(ms) >= 100 else f"{ms:.3g} ms"


LONGEST_PATH = 60
_ASCII = {"█": "#", "▒": "=", "→": ">", "…": "~", "×": "x", "µ": "u", "–": "-", "≥": ">", "≤": "<"}


def wrapped(text: str, indent: str = "") -> list[str]:
    """The text in lines of at most WIDTH columns, the later ones indented as deep; [] if it is empty.

    Lines break at spaces: long paths are shortened from the left, other long words in the middle.
    """
    room = WIDTH - len(indent)
    words = [_shortened(word, min(room, LONGEST_PATH) if "/" in word else room) for word in text.split()]
    lines = textwrap.wrap(" ".join(words), room, break_on_hyphens=False)
    return [printable(f"{' ' * len(indent) if number else indent}{line}") for number, line in enumerate(lines)]


def _shortened(word: str, room: int) -> str:
    if len(word) <= room:
        return word
    if "/" in word and (cut := word.find("/", len(word) - room + 1)) >= 0:
        return "…" + word[cut:]
    return f"{word[: room // 2]}…{word[len(word) - (room - 1) // 2 + 1 :]}"


def printable(text: str) -> str:
    """The text without control characters, in signs that stdout's encoding has."""
    text = "".join(sign if sign.isprintable() else "?" for sign in text)
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        text = "".join(_ASCII.get(sign, sign) for sign in text)
        text = text.encode(encoding, "replace").decode(encoding)
    return text
