"""What chapter 3 measures: where the time of two slow pipelines goes, what each fix brings, what a diagnosis finds.

`size` is a preset of the pipelines: "small" for tests, "cpu", "full" for a GPU.
"""

import itertools
import statistics
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, schedule

from helpers.lab import Timing, device, experiment
from helpers.lab.ceilings import copy, matmul
from helpers.lab.records import Row
from helpers.lab.timing import between_ms, moment, synchronize
from helpers.pictures import cores
from helpers.profiling.costs import Cost, cost
from helpers.profiling.device_time import device_idle_share
from helpers.profiling.device_time import timeline as read_timeline
from helpers.profiling.diagnose import diagnose as read_diagnosis
from helpers.profiling.module_profiler import ModuleProfiler
from helpers.profiling.read_trace import read_trace
from helpers.text import local_wikitext
from helpers.training import CLOTHES, LANGUAGE, Batch, Excerpt, Trainer
from helpers.training.slow_parts import CollectedMetrics
from helpers.training.switched import Switched

PIPELINES: dict[str, Switched] = {"vit": CLOTHES, "gpt": LANGUAGE}
SLOW, FIXED = "slow", "fixed"
BOTH = [{"pipeline": pipeline, "variant": variant} for pipeline in PIPELINES for variant in (SLOW, FIXED)]
ALONE, CUMULATIVE = "alone", "cumulative"
# Faults that are drawn, each in a loop without any other, and the later fixes that would hide it.
DRAWN_FAULTS: dict[str, dict[str, set[str]]] = {
    "vit": {"decode_once": {"photos_on_device", "workers"}, "bf16": set(), "fused_optimizer": set()},
    "gpt": {"short_padding": {"packed"}, "fused_attention": set(), "fused_loss": set()},
}
ALL = "all"
DRAWN = 120  # operations of a drawn step, the longest
PARTS = ("load", "forward", "loss", "backward", "optimizer", "metrics")  # of a step, as the trainer names them
CEILINGS = {"small": (256, 16), "cpu": (2048, 256), "full": (8192, 2048)}  # product's size, MiB of a copy
COLLECTED, STREAMING = "collected on the CPU", "streaming on the device"
TINY = {  # so small that the metric's time shows on a CPU, too
    "batch_size": 256,
    "model": {"image_size": 16, "patch_size": 16, "depth": 1, "heads": 2, "head_dim": 16, "mlp_size": 32},
}


def _sized(size: str, rows: list[Row]) -> list[Row]:
    return [{"size": size} | row for row in rows]


def fixes_of(pipeline: str, variant: str) -> frozenset[str]:
    return PIPELINES[pipeline].fixed if variant == FIXED else frozenset()


@experiment(small=_sized("small", BOTH), cpu=_sized("cpu", BOTH), big_gpu=_sized("full", BOTH))
def diagnose(size: str, pipeline: str, variant: str) -> list[Row]:
    """What a diagnosis finds in each pipeline, the most expensive first."""
    findings = read_diagnosis(_trace(PIPELINES[pipeline], fixes_of(pipeline, variant), size, detailed=True))
    if not len(findings):
        return [{"rank": 0, "finding": "nothing"}]
    findings["where"] = findings["where"].str.replace(f"{Path(__file__).parents[2]}/", "", regex=False)
    rows = findings.astype(object).where(findings.notna(), None).to_dict("records")
    return [{"rank": rank} | row for rank, row in enumerate(rows)]


_DRAWN = [{"pipeline": name, "fault": fault} for name in PIPELINES for fault in (ALL, *DRAWN_FAULTS[name])]


@experiment(small=_sized("small", _DRAWN[:2]), cpu=_sized("cpu", _DRAWN), big_gpu=_sized("full", _DRAWN), version=2)
def timeline(size: str, pipeline: str, fault: str) -> list[Row]:
    """A step with one fault and without it, to be drawn: what ran when, and in which part of the step.

    All other faults are fixed; the fault "all" is the slow pipeline.
    """
    switched, rows = PIPELINES[pipeline], []
    hidden = switched.fixed if fault == ALL else DRAWN_FAULTS[pipeline][fault] | {fault}
    for variant, fixes in ((SLOW, switched.fixed - hidden), (FIXED, switched.fixed)):
        step = _with_parts(read_timeline(_trace(switched, fixes, size)))
        parts = step[(step["track"] == "annotations") & step["name"].isin(PARTS)]
        ops = step[step["track"] != "annotations"].assign(ms=step["end_ms"] - step["begin_ms"]).nlargest(DRAWN, "ms")
        shown = pd.concat([parts, ops.drop(columns="ms").sort_values("begin_ms")])
        rows += [{"variant": variant} | row | {"name": row["name"][:60]} for row in shown.to_dict("records")]
    return rows


