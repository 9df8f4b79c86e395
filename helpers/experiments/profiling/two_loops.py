"""Where the time of the two loops goes, what a diagnosis finds in them, and whether its promises come true."""

import statistics
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import nn

from ...findings.account import timeline as read_timeline
from ...findings.diagnose import diagnose as read_diagnosis
from ...findings.summary import LEAST
from ...lab import Worth, experiment, half_dtype, multiplies_half
from ...lab.ceilings import copy, matmul
from ...lab.records import Row
from ...profiling.module_profiler import ModuleProfiler
from .layer_costs import CalledLayers
from .planted_faults import (
    FAULTS,
    FIXED,
    PIPELINES,
    SLOW,
    fixes_of,
    gains_of,
    options,
    planted,
    plantings,
    side_by_side,
    trace_of,
)

SIZES = {"small": "small", "cpu": "cpu", "gpu": "gpu", "big_gpu": "full"}  # class of machine -> the pipelines' size
LOOPS = [{"pipeline": pipeline, "variant": variant} for pipeline in PIPELINES for variant in (SLOW, FIXED)]
# Faults that are drawn, each in a loop without any other.
DRAWN_FAULTS = {"vit": ("decode_once", "bf16", "fused_optimizer"), "gpt": ("short_padding", "fused_loss")}
ALL = "all"
DRAWN = 120  # operations of a drawn step, the longest
PARTS = ("load", "forward", "loss", "backward", "optimizer", "metrics")  # of a step, as the trainer names them
# A product's size, and MiB of a copy
CEILINGS = {"small": (256, 16), "cpu": (2048, 256), "gpu": (4096, 1024), "full": (8192, 2048)}


def sized(size: str, rows: list[Row]) -> list[Row]:
    return [{"size": size} | row for row in rows]


@experiment(
    **{name: sized(size, LOOPS[2:] if size == "small" else LOOPS) for name, size in SIZES.items()},
    version=2,
    columns="rank finding part? gain_ms? gain_share? where? evidence? advice? sure?",
    worth=Worth(20, "what a profile of a slow training shows", cpu=2.9, gpu=6, big_gpu=11),
)
def diagnose(size: str, pipeline: str, variant: str) -> list[Row]:
    """What a diagnosis finds in each pipeline, the largest gain first; in the fixed one from 1 % on."""
    trace = trace_of(PIPELINES[pipeline], fixes_of(pipeline, variant, size), size, detailed=True)
    findings = read_diagnosis(trace, least=0.0 if variant == SLOW else LEAST).table
    if not len(findings):
        return [{"rank": 0, "finding": "nothing"}]
    findings["where"] = findings["where"].str.replace(f"{Path(__file__).parents[2]}/", "", regex=False)
    rows = findings.astype(object).where(findings.notna(), None).to_dict("records")
    return [{"rank": rank} | row for rank, row in enumerate(rows)]


_DRAWN = [{"pipeline": name, "fault": fault} for name in PIPELINES for fault in (ALL, *DRAWN_FAULTS[name])]


@experiment(
    **{name: sized(s, _DRAWN[:1] if s == "small" else _DRAWN) for name, s in SIZES.items()},
    version=2,
    columns="variant track name begin_ms end_ms part?",
    worth=Worth(5, "the timeline of a step", cpu=3.7, gpu=4, big_gpu=14),
)
def timeline(size: str, pipeline: str, fault: str) -> list[Row]:
    """A step with one fault and without it, to be drawn: what ran when, and in which part of the step.

    All other faults are fixed; the fault "all" is the slow pipeline.
    """
    switched, rows = PIPELINES[pipeline], []
    slow = frozenset() if fault == ALL else planted(pipeline, [fault], size)
    for variant, fixes in ((SLOW, slow), (FIXED, fixes_of(pipeline, FIXED, size))):
        step = read_timeline(trace_of(switched, fixes, size))
        is_part = (step["track"] == "annotations") & step["name"].isin(PARTS)
        spans = step.loc[is_part, ["begin_ms", "end_ms", "name"]].to_numpy().tolist()
        inside = [[name for low, high, name in spans if low <= begin < high] for begin in step["begin_ms"]]
        step["part"] = [names[0] if names else None for names in inside]
        ops = step[step["track"] != "annotations"].assign(ms=step["end_ms"] - step["begin_ms"]).nlargest(DRAWN, "ms")
        drawn = pd.concat([step[is_part], ops.drop(columns="ms").sort_values("begin_ms")])
        rows += [{"variant": variant} | row | {"name": row["name"][:60]} for row in drawn.to_dict("records")]
    return rows


