"""Trainings of whole epochs, and a metric whose cost grows."""

import functools
import statistics
import time
from collections import Counter
from dataclasses import replace

from helpers.lab import experiment
from helpers.lab.machine import device_class
from helpers.lab.records import Row
from helpers.lab.timing import synchronize
from helpers.training import CLOTHES, Batch, Trainer
from helpers.training.slow_parts import CollectedMetrics

from .planted_faults import FIXED, PIPELINES, SLOW, fixes_of, options
from .two_loops import sized

COLLECTED, STREAMING = "collected on the CPU", "streaming on the device"
TINY = {  # so small that the metric's time shows on a CPU, too
    "batch_size": 256,
    "model": {"image_size": 16, "patch_size": 16, "depth": 1, "heads": 2, "head_dim": 16, "mlp_size": 32},
}


def _runs(plan: dict[str, tuple[int, int]]) -> list[Row]:
    """Epochs and seeds by pipeline."""
    return [
        {"pipeline": pipeline, "variant": variant, "epochs": epochs, "seed": seed}
        for pipeline, (epochs, seeds) in plan.items()
        for seed in range(seeds)
        for variant in (SLOW, FIXED)
    ]


@experiment(
    small=sized("small", [{"pipeline": "vit", "variant": FIXED, "epochs": 1, "seed": 0}]),
    cpu=sized("cpu", _runs({"vit": (3, 3), "gpt": (2, 3)})),
    gpu=sized("gpu", _runs({"vit": (3, 2), "gpt": (1, 2)})),
    big_gpu=sized("full", _runs({"vit": (5, 3), "gpt": (1, 3)})),
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


@experiment(small=[{"steps": 3}], cpu=[{"steps": 600}], big_gpu=[{"steps": 2000}], version=2, columns="variant step ms")
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
    collected = replace(fixed.task, metric=CollectedMetrics(fixed.task.metric.classes))
    trainers = {
        COLLECTED: Trainer(collected, fixed.precision, faults=replace(fixed.faults, metrics_collected=True)),
        STREAMING: fixed,
    }
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
