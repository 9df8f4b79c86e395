"""What chapter 3 measures: where the time of two slow pipelines goes, what each fix brings, what a diagnosis finds."""

import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, schedule

from helpers.lab import device, experiment
from helpers.lab.ceilings import copy, matmul
from helpers.lab.records import Row
from helpers.lab.timing import synchronize
from helpers.pictures import cores
from helpers.profiling.costs import Cost, cost
from helpers.profiling.device_time import device_idle_share
from helpers.profiling.device_time import timeline as read_timeline
from helpers.profiling.diagnose import diagnose as read_diagnosis
from helpers.profiling.module_profiler import ModuleProfiler
from helpers.profiling.read_trace import read_trace
from helpers.training import CLOTHES, LANGUAGE, Batch, Excerpt, Trainer
from helpers.training.loop import SETTLING
from helpers.training.slow_parts import CollectedMetrics
from helpers.training.switched import Switched

PIPELINES: dict[str, Switched] = {"vit": CLOTHES, "gpt": LANGUAGE}
BOTH = [{"pipeline": pipeline, "variant": variant} for pipeline in PIPELINES for variant in ("slow", "fixed")]
SLOW, ALONE, CUMULATIVE = "slow", "alone", "cumulative"
TIMED_STEPS, BURSTS = 20, 4  # after warm-up; with workers at least so many batches of each worker
PATIENCE_S = 20.0  # after which fewer timed steps suffice
COLLECTED, STREAMING = "collected on the CPU", "streaming on the device"
TINY = {  # so small that the metric's time shows on a CPU, too
    "batch_size": 256,
    "model": {"image_size": 16, "patch_size": 16, "depth": 1, "heads": 2, "head_dim": 16, "mlp_size": 32},
}
DRAWN = 400  # rows of a timeline, the longest


def _preset() -> str:
    return "full" if device().type == "cuda" else "small"


def fixes_of(pipeline: str, variant: str) -> frozenset[str]:
    return PIPELINES[pipeline].fixed if variant == "fixed" else frozenset()


@experiment(small=BOTH, cpu=BOTH)
def diagnose(pipeline: str, variant: str) -> list[Row]:
    """What a diagnosis finds in each pipeline, the most expensive first."""
    findings = read_diagnosis(_trace(PIPELINES[pipeline], fixes_of(pipeline, variant), detailed=True))
    if not len(findings):
        return [{"rank": 0, "finding": "nothing"}]
    findings["where"] = findings["where"].str.replace(f"{Path(__file__).parents[2]}/", "", regex=False)
    rows = findings.astype(object).where(findings.notna(), None).to_dict("records")
    return [{"rank": rank} | row for rank, row in enumerate(rows)]


@experiment(small=BOTH[:2], cpu=BOTH)
def timeline(pipeline: str, variant: str) -> list[Row]:
    """One step from a trace, to be drawn: the longest of what ran on the host and on the device, and when."""
    rows = read_timeline(_trace(PIPELINES[pipeline], fixes_of(pipeline, variant)))
    rows = rows.assign(ms=rows["end_ms"] - rows["begin_ms"]).nlargest(DRAWN, "ms").sort_values("begin_ms")
    return [row | {"name": row["name"][:60]} for row in rows.drop(columns="ms").to_dict("records")]


@experiment(small=BOTH, cpu=BOTH)
def modules(pipeline: str, variant: str) -> list[Row]:
    """Forward and backward time and memory of every module, and what its work must cost at least.

    The lower bound is that of the matrix products at the measured rate, or of the bytes at the measured bandwidth,
    whichever is more; for all calls of a step, forward and backward.
    """
    profiled: list[_ProfiledModel] = []

    def profile_model(model: nn.Module) -> ModuleProfiler:
        profiled.append(_ProfiledModel(model, pipeline))
        return profiled[-1].profiler

    fixes = fixes_of(pipeline, variant)
    PIPELINES[pipeline].run(fixes, preset=_preset(), steps=Excerpt(10), profile=profile_model)
    table = profiled[0].profiler.summary()
    bounds = profiled[0].lower_bounds(torch.bfloat16 if "bf16" in fixes else torch.float32)
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

    def lower_bounds(self, dtype: torch.dtype) -> dict[str, Row]:
        """Operations, bytes and the lower bound on the time of each layer that `costs` knows."""
        on_gpu = device().type == "cuda"
        _, tflops = matmul(8192 if on_gpu else 256, dtype)
        _, gb_per_s = copy(2048 if on_gpu else 16)
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


def _fix_configurations(pipeline: Switched) -> list[Row]:
    names = [switch.name for switch in pipeline.switches]
    return [{"variant": SLOW, "fix": "none"}] + [
        {"variant": variant, "fix": name} for variant in (ALONE, CUMULATIVE) for name in names
    ]


def _small_configurations(pipeline: Switched) -> list[Row]:
    names = [switch.name for switch in pipeline.switches if not switch.optional]
    ends = [{"variant": ALONE, "fix": names[-1]}, {"variant": CUMULATIVE, "fix": names[-1]}]
    return [{"variant": SLOW, "fix": "none"}, *ends]


@experiment(small=_small_configurations(CLOTHES), big_gpu=_fix_configurations(CLOTHES))
def vit_fixes(variant: str, fix: str) -> Row:
    """The ViT on photos: each fix alone, and one more at a time."""
    return _fixed(CLOTHES, variant, fix)


