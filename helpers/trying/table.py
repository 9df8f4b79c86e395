"""What a search found, as a table and as JSON."""

import json
import math
from dataclasses import asdict, dataclass, field
from typing import Any

from ..lab.estimate import FASTER
from .edits import Edit


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
    edit: str = ""
    reason: str = ""

    @property
    def useful(self) -> bool:
        return self.verdict == FASTER and self.same and self.kind == "change"


@dataclass
class Result:
    """`together` is the total of the changes in `kept` against the base, as a pair of its own.

    If `pages_kept`, both sides of a row kept the pages of freed memory; where that is the change, the base did not.
    """

    command: str
    step_ms: float = math.nan
    peak_gib: float = math.nan
    pages_kept: bool = False
    tried: list[Tried] = field(default_factory=list)
    together: Tried | None = None
    kept: list[str] = field(default_factory=list)
    not_tried: list[dict[str, str]] = field(default_factory=list)
    redirected: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    edits: list[Edit] = field(default_factory=list)

    def json(self) -> str:
        def row(tried: Tried) -> dict[str, Any]:
            return {
                key: None if isinstance(value, float) and not math.isfinite(value) else value
                for key, value in asdict(tried).items()
                if key != "same"
            }

        return json.dumps(
            {
                "base": {"step_ms": self.step_ms, "peak_gib": self.peak_gib, "pages_kept": self.pages_kept},
                "tried": [row(tried) for tried in self.tried],
                "together": self.together and row(self.together) | {"changes": self.kept},
                "not_tried": self.not_tried,
                "redirected": self.redirected,
            },
            indent=1,
        )


def text(result: Result) -> str:
    """The table, the total, and the edits to make."""
    pages = " with freed pages kept" if result.pages_kept else ""
    lines = [f"{result.command}: {result.step_ms:.4g} ms a step{pages}, peak {result.peak_gib:.2f} GiB", ""]
    by_gain = sorted(result.tried, key=lambda tried: (math.isnan(tried.gain_share), -tried.gain_share))
    lines += [HEAD, *map(row, by_gain)]
    if result.together and len(result.kept) > 1:
        lines += ["", "together", row(result.together)]
    if result.edits:
        lines += ["", "edits", *(f"  {edit}" for edit in result.edits)]
    if result.not_tried:
        lines += ["", "not tried", *(f"  {each['change']:<21} {each['reason']}" for each in result.not_tried)]
    if result.redirected:
        lines += ["", "written to the scratch instead", *(f"  {path}" for path in result.redirected)]
    return "\n".join([*lines, *result.notes])


WIDEST = -10.0  # a share of the time: what two pairs far apart make of an interval isn't shown
HEAD = f"{'change':<21} {'time that goes':<24} {'verdict':<28} {'peak GiB':>8}  losses"


def row(tried: Tried) -> str:
    gain = f"{tried.gain_share:.0%}" if math.isfinite(tried.gain_share) else "—"
    gain += f" ({tried.low:.0%} to {tried.high:.0%})" if tried.low > WIDEST else ""
    peak = f"{tried.peak_gib:.2f}" if math.isfinite(tried.peak_gib) else "—"
    return f"{tried.change:<21} {gain:<24} {tried.verdict:<28} {peak:>8}  {tried.losses or tried.reason}"
