"""What a metric costs that grows with the epoch, against one that doesn't."""

import time
from dataclasses import replace
from typing import Any

from helpers.lab.arguments import check_positive
from helpers.lab.timing import synchronize

from .vit_data import Pair
from .vit_pipeline import FIXED, PRESETS, prepare

WAYS = {"collected on the CPU": FIXED - {"streaming_metrics"}, "streaming on the device": FIXED}

# How many steps show it, and what of the pipeline's preset is changed for that: on a CPU the model has to be tiny.
STEPS = {"small": 300, "full": 2000}
CHANGES: dict[str, dict[str, Any]] = {
    "small": {
        "batch_size": 256,
        "model": {"image_size": 16, "patch_size": 16, "depth": 1, "heads": 2, "head_dim": 16, "mlp_size": 32},
    },
    "full": {},
}


def metrics_cost(steps: int | None = None, *, preset: str = "small", seed: int = 0, **changes: Any) -> list[dict]:
    """Milliseconds of each of the first `steps` steps of an epoch: rows of `step`, `way`, `ms`.

    The fixed pipeline trains on one batch that stays on the device, with either metric in turn, so that nothing else
    grows. Each step is waited for. 512,000 samples of 10 classes, as many as 2,000 steps of 256 are, take 0.1 s of one
    core to judge once. `changes` replace values of the preset.
    """
    changes = CHANGES.get(preset, {}) | changes
    steps = STEPS.get(preset) if steps is None else steps
    check_positive(steps=1 if steps is None else steps)
    first = prepare(FIXED, preset=preset, seed=seed, **changes | {"samples": 32, "validation_samples": 1})
    batch = _repeated(next(first.epoch(0)), (PRESETS[preset] | changes)["batch_size"])
    trainings = {way: replace(first, fixes=fixes) for way, fixes in WAYS.items()}
    rows = []
    for step in range(-3, steps):  # three to warm up
        for way, training in trainings.items():
            if step == 0:
                training.metrics.reset()
            synchronize()
            began = time.perf_counter()
            training.step(batch)
            synchronize()
            if step >= 0:
                rows.append({"step": step, "way": way, "ms": (time.perf_counter() - began) * 1e3})
    return rows


def _repeated(batch: Pair, size: int) -> Pair:
    """A batch of this size out of a smaller one's photos."""
    images, labels = batch
    times = -(-size // len(labels))
    return images.repeat(times, 1, 1, 1)[:size], labels.repeat(times)[:size]
