"""What chapter 3 measures: where the time of two slow pipelines goes, what each fix brings, what a diagnosis finds.

`size` is a preset of the pipelines: "small" for tests, "cpu", "gpu" for one of 8 GB, "full" for a big GPU.
"""

import functools
import itertools
import statistics
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import nn

from helpers.lab import Timing, device, experiment, half_dtype
from helpers.lab.ceilings import copy, matmul
from helpers.lab.machine import device_class
from helpers.lab.process import in_fresh_process
from helpers.lab.records import Row
from helpers.lab.timing import between_ms, moment, synchronize
from helpers.profiling.account import device_idle_share
from helpers.profiling.account import timeline as read_timeline
from helpers.profiling.costs import CalledLayers
from helpers.profiling.diagnose import diagnose as read_diagnosis
from helpers.profiling.diagnosis import LEAST
from helpers.profiling.module_profiler import ModuleProfiler
from helpers.rush.setup import KEPT
from helpers.training import CLOTHES, Batch, Excerpt, Trainer
from helpers.training.planted import (
    FAULTS,
    FIXED,
    NOT_ON_CPU,
    PIPELINES,
    ROUNDS,
    SLOW,
    fixes_of,
    gains_of,
    options,
    planted,
    plantings,
    side_by_side,
    trace_of,
    within_an_epoch,
    workers,
)
from helpers.training.slow_parts import CollectedMetrics

SIZES = {"small": "small", "cpu": "cpu", "gpu": "gpu", "big_gpu": "full"}  # class of machine -> the pipelines' size
BOTH = [{"pipeline": pipeline, "variant": variant} for pipeline in PIPELINES for variant in (SLOW, FIXED)]
ALONE, CUMULATIVE = "alone", "cumulative"
# Faults that are drawn, each in a loop without any other.
DRAWN_FAULTS = {"vit": ("decode_once", "bf16", "fused_optimizer"), "gpt": ("short_padding", "fused_loss")}
ALL = "all"
# A fix that isn't in the loop: glibc returns large freed blocks to the system, which zeroes their pages once more when
# they are asked for again, unless the process's environment (`KEPT`) says otherwise.
KEPT_PAGES = "kept_pages"
FRESH = 4  # steps to settle in a new process
TIMED = {"small": (1, 2), "cpu": (1, 3), "gpu": (5, 20), "full": (5, 20)}  # steps of a block: to settle, timed
DRAWN = 120  # operations of a drawn step, the longest
PARTS = ("load", "forward", "loss", "backward", "optimizer", "metrics")  # of a step, as the trainer names them
# A product's size, and MiB of a copy
CEILINGS = {"small": (256, 16), "cpu": (2048, 256), "gpu": (4096, 1024), "full": (8192, 2048)}
FIX_COLUMNS = (
    "median_ms p20_ms p80_ms n mean_ms us_per_target baseline baseline_us_per_target speedup prepare_s source "
    "device_idle_share?"
)
COLLECTED, STREAMING = "collected on the CPU", "streaming on the device"
TINY = {  # so small that the metric's time shows on a CPU, too
    "batch_size": 256,
    "model": {"image_size": 16, "patch_size": 16, "depth": 1, "heads": 2, "head_dim": 16, "mlp_size": 32},
}


def _sized(size: str, rows: list[Row]) -> list[Row]:
    return [{"size": size} | row for row in rows]


@experiment(
    **{name: _sized(size, BOTH) for name, size in SIZES.items()},
    version=2,
    columns="rank finding part? gain_ms? gain_share? where? evidence? advice? sure?",
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
    **{name: _sized(s, _DRAWN[:2] if s == "small" else _DRAWN) for name, s in SIZES.items()},
    version=2,
    columns="variant track name begin_ms end_ms part?",
)
def timeline(size: str, pipeline: str, fault: str) -> list[Row]:
    """A step with one fault and without it, to be drawn: what ran when, and in which part of the step.

    All other faults are fixed; the fault "all" is the slow pipeline.
    """
    switched, rows = PIPELINES[pipeline], []
    slow = frozenset() if fault == ALL else planted(pipeline, [fault], size)
    for variant, fixes in ((SLOW, slow), (FIXED, fixes_of(pipeline, FIXED, size))):
        step = _with_parts(read_timeline(trace_of(switched, fixes, size)))
        parts = step[(step["track"] == "annotations") & step["name"].isin(PARTS)]
        ops = step[step["track"] != "annotations"].assign(ms=step["end_ms"] - step["begin_ms"]).nlargest(DRAWN, "ms")
        shown = pd.concat([parts, ops.drop(columns="ms").sort_values("begin_ms")])
        rows += [{"variant": variant} | row | {"name": row["name"][:60]} for row in shown.to_dict("records")]
    return rows


