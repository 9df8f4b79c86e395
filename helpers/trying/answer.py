"""What a search found, as a person's answer and as JSON.

What takes the time, what was tried and helped, what does nothing here, what is still open, and what only the author can
change.
"""

import json
import math
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..faults import entries
from ..lab import markdown
from ..lab.estimate import EFFECT, FASTER, NONE, verdict_class

COUNTED = {"evaluation": "no-evaluation"}  # findings, and what would be their probe
LEAST = 0.02  # of the time: what could bring less isn't tried, nor listed
WIDTH = 100
SECTIONS = {
    "beside": "beside it",
    "lines": "what takes the time",
    "helped": "what was tried and helped",
    "nothing": "what was tried and does nothing here",
    "open": "what was tried and is still open",
    "yours": "what only you can change",
    "differs": "what differs",
    "not_tried": "not tried",
    "redirected": "written to the scratch instead",
}


@dataclass(frozen=True)
class Tried:
    """What a change did: the share of a step's time that goes, with its interval, and what it did to the losses."""

    change: str
    kind: str
    gain_share: float = math.nan
    low: float = math.nan
    high: float = math.nan
    verdict: str = ""
    losses: str = ""
    same: bool = True
    peak_gib: float = math.nan
    seconds: float = 0.0
    reason: str = ""

    @property
    def useful(self) -> bool:
        return self.verdict == FASTER and self.same and self.kind == "change"

    @property
    def group(self) -> str:
        """The section that it belongs to."""
        if self.kind != "change":
            return "probes" if self.kind == "probe" else "beside"
        decided = self.verdict != FASTER and verdict_class(self.verdict) in (EFFECT, NONE)
        return "helped" if self.useful else "nothing" if decided else "open"

    def __str__(self) -> str:
        words = [self.verdict.replace(NONE, "excluded")]
        if self.high - self.low < 1 and verdict_class(self.verdict) != NONE:
            share, low, high, goes = self.gain_share, self.low, self.high, "of the time goes"
            if share < 0:
                share, low, high, goes = 1 - share, 1 - high, 1 - low, "of the time is taken"
            words.append(f"{share:.0%} ({low:.0%} to {high:.0%}) {goes}")
        words += [f"losses {self.losses}"] if self.losses and self.kind != "probe" else []
        return f"{self.change:<20} " + "; ".join(filter(None, [*words, self.reason]))


@dataclass
class Result:
    """`together` is the total of the changes in `kept` against the base, as a pair of its own.

    If `pages_kept`, both sides of a row kept the pages of freed memory; where that is the change, the base did not.
    `findings` are the profile's, and `lines` the shares of the time, which add up to 1. `patch` makes what is kept.
    """

    command: str
    step_ms: float = math.nan
    peak_gib: float = math.nan
    pages_kept: bool = False
    lines: list[dict[str, Any]] = field(default_factory=list)
    findings: Sequence[Any] = ()
    tried: list[Tried] = field(default_factory=list)
    together: Tried | None = None
    kept: list[str] = field(default_factory=list)
    not_tried: list[dict[str, Any]] = field(default_factory=list)  # with the reason, and whether it applies
    redirected: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    patch: str = ""
    differs: dict[str, list[str]] = field(default_factory=dict)  # of two environments

    def of(self, group: str) -> list[Tried]:
        """The changes of a section, the largest gain first."""
        of_group = [each for each in self.tried if each.group == group]
        return sorted(of_group, key=lambda each: (math.isnan(each.gain_share), -each.gain_share))

    @property
    def yours(self) -> list[dict[str, Any]]:
        """What no change was tried for, or not for all of it: the line, and the most that it can bring."""
        by_name, rows = {tried.change: tried for tried in self.tried}, []
        faster = {tried.change: tried for tried in self.tried if tried.kind == "probe" and tried.verdict == FASTER}
        waiting = {each["change"] for each in self.not_tried if each["applies"]}
        for finding in self.findings:
            names = entries()[finding.finding].tried
            tried = [by_name[name] for name in names if name in by_name]
            changes = [each for each in tried if each.kind == "change" and each.verdict != "failed"]
            gained = max((each.gain_share for each in changes if each.useful), default=0.0)
            probe = next((each for each in tried if each.kind == "probe" and math.isfinite(each.high)), None)
            proven = probe and faster.pop(probe.change, None)
            most = probe.gain_share if proven else min(finding.gain_share, probe.high if probe else 1.0)
            if most >= LEAST and (not changes or (probe and most > gained + 2 * LEAST)):
                untried = [name for name in names if name in waiting]
                rows.append(_left(finding, probe, most, gained) | {"untried": untried})
        return rows + [_left(None, probe, probe.gain_share, 0.0) | {"untried": []} for probe in faster.values()]

    def json(self) -> str:
        groups = {group: self.of(group) for group in ("beside", "helped", "nothing", "open", "probes")}
        names = ("command", "step_ms", "peak_gib", "pages_kept", "lines")
        document = {name: getattr(self, name) for name in names} | groups
        names = ("together", "kept", "patch", "yours", "differs", "not_tried", "redirected", "notes")
        return json.dumps(_plain(document | {name: getattr(self, name) for name in names}), indent=1)