@experiment(small=_small_configurations(LANGUAGE), big_gpu=_fix_configurations(LANGUAGE))
def gpt_fixes(variant: str, fix: str) -> Row:
    """The language model: each fix alone, and one more at a time."""
    return _fixed(LANGUAGE, variant, fix)


def _fixed(pipeline: Switched, variant: str, fix: str) -> Row:
    """Time steps after warm-up within one epoch: `TIMED_STEPS`, or as many as `PATIENCE_S` allows.

    Workers deliver in bursts, one batch each, so a few complete bursts are timed, without the batches made before the
    first step. The idle share comes from a separate profile, of the slow and the cumulative variants only.
    """
    names = [switch.name for switch in pipeline.switches]
    chosen = {SLOW: [], ALONE: [fix], CUMULATIVE: names[: names.index(fix) + 1] if fix in names else []}[variant]
    fixes = frozenset(chosen)
    excerpt = Excerpt(4)
    if _preset() == "full":
        workers = _workers(pipeline, fixes)
        settling = max(SETTLING, workers)
        excerpt = Excerpt(settling + max(TIMED_STEPS, BURSTS * workers), settling, PATIENCE_S)
    row = pipeline.run(fixes, preset=_preset(), steps=excerpt, **_within_an_epoch(pipeline, excerpt.steps))
    columns = (
        "iteration_ms",
        "iteration_p20_ms",
        "iteration_p80_ms",
        "iteration_mean_ms",
        "n",
        "peak_gib",
        "prepare_s",
        "source",
    )
    profiled = device().type == "cuda" and variant != ALONE
    idle = device_idle_share(_trace(pipeline, fixes)) if profiled else None
    return {name: row[name] for name in columns} | {"device_idle_share": idle}


@experiment(
    small=[{"pipeline": "vit", "variant": "fixed", "epochs": 1, "seed": 0}],
    big_gpu=[
        {"pipeline": pipeline, "variant": variant, "epochs": epochs, "seed": seed}
        for seed in range(3)
        for pipeline, epochs in (("vit", 5), ("gpt", 1))
        for variant in ("slow", "fixed")
    ],
)
def whole_runs(pipeline: str, variant: str, epochs: int, seed: int) -> Row:
    """Training for whole epochs: seconds of the last one with its validation, and what was learned."""
    row = PIPELINES[pipeline].run(fixes_of(pipeline, variant), preset=_preset(), epochs=epochs, seed=seed)
    names = ("epoch_s", "iteration_mean_ms", "peak_gib", "validation_accuracy", "train_loss", "steps", "source")
    return {name: row[name] for name in names}


@experiment(small=[{"steps": 40}], cpu=[{"steps": 2000}])
def metrics_cost(steps: int) -> list[Row]:
    """The time of a step with a metric that is made anew from all outputs of the epoch, and with a streaming one.

    The fixed training goes on with one batch that stays on the device, with either metric in turn, so that nothing else
    grows. Each step is waited for. 512,000 samples of 10 classes, as many as 2,000 steps of 256 are, take 0.1 s of one
    core to judge once. A row is the median of a fiftieth of the steps.
    """
    preset = _preset()
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
        {"variant": variant, "step": chunk * every, "ms": median(times)} for (variant, chunk), times in chunks.items()
    ]


def _repeated(batch: Batch, size: int) -> Batch:
    """A batch of this size, by repeating the photos of a smaller one."""
    times = -(-size // len(batch.targets))
    images, labels = batch.inputs.repeat(times, 1, 1, 1)[:size], batch.targets.repeat(times)[:size]
    return replace(batch, inputs=images, targets=labels, real=size)


def _trace(pipeline: Switched, fixes: frozenset[str], detailed: bool = False) -> Any:
    """The trace of a few steps within one epoch. `detailed` adds shapes and source lines, and slows the host."""
    profiles: list[profile] = []
    on_gpu = device().type == "cuda"
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if on_gpu else [])
    workers = _workers(pipeline, fixes) if on_gpu else 0
    wait, active = max(workers, 1), max(workers, 4 if on_gpu else 2)  # with workers a complete burst, after the first

    def profile_steps(_model: nn.Module) -> profile:
        steps = schedule(wait=wait, warmup=2, active=active, repeat=1)
        profiles.append(profile(activities=activities, schedule=steps, record_shapes=detailed, with_stack=detailed))
        return profiles[0]

    steps = wait + active + 3
    longer = _within_an_epoch(pipeline, steps)
    pipeline.run(fixes, preset=_preset(), steps=Excerpt(steps), profile=profile_steps, **longer)
    return read_trace(profiles[0])


def _within_an_epoch(pipeline: Switched, steps: int) -> dict[str, int]:
    """Changes of the preset that make an epoch have so many steps: workers start anew in the next."""
    preset = pipeline.sizes[_preset()]
    needed = preset["batch_size"] * (steps + 2)
    if "passes" in preset:
        return {"passes": -(-needed // preset["samples"])}
    return {"samples": max(preset["samples"], needed)}


def _workers(pipeline: Switched, fixes: frozenset[str]) -> int:
    """How many worker processes make batches."""
    makes = "workers" in fixes and "photos_on_device" not in fixes
    return min(pipeline.sizes[_preset()]["workers"], cores()) if makes else 0
