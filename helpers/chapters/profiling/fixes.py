"""What each fix of the two loops gains, alone and all together, in turn with the slow loop."""

import math
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd

from ...book.table import Worth, table
from ...book.values import TIMES, derived, judged, lacking, of_class, speedup
from ...lab import Row
from ...lab.estimate import AT_A_LOOK, EFFECT, LUCK_HERE, NONE, UNDECIDED, Estimate, estimate
from ...training.switched import Switched
from .planted_faults import FIXED, PIPELINES, SIZES, SLOW, Block, Enough, fixes_of, side_by_side

ALL = "all"  # of the fixes
SAME = 0.03  # without an interval, a fix that changes less has no effect
LOOKS = (4, 8, 12, 18, 27, 40)  # rounds after which a comparison may end
COLUMNS = "us_per_target baseline baseline_us_per_target ratio? low? high? pairs? starts? verdict?"


def _fix_rows(pipeline: str, size: str) -> list[Row]:
    """Each fix alone, and all together; on a CPU without those that need a GPU or aren't in a step."""
    names = [switch.name for switch in PIPELINES[pipeline].switches if size in ("gpu", "full") or switch.on_cpu]
    names = names[-1:] if size == "small" else names
    return [{"size": size, "fix": name} for name in (*names, ALL)]


def _options(pipeline: str, of: str, cpu: float, big_gpu: float) -> dict[str, Any]:
    worth = Worth(12, f"each inefficiency of {of}, before and after", cpu, 5, big_gpu, headline={"fix": (ALL,)})
    presets = {name: _fix_rows(pipeline, size) for name, size in SIZES.items()}
    return presets | {"version": 4, "columns": COLUMNS, "worth": worth}


@table(**_options("vit", "a ViT training", cpu=25, big_gpu=15))
def vit_fixes(size: str, fix: str) -> Row:
    """The ViT on photos: each fix alone, and all of them, in turn with the slow loop."""
    return _fixed("vit", size, fix)


@table(**_options("gpt", "a language model's training", cpu=16, big_gpu=16))
def gpt_fixes(size: str, fix: str) -> Row:
    """The language model: each fix alone, and all of them, in turn with the slow loop."""
    return _fixed("gpt", size, fix)


def _fixed(pipeline: str, size: str, fix: str) -> Row:
    fixes = fixes_of(pipeline, FIXED, size) if fix == ALL else frozenset([fix])
    loops = {SLOW: frozenset(), fix: fixes}
    return paired(
        SLOW, fix, lambda rounds, enough: side_by_side(pipeline, loops, size, rounds, enough), size == "small"
    )


def paired(baseline: str, name: str, turns: Callable[[int, Enough], dict[str, list[Block]]], once: bool = False) -> Row:
    """Blocks of steps of two loops take turns until it is decided, at most 40 rounds, or `once`.

    Times are for a real target, a photo or a token: a packed step has other samples than a padded one, so a step's time
    alone wouldn't compare them.
    """

    def told(times: dict[str, list[Block]]) -> tuple[dict[str, np.ndarray], Estimate | None]:
        per_target = {name: np.array([each.ms * 1e3 / each.real for each in of]) for name, of in times.items()}
        return per_target, estimate([np.log(per_target[name] / per_target[baseline])], LUCK_HERE, AT_A_LOOK)

    def enough(times: dict[str, list[Block]]) -> bool:
        return len(times[baseline]) in LOOKS and bool((ratio := told(times)[1]) and ratio.enough)

    per_target, ratio = told(turns(1 if once else LOOKS[-1], enough))
    return {
        "us_per_target": float(np.median(per_target[name])),
        "baseline": baseline,
        "baseline_us_per_target": float(np.median(per_target[baseline])),
    } | (ratio.row() if ratio else {})


# Numbers


@vit_fixes.numbers()
def _(rows: pd.DataFrame) -> SimpleNamespace:
    return _gains(rows, PIPELINES["vit"])


@gpt_fixes.numbers()
def _(rows: pd.DataFrame) -> SimpleNamespace:
    return _gains(rows, PIPELINES["gpt"])


def _gains(rows: pd.DataFrame, pipeline: Switched) -> SimpleNamespace:
    """Fixes with an effect against the slow loop, the largest first, and all together; `without` names the others."""
    times = rows.assign(median_ms=rows["us_per_target"], baseline_ms=rows["baseline_us_per_target"])
    gains = {row["fix"]: speedup(row) for row in times.to_dict("records")}
    together = gains.pop(ALL, lacking("all fixes together", TIMES))
    alone = dict(sorted(gains.items(), key=lambda item: -item[1].value))
    switches = {switch.name: switch for switch in pipeline.switches}
    shown = {name: gain for name, gain in alone.items() if judged(gain, SAME)[0] == EFFECT}
    shown |= {ALL: together} if together.measured else {}
    lines = rows.set_index("fix").loc[list(shown), ["baseline_us_per_target", "us_per_target"]]
    lines.insert(0, "the slow loop", [switches[name].slow if name in switches else "" for name in shown])
    lines.insert(1, "changes", [(name in switches and switches[name].changes) or "" for name in shown])
    lines["speedup"] = [f"{gain:bare}" for gain in shown.values()]
    faults = {f"{name} ({switches[name].slow})" if name in switches else name: gain for name, gain in alone.items()}
    headings = {"baseline_us_per_target": "slow loop, µs", "us_per_target": "fixed, µs"}
    (largest, largest_gain), (second, second_gain) = (*shown.items(), *[("", lacking("a fix", TIMES))] * 2)[:2]
    return SimpleNamespace(
        table=lines.rename(columns=headings).reset_index(),
        largest=largest,
        second=second,
        largest_gain=largest_gain,
        second_gain=second_gain,
        together=together,
        product=derived(math.prod(float(gain) for name, gain in shown.items() if name != ALL), "product of gains"),
        without=SimpleNamespace(none=of_class(faults, NONE, SAME), undecided=of_class(faults, UNDECIDED, SAME)),
        alone=defaultdict(lambda: lacking("a fix", TIMES), alone),
        decode_once=alone.get("decode_once", lacking("decode_once", TIMES)),
    )
