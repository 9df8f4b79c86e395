"""What a metric costs that grows with the epoch, against one that doesn't."""

import time
from dataclasses import replace

from helpers.lab.timing import synchronize

from .vit_pipeline import FIXED, PRESETS, prepare

WAYS = {"collected on the CPU": FIXED - {"streaming_metrics"}, "streaming on the device": FIXED}


def metrics_cost(steps: int = 200, *, preset: str = "small", seed: int = 0, **changes) -> list[dict]:
    """Milliseconds of each of the first `steps` steps of an epoch: rows of `step`, `way`, `ms`.

    The fixed pipeline trains on one batch that stays on the device, with either metric in turn, so that nothing else
    grows. Each step is waited for. `changes` replace values of the preset.
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps is {steps!r}; it must be an integer of at least 1")
    size = (PRESETS.get(preset, {}) | changes).get("batch_size")
    first = prepare(FIXED, preset=preset, seed=seed, **changes | {"samples": size, "validation_samples": 1})
    trainings = {way: replace(first, fixes=fixes) for way, fixes in WAYS.items()}
    batch = next(first.epoch(0))
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