@experiment(
    **{name: sized(size, LOOPS[2:] if size == "small" else LOOPS) for name, size in SIZES.items()},
    version=2,
    columns="module type calls forward_ms? backward_ms? total_ms self_ms? share activation_mib? "
    "peak_mib? gflop? moved_mib? lower_bound_ms?",
    worth=Worth(20, "time and memory of each module", cpu=3.4, gpu=4, big_gpu=7),
)
def modules(size: str, pipeline: str, variant: str) -> list[Row]:
    """Forward and backward time (medians over steps) and memory of every module, and what its work must cost at least.

    The lower bound is that of the matrix products at the measured rate, or of the bytes at the measured bandwidth,
    whichever is more; for all calls of a step, forward and backward.
    """
    profiled: list[tuple[ModuleProfiler, CalledLayers]] = []

    def profile_model(model: nn.Module) -> ModuleProfiler:
        profiled.append((ModuleProfiler(model, pipeline), CalledLayers(model, pipeline)))
        return profiled[-1][0]

    switched, fixes, steps = PIPELINES[pipeline], fixes_of(pipeline, variant, size), 5 if size == "small" else 14
    switched.run(fixes, steps=steps, validates=False, profile=profile_model, **options(switched, size, steps))
    ((profiler, layers),) = profiled
    table, in_half = profiler.summary(median=True), "bf16" in fixes and multiplies_half()
    dtype = half_dtype() if in_half else torch.float32
    (_, tflops), (_, gb_per_s) = matmul(CEILINGS[size][0], dtype), copy(CEILINGS[size][1])
    bounds = layers.lower_bounds(dtype.itemsize, tflops, gb_per_s)
    names = ["module", "type", "calls", "forward_ms", "backward_ms", "total_ms", "self_ms", "share"]
    names += ["activation_mib", "peak_mib"]
    rows = table[names].astype(object).where(table[names].notna(), None).to_dict("records")
    return [row | bounds.get(row["module"], {}) for row in rows]


def _planted_rows(size: str) -> list[Row]:
    rows = [{"pipeline": name, "faults": " + ".join(faults)} for name in PIPELINES for faults in plantings(name, size)]
    return sized(size, rows[:1] if size == "small" else rows)


@experiment(
    **{name: _planted_rows(s) for name, s in SIZES.items()},
    same_work=False,
    columns="fix finding? step_ms promised_share gained_share noise_share first_finding?",
    worth=Worth(3, "promised gains beside measured ones", cpu=7.7, gpu=6, big_gpu=20),
)
def predicted(size: str, pipeline: str, faults: str) -> list[Row]:
    """What `diagnose` promises for each planted fault, from a profile of the loop, and what its fix brings.

    The loop is the fixed one with one or two faults; blocks of its steps take turns with blocks of the loop without the
    fault. The gain is the median over turns, for a target (photo, real token), and `noise_share` about its standard
    error. A fault that no profile can show has no `finding`.
    """
    names = faults.split(" + ")
    loops = {name: planted(pipeline, [other for other in names if other != name], size) for name in names}
    loops[SLOW] = planted(pipeline, names, size)
    costs, places = (trace_of(PIPELINES[pipeline], loops[SLOW], size, detailed) for detailed in (False, True))
    promised = read_diagnosis(costs, places=places).table.set_index("finding")["gain_share"]
    times = side_by_side(pipeline, loops, size)
    step_ms = statistics.median(block.ms / block.steps for block in times[SLOW])
    rows = []
    for name in names:
        expected, gains = FAULTS[pipeline][name], gains_of(times[SLOW], times[name])
        low, median, high = np.percentile(gains, [20, 50, 80])
        row = {"fix": name, "finding": expected, "step_ms": step_ms, "promised_share": promised.get(expected, 0.0)}
        row |= {"gained_share": median, "noise_share": (high - low) / 4}
        rows.append(row | {"first_finding": next(iter(promised.index), None)})
    return rows
