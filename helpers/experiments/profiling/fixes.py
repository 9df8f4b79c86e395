"""What each fix of the two loops gains."""

from collections.abc import Callable
from typing import Any

import numpy as np

from ...lab import Worth, experiment
from ...lab.estimate import AT_A_LOOK, LUCK_HERE, Estimate, estimate
from ...lab.records import Row
from .planted_faults import FIXED, PIPELINES, SLOW, Block, Enough, fixes_of, side_by_side
from .two_loops import ALL, SIZES

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


@experiment(**_options("vit", "a ViT training", cpu=25, big_gpu=15))
def vit_fixes(size: str, fix: str) -> Row:
    """The ViT on photos: each fix alone, and all of them, in turn with the slow loop."""
    return _fixed("vit", size, fix)


@experiment(**_options("gpt", "a language model's training", cpu=16, big_gpu=16))
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