def _with_parts(step: pd.DataFrame) -> pd.DataFrame:
    """The rows of a step with the part that each lies in by its begin; None outside all of them."""
    ranges = step[(step["track"] == "annotations") & step["name"].isin(PARTS)]
    spans = ranges[["begin_ms", "end_ms", "name"]].to_numpy().tolist()
    inside = [next((name for low, high, name in spans if low <= at < high), None) for at in step["begin_ms"]]
    return step.assign(part=inside)


@experiment(
    **{name: _sized(size, BOTH) for name, size in SIZES.items()},
    version=2,
    columns="module type calls forward_ms? backward_ms? total_ms self_ms? share activation_mib? "
    "peak_mib? gflop? moved_mib? lower_bound_ms?",
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
    taken = options(switched, size) | within_an_epoch(switched, steps, size)
    switched.run(fixes, steps=Excerpt(steps), profile=profile_model, **taken)
    ((profiler, layers),) = profiled
    table, dtype = profiler.summary(median=True), half_dtype() if "bf16" in fixes else torch.float32
    (_, tflops), (_, gb_per_s) = matmul(CEILINGS[size][0], dtype), copy(CEILINGS[size][1])
    bounds = layers.lower_bounds(dtype.itemsize, tflops, gb_per_s)
    names = ["module", "type", "calls", "forward_ms", "backward_ms", "total_ms", "self_ms", "share"]
    names += ["activation_mib", "peak_mib"]
    rows = table[names].astype(object).where(table[names].notna(), None).to_dict("records")
    return [row | bounds.get(row["module"], {}) for row in rows]


def _fix_rows(pipeline: str, size: str) -> list[Row]:
    """Each fix alone, and one more at a time; on a CPU without those that need a GPU or aren't in a step."""
    names = [switch.name for switch in PIPELINES[pipeline].switches if size in ("gpu", "full") or switch.on_cpu]
    names = {"small": names[-1:], "cpu": [*names, KEPT_PAGES]}.get(size, names)
    together = [name for name in names if size != "cpu" or name not in NOT_ON_CPU[pipeline]]
    pairs = [(ALONE, name) for name in names] + [(CUMULATIVE, name) for name in together]
    return [{"size": size, "variant": variant, "fix": name} for variant, name in pairs]


@experiment(
    **{name: _fix_rows("vit", size) for name, size in SIZES.items()},
    version=2,
    columns=FIX_COLUMNS,
    same_work=False,  # workers deliver in bursts
)
def vit_fixes(size: str, variant: str, fix: str) -> Row:
    """The ViT on photos: each fix alone, and one more at a time, against the slow loop beside it."""
    return _fixed("vit", size, variant, fix)


@experiment(
    **{name: _fix_rows("gpt", size) for name, size in SIZES.items()},
    version=2,
    columns=FIX_COLUMNS,
    same_work=False,  # lengths differ from batch to batch
)
def gpt_fixes(size: str, variant: str, fix: str) -> Row:
    """The language model: each fix alone, and one more at a time, against the slow loop beside it."""
    return _fixed("gpt", size, variant, fix)


def _fixed(pipeline: str, size: str, variant: str, fix: str) -> Row:
    """A block of steps of the slow loop between two of the fixed one; times are for a real target (photo or token).

    Within a block a loader's workers run ahead of their own loop only. They deliver in bursts, so times are means. A
    packed step has other samples than a padded one, so a step's time alone wouldn't compare them. The idle share comes
    from a separate profile on a GPU.
    """
    switched = PIPELINES[pipeline]
    names = [switch.name for switch in switched.switches] + [KEPT_PAGES]
    fixes = frozenset([fix] if variant == ALONE else names[: names.index(fix) + 1])
    if size == "cpu" and variant == CUMULATIVE:
        fixes = fixes & (fixes_of(pipeline, FIXED, size) | {KEPT_PAGES})
    times: dict[str, list[float]] = {fix: [], SLOW: []}
    targets: Counter = Counter()
    for name, chosen in ((fix, fixes), (SLOW, frozenset()), (fix, fixes)):
        if KEPT_PAGES in chosen:
            done = in_fresh_process(_block, pipeline, chosen - {KEPT_PAGES}, size, FRESH, environment=KEPT)
        else:
            done = _block(pipeline, chosen, size)
        samples, real, source, prepare_s = done
        times[name] += samples
        targets[name] += real
    per_target = {name: sum(samples) * 1e3 / targets[name] for name, samples in times.items()}
    on_gpu = device().type == "cuda" and variant == CUMULATIVE
    return Timing.of(times[fix]).row() | {
        "mean_ms": statistics.mean(times[fix]),
        "us_per_target": per_target[fix],
        "baseline": SLOW,
        "baseline_us_per_target": per_target[SLOW],
        "speedup": per_target[SLOW] / per_target[fix],
        "prepare_s": prepare_s,
        "source": source,
        "device_idle_share": device_idle_share(trace_of(switched, fixes, size)) if on_gpu else None,
    }


def _block(name: str, fixes: frozenset[str], size: str, settling: int = 0) -> tuple[list[float], int, str, float]:
    """Milliseconds of steps of an epoch, loading included, after some to settle; their real targets; about the task."""
    pipeline = PIPELINES[name]
    ahead, (least, timed) = workers(pipeline, fixes, size), TIMED[size]
    settling = max(settling, least, ahead)
    count = settling + max(timed, 4 * ahead)
    taken = options(pipeline, size) | within_an_epoch(pipeline, count, size)
    trainer = pipeline.prepare(fixes, **taken)
    marks, real = [], []
    with trainer.settings():
        marks.append(moment())
        for batch in itertools.islice(trainer.epoch(0), count):
            trainer.step(batch)
            marks.append(moment())
            real.append(batch.real)
        synchronize()
    times = [between_ms(*pair) for pair in itertools.pairwise(marks[settling:])]
    return times, sum(real[settling:]), trainer.task.source, trainer.task.prepare_s


def _planted_rows(size: str) -> list[Row]:
    rows = [{"pipeline": name, "faults": " + ".join(faults)} for name in PIPELINES for faults in plantings(name, size)]
    return _sized(size, rows[:1] if size == "small" else rows)


@experiment(
    **{name: _planted_rows(s) for name, s in SIZES.items()},
    same_work=False,
    columns="fix finding? step_ms promised_ms promised_share gained_ms gained_share noise_share first_finding?",
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
    told = read_diagnosis(costs, places=places).table.set_index("finding")[["gain_ms", "gain_share"]]
    times = side_by_side(pipeline, loops, size)
    step_ms = statistics.median(ms for ms, _ in times[SLOW]) / ROUNDS[size][1]
    gains = {name: gains_of(times[SLOW], times[name]) for name in names}
    medians, rows = {name: statistics.median(shares) for name, shares in gains.items()}, []
    for name in names:
        expected = FAULTS[pipeline][name]
        promised_ms, promised_share = told.loc[expected] if expected in told.index else (0.0, 0.0)
        low, high = np.percentile(gains[name], [20, 80])
        row = {"fix": name, "finding": expected, "step_ms": step_ms}
        row |= {"promised_ms": promised_ms, "promised_share": promised_share}
        row |= {"gained_ms": medians[name] * step_ms, "gained_share": medians[name], "noise_share": (high - low) / 4}
        rows.append(row | {"first_finding": next(iter(told.index), None)})
    return rows


def _runs(plan: dict[str, tuple[int, int]]) -> list[Row]:
    """Epochs and seeds by pipeline."""
    return [
        {"pipeline": pipeline, "variant": variant, "epochs": epochs, "seed": seed}
        for pipeline, (epochs, seeds) in plan.items()
        for seed in range(seeds)
        for variant in (SLOW, FIXED)
    ]


@experiment(
    small=_sized("small", [{"pipeline": "vit", "variant": FIXED, "epochs": 1, "seed": 0}]),
    cpu=_sized("cpu", _runs({"vit": (3, 3), "gpt": (2, 2)})),
    gpu=_sized("gpu", _runs({"vit": (3, 2), "gpt": (1, 2)})),
    big_gpu=_sized("full", _runs({"vit": (5, 3), "gpt": (1, 3)})),
    version=2,
    columns="epoch_s iteration_mean_ms? peak_gib? validation_accuracy train_loss steps source constant_accuracy",
)
def whole_runs(size: str, pipeline: str, variant: str, epochs: int, seed: int) -> Row:
    """Training for whole epochs: seconds of the last one with its validation, and what was learned.

    `constant_accuracy` is that of always guessing training's commonest target.
    """
    switched, fixes = PIPELINES[pipeline], fixes_of(pipeline, variant, size)
    taken = {"epochs": epochs, "seed": seed} | options(switched, size)
    row = switched.run(fixes, **taken)
    names = ("epoch_s", "iteration_mean_ms", "peak_gib", "validation_accuracy", "train_loss", "steps", "source")
    return {name: row[name] for name in names} | {"constant_accuracy": _constant_accuracy(pipeline, size)}


@functools.cache
def _constant_accuracy(pipeline: str, size: str) -> float:
    switched = PIPELINES[pipeline]
    trainer = switched.prepare(switched.fixed - {"workers"}, **options(switched, size))
    pad_id = getattr(trainer.task.validation_metric, "pad_id", None)
    trained, judged = Counter(), Counter()
    for counts, batches in ((trained, trainer.epoch(0)), (judged, trainer.task.validation())):
        for batch in batches:
            counts.update(batch.targets.flatten().tolist())
        counts.pop(pad_id, None)
    return judged[trained.most_common(1)[0][0]] / judged.total()


@experiment(
    small=[{"steps": 40}], cpu=[{"steps": 600}], big_gpu=[{"steps": 2000}], version=2, columns="variant step ms"
)
def metrics_cost(steps: int) -> list[Row]:
    """The time of a step with a metric that is made anew from all outputs of the epoch, and with a streaming one.

    The fixed training goes on with one batch that stays on the device, with either metric in turn, so that nothing else
    grows; in blocks of a fiftieth of the steps, as the growing metric also drives the other's data out of the cache.
    Each step is waited for. 512,000 samples of 10 classes, as many as 2,000 steps of 256 are, take 0.1 s of one
    core to judge once. A row is the median of a block.
    """
    preset = {"cpu": "small", "gpu": "gpu", "big-gpu": "full"}[device_class()]
    changes = TINY if preset == "small" else {}
    fixed = CLOTHES.prepare(preset=preset, **changes | {"samples": 32, "validation_samples": 1})
    batch = _repeated(next(fixed.epoch(0)), (CLOTHES.sizes[preset] | changes)["batch_size"])
    slow = frozenset({"streaming_metrics"})
    collected = replace(fixed.task, metric=CollectedMetrics(fixed.task.metric.classes))
    trainers = {COLLECTED: Trainer(collected, fixed.precision, fixes=fixed.fixes - slow, slow=slow), STREAMING: fixed}
    every, rows = max(steps // 50, 1), []
    for first in range(-every, steps, every):  # a block to warm up
        for variant, trainer in trainers.items():
            if first == 0:
                trainer.task.metric.reset()
            times = []
            for _ in range(every):
                synchronize()
                began = time.perf_counter()
                trainer.step(batch)
                synchronize()
                times.append((time.perf_counter() - began) * 1e3)
            if first >= 0:
                rows.append({"variant": variant, "step": first, "ms": statistics.median(times)})
    return rows


def _repeated(batch: Batch, size: int) -> Batch:
    """A batch of this size, by repeating the photos of a smaller one."""
    times = -(-size // len(batch.targets))
    images, labels = batch.inputs.repeat(times, 1, 1, 1)[:size], batch.targets.repeat(times)[:size]
    return replace(batch, inputs=images, targets=labels, real=size)
