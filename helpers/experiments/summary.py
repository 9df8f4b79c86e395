"""What chapter 0 measures: complete trainings with the stages accumulated, and with each stage alone."""

import functools
from collections.abc import Sequence

from helpers.lab import device, experiment
from helpers.lab.records import Row
from helpers.training.stages import COMPILED, FUSED, MIXED, PROFILED, STAGES, run

START, ALONE, CUMULATIVE = "start", "alone", "cumulative"
SAMPLES = 3072  # 48 steps; the slowest variant sets the time: about 31 TFLOP a step in fp32, without tensor cores
ONE_STEP = {"samples": 64, "validation_samples": 64}
SEEDS = range(3)
ON_GPU = list(STAGES)
ON_CPU = [name for name in STAGES if name != MIXED]  # a CPU has no fast matrix products in fp16


def chosen(way: str, stage: str, stages: Sequence[str]) -> list[str]:
    """The stages that a configuration switches on, out of `stages` in their order."""
    up_to = stages[: stages.index(stage) + 1] if stage in stages else []
    return {START: [], ALONE: [stage], CUMULATIVE: list(up_to)}[way]


def _configurations(stages: Sequence[str]) -> list[Row]:
    """The first stage alone equals the stages up to it, so it is run once."""
    runs = [{"way": START, "stage": "none"}]
    runs += [{"way": CUMULATIVE, "stage": name} for name in stages]
    runs += [{"way": ALONE, "stage": name} for name in stages[1:]]
    return [config | {"seed": seed} for seed in SEEDS for config in runs]


@functools.cache
def _settle() -> None:
    """A training that absorbs what a process does once: start of the device, imports, choice of kernels."""
    run([MIXED] if device().type == "cuda" else [], preset="small")


@functools.cache
def _settle_norms(stages: frozenset[str], preset: str) -> None:
    """Compile our norms' kernels, once in a process, for the widths and types that they get with these stages.

    Otherwise only the first seed would include these seconds.
    """
    run(stages, preset=preset, **ONE_STEP)


def _measured(names: Sequence[str], preset: str, seed: int, **changes: int) -> Row:
    _settle()
    if FUSED in names and device().type == "cuda":
        _settle_norms(frozenset(names) - {COMPILED}, preset)
    return run(names, preset=preset, seed=seed, **changes)


FEW = [
    {"way": START, "stage": "none", "seed": 0},
    {"way": CUMULATIVE, "stage": PROFILED, "seed": 0},
    {"way": ALONE, "stage": PROFILED, "seed": 0},
]


@experiment(
    small=[config | {"size": "small"} for config in FEW],
    cpu=[config | {"size": "reduced"} for config in _configurations(ON_CPU)],
    big_gpu=[config | {"size": "full"} for config in _configurations(ON_GPU)],
    version=2,
)
def stages(way: str, stage: str, seed: int, size: str) -> Row:
    """A whole training of the language model: its time, memory, and what it learned from equally many real tokens."""
    names = chosen(way, stage, ON_CPU if size == "reduced" else ON_GPU)
    return _measured(names, size, seed, **({"samples": SAMPLES} if size == "full" else {}))