def _left(finding: Any, probe: Tried | None, most: float, gained: float) -> dict[str, Any]:
    """The most that a cause can bring, what told that, and what changes gained of it."""
    row = {name: getattr(finding, name, "") for name in ("finding", "where", "advice")} | {"most": most}
    low, high, by = (probe.low, probe.high, probe.change) if probe else (None, None, "profile")
    return row | {"low": low, "high": high, "by": by, "gained": gained}


def _plain(value: Any) -> Any:
    """For JSON: rows as objects, and what isn't finite as null."""
    if isinstance(value, Tried):
        value = {name: of for name, of in asdict(value).items() if name != "same"}
    if isinstance(value, dict):
        return {name: _plain(of) for name, of in value.items()}
    if isinstance(value, list):
        return list(map(_plain, value))
    return None if isinstance(value, float) and not math.isfinite(value) else value


def text(result: Result) -> str:
    """The answer, in sections; those that have nothing to say are left out, but for what helped."""
    pages = " with freed pages kept" if result.pages_kept else ""
    rows: dict[str, list[str]] = {name: [str(tried) for tried in result.of(name)] for name in SECTIONS}
    rows["lines"] = _shares(result.lines)
    rows["helped"] = rows["helped"] or ([] if rows["beside"] else ["nothing"])
    if len(result.of("helped")) > 1:
        made = f"the patch makes {result.kept[0]} alone" if len(result.kept) == 1 else str(result.together)
        rows["helped"].append(made)
    rows["yours"] = [line for each in result.yours for line in _yours(each)]
    rows["differs"] = [f"{name:<20} {ours:<28} {theirs}" for name, (ours, theirs) in result.differs.items()]
    rows["not_tried"] = [f"{each['change']:<20} {each['reason']}" for each in result.not_tried if each["applies"]]
    rows["redirected"] = [*result.redirected[:3], *(["…"] if len(result.redirected) > 3 else [])]
    blocks = [f"{result.command}: {result.step_ms:.4g} ms a step{pages}, peak {result.peak_gib:.2f} GiB"]
    for name, title in SECTIONS.items():
        blocks += ["\n  ".join([title, *rows[name]])] if rows[name] else []
        blocks += [result.patch.rstrip()] if name == "helped" and result.patch else []
    return "\n\n".join([*blocks, *result.notes])


def markdown_of(result: Result) -> str:
    """A script beside the other, for a pull request: verdict, ratio with its interval, losses, what differs."""
    (beside,) = result.tried
    verdict = beside.verdict.replace(NONE, "no effect")
    verdict += "" if beside.same or not beside.losses else ", losses differ"
    parts = [f"### {markdown.code(beside.change)} beside {markdown.code(result.command)}: {verdict}"]
    if math.isfinite(beside.gain_share):
        ratio, low, high = (f"{1 - share:.3g}" for share in (beside.gain_share, beside.high, beside.low))
        parts.append(f"A step takes {ratio} times as long (95 % interval: {low} to {high}).")
    parts += [f"Losses: {beside.losses}."] if beside.losses else []
    parts += [markdown.code(beside.reason)] if beside.reason else []
    if result.differs:
        rows = [[markdown.code(str(cell)) for cell in (name, *values)] for name, values in result.differs.items()]
        parts.append(markdown.table(["what differs", "before", "beside"], rows))
    return "\n\n".join([*parts, *map(markdown.escaped, result.notes)])


def _shares(lines: list[dict[str, Any]]) -> list[str]:
    """Lines and their shares in percent, of which the last makes them 100."""
    percents = [round(100 * line["share"]) for line in lines[:-1]]
    percents += [100 - sum(percents)] if lines else []
    places = [f"{line['where']}  ({line['activity']})  {line['source']}".replace("  ()  ", "") for line in lines]
    return [f"{percent:>3}%  {_cut(place)}" for percent, place in zip(percents, places, strict=True)]


def _cut(text: str) -> str:
    return text if len(text) <= WIDTH else f"{text[: WIDTH - 1]}…"


def _yours(each: dict[str, Any]) -> list[str]:
    by = f"tried by {each['by']} ({each['low']:.0%} to {each['high']:.0%})" if each["high"] else "by the profile"
    gained = f"; {each['gained']:.0%} by what helped" if each["gained"] else ""
    gained += f"; {', '.join(each['untried'])} not tried" if each["untried"] else ""
    first = f"{each['finding'] or each['by']}: at most {each['most']:.0%}, {by}{gained}"
    return [first, *(f"     {line}" for line in (_cut(each["where"]), *textwrap.wrap(each["advice"], WIDTH)) if line)]
