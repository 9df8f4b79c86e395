"""What chapter 0 measures: complete trainings with the stages accumulated, and with each stage alone."""

import functools
from collections.abc import Sequence
from typing import Any

from helpers.lab import device, experiment, in_fresh_process
from helpers.lab.records import Row
from helpers.text import local_wikitext
from helpers.training.stages import COMPILED, FUSED, MIXED, PROFILED, STAGES, environment, run

START, ALONE, CUMULATIVE = "start", "alone", "cumulative"
SAMPLES = 3072  # 48 steps; the slowest variant sets the time: about 31 TFLOP a step in fp32, without tensor cores
ONE_STEP = {"samples": 64, "validation_samples": 64}
SEEDS = range(3)
NAMES = list(STAGES)


def chosen(way: str, stage: str, stages: Sequence[str]) -> list[str]:
    """The stages that a configuration switches on, out of `stages` in their order."""
    up_to = stages[: stages.index(stage) + 1] if stage in stages else []
    return {START: [], ALONE: [stage], CUMULATIVE: list(up_to)}[way]


def _cumulative(stages: Sequence[str], seed: int) -> list[Row]:
    runs = [{"way": START, "stage": "none"}, *({"way": CUMULATIVE, "stage": name} for name in stages)]
    return [config | {"seed": seed} for config in runs]


def _alone(stages: Sequence[str], seed: int) -> list[Row]:
    """The first stage alone equals the stages up to it, so it isn't run again."""
    return [{"way": ALONE, "stage": name, "seed": seed} for name in stages[1:]]


def _on_cpu() -> list[Row]:
    """The stages alone, and compilation, which takes longer than all the rest, are measured with one seed."""
    compiled = {"way": CUMULATIVE, "stage": COMPILED, "seed": SEEDS[0]}
    climbed = [config for seed in SEEDS for config in _cumulative(NAMES[:-1], seed)]
    return [*climbed, compiled, *_alone(NAMES, SEEDS[0])]


def _on_gpu() -> list[Row]:
    return [config for seed in SEEDS for config in _cumulative(NAMES, seed) + _alone(NAMES, seed)]


@functools.cache
def _settle() -> None:
    """A training that absorbs what a process does once: start of the device, imports, choice of kernels."""
    run([MIXED], preset="small")


@functools.cache
def _settle_norms(stages: frozenset[str], preset: str) -> None:
    """Compile our norms' kernels, once in a process, for the widths and types that they get with these stages.

    Otherwise only the first seed would include these seconds.
    """
    run(stages, preset=preset, **ONE_STEP)


def _measured(names: Sequence[str], preset: str, seed: int, **changes: int) -> Row:
    """On a CPU in a process of its own, whose allocator keeps its pages."""
    if device().type == "cpu" and preset != "small":
        options = {"environment": environment(), "preset": preset, "seed": seed} | changes
        return in_fresh_process(_settled, names, **options)
    if FUSED in names and device().type == "cuda":
        _settle()
        _settle_norms(frozenset(names) - {COMPILED}, preset)
    return _settled(names, preset=preset, seed=seed, **changes)


def _settled(names: Sequence[str], **options: Any) -> Row:
    _settle()
    return run(names, path=local_wikitext(), **options)


FEW = [
    {"way": START, "stage": "none", "seed": 0},
    {"way": CUMULATIVE, "stage": PROFILED, "seed": 0},
    {"way": ALONE, "stage": PROFILED, "seed": 0},
]


@experiment(
    small=[config | {"size": "small"} for config in FEW],
    cpu=[config | {"size": "reduced"} for config in _on_cpu()],
    gpu=[config | {"size": "gpu"} for config in _on_gpu()],
    big_gpu=[config | {"size": "full"} for config in _on_gpu()],
    version=3,
)
def stages(way: str, stage: str, seed: int, size: str) -> Row:
    """A whole training of the language model: its time, memory, and what it learned from equally many real tokens."""
    names = chosen(way, stage, NAMES)
    return _measured(names, size, seed, **({"samples": SAMPLES} if size == "full" else {}))