def _with_parts(step: pd.DataFrame) -> pd.DataFrame:
    """The rows of a step with the part that each lies in by its begin; None outside all of them."""
    ranges = step[(step["track"] == "annotations") & step["name"].isin(PARTS)]
    spans = list(zip(ranges["begin_ms"], ranges["end_ms"], ranges["name"], strict=True))
    inside = [next((name for low, high, name in spans if low <= at < high), None) for at in step["begin_ms"]]
    return step.assign(part=inside)


@experiment(small=_sized("small", BOTH), cpu=_sized("cpu", BOTH), big_gpu=_sized("full", BOTH), version=2)
def modules(size: str, pipeline: str, variant: str) -> list[Row]:
    """Forward and backward time (medians over steps) and memory of every module, and what its work must cost at least.

    The lower bound is that of the matrix products at the measured rate, or of the bytes at the measured bandwidth,
    whichever is more; for all calls of a step, forward and backward.
    """
    profiled: list[_ProfiledModel] = []

    def profile_model(model: nn.Module) -> ModuleProfiler:
        profiled.append(_ProfiledModel(model, pipeline))
        return profiled[-1].profiler

    switched, fixes, steps = PIPELINES[pipeline], fixes_of(pipeline, variant), 5 if size == "small" else 14
    options = _options(switched, size) | _within_an_epoch(switched, steps, size)
    switched.run(fixes, steps=Excerpt(steps), profile=profile_model, **options)
    table = profiled[0].profiler.summary(median=True)
    bounds = profiled[0].lower_bounds(torch.bfloat16 if "bf16" in fixes else torch.float32, *CEILINGS[size])
    names = ["module", "type", "calls", "forward_ms", "backward_ms", "total_ms", "self_ms", "share"]
    names += ["activation_mib", "peak_mib"]
    rows = table[names].astype(object).where(table[names].notna(), None).to_dict("records")
    return [row | bounds.get(row["module"], {}) for row in rows]


