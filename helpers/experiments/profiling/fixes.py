"""What each fix of the two loops gains."""

from typing import Any

import numpy as np

from ...lab import Worth, experiment
from ...lab.estimate import LUCK_HERE, estimate
from ...lab.records import Row
from .planted_faults import FIXED, PIPELINES, SLOW, fixes_of, side_by_side
from .two_loops import ALL, SIZES

COLUMNS = "us_per_target baseline baseline_us_per_target ratio? low? high? pairs? starts? verdict?"


def _fix_rows(pipeline: str, size: str) -> list[Row]:
    """Each fix alone, and all together; on a CPU without those that need a GPU or aren't in a step."""
    names = [switch.name for switch in PIPELINES[pipeline].switches if size in ("gpu", "full") or switch.on_cpu]
    names = names[-1:] if size == "small" else names
    return [{"size": size, "fix": name} for name in (*names, ALL)]


def _options(pipeline: str, of: str, cpu: float, big_gpu: float) -> dict[str, Any]:
    worth = Worth(12, f"each inefficiency of {of}, before and after", cpu, 5, big_gpu, headline={"fix": (ALL,)})
    presets = {name: _fix_rows(pipeline, size) for name, size in SIZES.items()}
    return presets | {"version": 3, "columns": COLUMNS, "worth": worth}


@experiment(**_options("vit", "a ViT training", cpu=9, big_gpu=11))
def vit_fixes(size: str, fix: str) -> Row:
    """The ViT on photos: each fix alone, and all of them, in turn with the slow loop."""
    return _fixed("vit", size, fix)


@experiment(**_options("gpt", "a language model's training", cpu=5.8, big_gpu=12))
def gpt_fixes(size: str, fix: str) -> Row:
    """The language model: each fix alone, and all of them, in turn with the slow loop."""
    return _fixed("gpt", size, fix)


def _fixed(pipeline: str, size: str, fix: str) -> Row:
    """Blocks of steps of the loop with the fix and of the slow one take turns; times are for a real target.

    A real target is a photo or a token: a packed step has other samples than a padded one, so a step's time alone
    wouldn't compare them.
    """
    fixes = fixes_of(pipeline, FIXED, size) if fix == ALL else frozenset([fix])
    times = side_by_side(pipeline, {SLOW: frozenset(), fix: fixes}, size)
    per_target = {name: np.array([block.ms * 1e3 / block.real for block in blocks]) for name, blocks in times.items()}
    ratio = estimate([np.log(per_target[fix] / per_target[SLOW])], LUCK_HERE)
    return {
        "us_per_target": float(np.median(per_target[fix])),
        "baseline": SLOW,
        "baseline_us_per_target": float(np.median(per_target[SLOW])),
    } | (ratio.row() if ratio else {})