class _ProfiledModel:
    """A model's profiler, and the shapes that its layers were called with in one step."""

    def __init__(self, model: nn.Module, name: str) -> None:
        self.profiler = ModuleProfiler(model, name)
        self.called: dict[str, tuple[nn.Module, tuple[int, ...]]] = {}
        for path, module in model.named_modules():
            if not list(module.children()):
                module.register_forward_pre_hook(partial(self._note, f"{name}.{path}"))

    def _note(self, path: str, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if torch.is_grad_enabled() and path not in self.called:
            self.called[path] = module, tuple(inputs[0].shape)

    def lower_bounds(self, dtype: torch.dtype, product: int, mib: int) -> dict[str, Row]:
        """Operations, bytes and the lower bound on the time of each layer that `costs` knows."""
        (_, tflops), (_, gb_per_s) = matmul(product, dtype), copy(mib)
        bounds = {}
        for path, (module, shape) in self.called.items():
            costs = cost(module, shape, dtype.itemsize)
            if costs is not None:
                both = Cost(sum(c.flop for c in costs), sum(c.bytes for c in costs))
                lower_bound_ms = sum(c.lower_bound_ms(tflops, gb_per_s) for c in costs)
                bounds[path] = {
                    "gflop": both.flop / 1e9,
                    "moved_mib": both.bytes / 2**20,
                    "lower_bound_ms": lower_bound_ms,
                }
        return bounds


def _fix_rows(pipeline: Switched, size: str) -> list[Row]:
    """Each fix alone, and one more at a time; on a CPU without those that need a GPU or aren't in a step."""
    names = [switch.name for switch in pipeline.switches if size == "full" or switch.on_cpu]
    if size == "small":
        names = names[-1:]
    return [{"size": size, "variant": variant, "fix": name} for variant in (ALONE, CUMULATIVE) for name in names]


@experiment(
    small=_fix_rows(CLOTHES, "small"), cpu=_fix_rows(CLOTHES, "cpu"), big_gpu=_fix_rows(CLOTHES, "full"), version=2
)
def vit_fixes(size: str, variant: str, fix: str) -> Row:
    """The ViT on photos: each fix alone, and one more at a time, against the slow loop beside it."""
    return _fixed(CLOTHES, size, variant, fix)


@experiment(
    small=_fix_rows(LANGUAGE, "small"),
    cpu=_fix_rows(LANGUAGE, "cpu"),
    big_gpu=_fix_rows(LANGUAGE, "full"),
    version=2,
    same_work=False,  # lengths differ from batch to batch
)
def gpt_fixes(size: str, variant: str, fix: str) -> Row:
    """The language model: each fix alone, and one more at a time, against the slow loop beside it."""
    return _fixed(LANGUAGE, size, variant, fix)


TIMED = {"small": (1, 2), "cpu": (1, 4), "full": (5, 20)}  # steps of a block: to settle, timed
BLOCKS = 2


def _fixed(pipeline: Switched, size: str, variant: str, fix: str) -> Row:
    """Blocks of steps of the slow loop and of the fixed one in turn; times are for a real target (photo or token).

    Within a block a loader's workers run ahead of their own loop only. They deliver in bursts, so times are means. A
    packed step has other samples than a padded one, so a step's time alone wouldn't compare them. The idle share comes
    from a separate profile on a GPU.
    """
    names = [switch.name for switch in pipeline.switches]
    fixes = frozenset([fix] if variant == ALONE else names[: names.index(fix) + 1])
    settling, timed = TIMED[size]
    blocks: dict[str, list[tuple[list[float], int]]] = {}
    for _ in range(BLOCKS):
        for name, chosen in ((SLOW, frozenset()), (fix, fixes)):
            workers = _workers(pipeline, chosen, size)
            first = max(settling, workers)
            count = first + max(timed, 4 * workers)
            options = _options(pipeline, size) | _within_an_epoch(pipeline, count, size)
            trainer = pipeline.prepare(chosen, **options)
            blocks.setdefault(name, []).append(_timed_steps(trainer, count, first))
            source, prepare_s = trainer.task.source, trainer.task.prepare_s
    times = [ms for samples, _ in blocks[fix] for ms in samples]
    per_target = {name: _us_per_target(done) for name, done in blocks.items()}
    timing = Timing.of(times)
    on_gpu = device().type == "cuda" and variant == CUMULATIVE
    return {
        "iteration_ms": timing.median_ms,
        "iteration_p20_ms": timing.p20_ms,
        "iteration_p80_ms": timing.p80_ms,
        "iteration_mean_ms": statistics.mean(times),
        "n": timing.n,
        "us_per_target": per_target[fix],
        "baseline": SLOW,
        "baseline_us_per_target": per_target[SLOW],
        "speedup": per_target[SLOW] / per_target[fix],
        "prepare_s": prepare_s,
        "source": source,
        "device_idle_share": device_idle_share(_trace(pipeline, fixes, size)) if on_gpu else None,
    }


def _timed_steps(trainer: Trainer, count: int, settling: int) -> tuple[list[float], int]:
    """Milliseconds of each step of an epoch's first `count` but the first, loading included; their real targets."""
    marks, real = [], []
    with trainer.settings():
        marks.append(moment())
        for batch in itertools.islice(trainer.epoch(0), count):
            trainer.step(batch)
            marks.append(moment())
            real.append(batch.real)
        synchronize()
    return [between_ms(*pair) for pair in itertools.pairwise(marks[settling:])], sum(real[settling:])


def _us_per_target(blocks: list[tuple[list[float], int]]) -> float:
    return sum(sum(samples) for samples, _ in blocks) * 1e3 / sum(real for _, real in blocks)


_RUNS = [
    {"pipeline": pipeline, "variant": variant, "epochs": epochs, "seed": seed}
    for seed in range(3)
    for pipeline, epochs in (("vit", 5), ("gpt", 1))
    for variant in (SLOW, FIXED)
]


@experiment(
    small=_sized("small", [{"pipeline": "vit", "variant": FIXED, "epochs": 1, "seed": 0}]),
    cpu=_sized("cpu", [row | {"epochs": 3} for row in _RUNS]),
    big_gpu=_sized("full", _RUNS),
    version=2,
)
def whole_runs(size: str, pipeline: str, variant: str, epochs: int, seed: int) -> Row:
    """Training for whole epochs: seconds of the last one with its validation, and what was learned.

    `constant_accuracy` is that of guessing the commonest target of the validation split.
    """
    switched, fixes = PIPELINES[pipeline], fixes_of(pipeline, variant)
    row = switched.run(fixes, epochs=epochs, seed=seed, **_options(switched, size))
    names = ("epoch_s", "iteration_mean_ms", "peak_gib", "validation_accuracy", "train_loss", "steps", "source")
    guess = _constant_accuracy(switched.prepare(switched.fixed - {"workers"}, **_options(switched, size)))
    return {name: row[name] for name in names} | {"constant_accuracy": guess}


def _constant_accuracy(trainer: Trainer) -> float:
    pad_id, counts = getattr(trainer.task.validation_metric, "pad_id", None), Counter()
    for batch in trainer.task.validation():
        counts.update(batch.targets.flatten().tolist())
    counts.pop(pad_id, None)
    return counts.most_common(1)[0][1] / counts.total()


@experiment(small=[{"steps": 40}], cpu=[{"steps": 1000}], big_gpu=[{"steps": 2000}])
def metrics_cost(steps: int) -> list[Row]:
    """The time of a step with a metric that is made anew from all outputs of the epoch, and with a streaming one.

    The fixed training goes on with one batch that stays on the device, with either metric in turn, so that nothing else
    grows. Each step is waited for. 512,000 samples of 10 classes, as many as 2,000 steps of 256 are, take 0.1 s of one
    core to judge once. A row is the median of a fiftieth of the steps.
    """
    preset = "full" if device().type == "cuda" else "small"
    changes = TINY if preset == "small" else {}
    fixed = CLOTHES.prepare(preset=preset, **changes | {"samples": 32, "validation_samples": 1})
    batch = _repeated(next(fixed.epoch(0)), (CLOTHES.sizes[preset] | changes)["batch_size"])
    slow = frozenset({"streaming_metrics"})
    collected = replace(fixed.task, metric=CollectedMetrics(fixed.task.metric.classes))
    trainers = {COLLECTED: Trainer(collected, fixed.precision, fixes=fixed.fixes - slow, slow=slow), STREAMING: fixed}
    every = max(steps // 50, 1)
    chunks: dict[tuple[str, int], list[float]] = {}
    for step in range(-3, steps):  # three to warm up
        for variant, trainer in trainers.items():
            if step == 0:
                trainer.task.metric.reset()
            synchronize()
            began = time.perf_counter()
            trainer.step(batch)
            synchronize()
            if step >= 0:
                chunks.setdefault((variant, step // every), []).append((time.perf_counter() - began) * 1e3)
    return [
        {"variant": variant, "step": chunk * every, "ms": statistics.median(times)}
        for (variant, chunk), times in chunks.items()
    ]


def _repeated(batch: Batch, size: int) -> Batch:
    """A batch of this size, by repeating the photos of a smaller one."""
    times = -(-size // len(batch.targets))
    images, labels = batch.inputs.repeat(times, 1, 1, 1)[:size], batch.targets.repeat(times)[:size]
    return replace(batch, inputs=images, targets=labels, real=size)


def _trace(pipeline: Switched, fixes: frozenset[str], size: str, detailed: bool = False) -> Any:
    """The trace of a few steps within one epoch. `detailed` adds shapes and source lines, and slows the host."""
    profiles: list[profile] = []
    on_gpu = device().type == "cuda"
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if on_gpu else [])
    workers = _workers(pipeline, fixes, size) if on_gpu else 0
    wait, active = max(workers, 1), max(workers, 4 if on_gpu else 2)  # with workers a complete burst, after the first

    def profile_steps(_model: nn.Module) -> profile:
        steps = schedule(wait=wait, warmup=2, active=active, repeat=1)
        profiles.append(profile(activities=activities, schedule=steps, record_shapes=detailed, with_stack=detailed))
        return profiles[0]

    steps = wait + active + 3
    options = _options(pipeline, size) | _within_an_epoch(pipeline, steps, size)
    pipeline.run(fixes, steps=Excerpt(steps), profile=profile_steps, **options)
    return read_trace(profiles[0])


def _options(pipeline: Switched, size: str) -> dict[str, Any]:
    """The preset, and the text: WikiText where `$HELPERS_WIKITEXT` names it."""
    text = pipeline is LANGUAGE and size != "small"
    return {"preset": size, "path": local_wikitext() if text else None}


def _within_an_epoch(pipeline: Switched, steps: int, size: str) -> dict[str, int]:
    """Changes of the preset that make an epoch have so many steps: workers start anew in the next."""
    preset = pipeline.sizes[size]
    needed = preset["batch_size"] * (steps + 2)
    if "passes" in preset:
        return {"passes": -(-needed // preset["samples"])}
    return {"samples": max(preset["samples"], needed)}


def _workers(pipeline: Switched, fixes: frozenset[str], size: str) -> int:
    """How many worker processes make batches."""
    makes = "workers" in fixes and "photos_on_device" not in fixes
    return min(pipeline.sizes[size]["workers"], cores()) if makes else 0
