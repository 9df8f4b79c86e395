"""What chapter 0 measures: complete trainings with the stages accumulated, each stage alone, and steps in turns."""

import functools
from collections.abc import Iterable, Sequence
from typing import Any

from ..lab import Worth, experiment, in_fresh_process
from ..lab.machine import missing_because
from ..lab.records import Row
from ..text import local_wikitext
from ..training.stages import COMPILED, MIXED, PROFILED, STAGES, build_trainer, environment, run
from .profiling.fixes import COLUMNS, paired
from .profiling.planted_faults import in_turns

START, ALONE, CUMULATIVE = "start", "alone", "cumulative"
SEEDS = range(3)
NAMES = list(STAGES)


def chosen(way: str, stage: str, stages: Sequence[str]) -> list[str]:
    """The stages that a configuration switches on, out of `stages` in their order."""
    up_to = stages[: stages.index(stage) + 1] if stage in stages else []
    return {START: [], ALONE: [stage], CUMULATIVE: list(up_to)}[way]


def _runs(size: str, variants: Iterable[tuple[str, str]], seeds: Iterable[int]) -> list[Row]:
    return [{"way": way, "stage": stage, "seed": seed, "size": size} for seed in seeds for way, stage in variants]


def _missing(stage: str, size: str, **_: object) -> str:
    """A CPU that doesn't multiply bf16 would train in fp32 once more."""
    return missing_because("native bf16") if stage == MIXED and size == "reduced" else ""


CLIMBED = [(START, "none"), *((CUMULATIVE, name) for name in NAMES)]


@experiment(
    small=_runs("small", [(START, "none"), (CUMULATIVE, PROFILED), (ALONE, PROFILED)], [0]),
    # Compilation, which takes longer than all the rest, is measured with one seed, and no stage alone.
    cpu=_runs("reduced", CLIMBED[:-1], SEEDS) + _runs("reduced", CLIMBED[-1:], [0]),
    gpu=[],  # there `time_to_loss` takes its place: an epoch of seconds ends above the loss of a constant guess
    version=3,
    missing=_missing,
    worth=Worth(
        60,
        "a training from the first line to the last, stage by stage",
        cpu=19.9,
        headline={"way": (START, CUMULATIVE)},  # of all seeds: one decides nothing
    ),
)
def stages(way: str, stage: str, seed: int, size: str) -> Row:
    """A whole training of the language model: its time, memory, and what it learned from equally many real tokens.

    In a process of its own, where nothing is left of an earlier one, and whose allocator keeps its pages.
    """
    names, options = chosen(way, stage, NAMES), {"preset": size, "seed": seed, "path": local_wikitext()}
    if size == "small":
        return run(names, **options)
    return in_fresh_process(_settled, names, environment=environment(), **options)


def _settled(names: Sequence[str], **options: Any) -> Row:
    """`run`, after a training that absorbs what a process does once: start of the device, imports, kernels."""
    run([MIXED], preset="small")
    return run(names, **options)


@experiment(
    small=[{"stage": MIXED, "size": "small"}],
    cpu=[{"stage": stage, "size": "reduced"} for stage in NAMES if stage != COMPILED],
    gpu=[],
    columns=COLUMNS,
    missing=_missing,
    worth=Worth(60, "what each stage brings in a step", cpu=15, gpu=0),
)
def stage_steps(stage: str, size: str) -> Row:
    """Steps with a stage and without it in turns, both with the stages before it, until it is decided.

    Compilation isn't here: new shapes of batches are compiled in the midst of an epoch.
    """
    before = frozenset(NAMES[: NAMES.index(stage)])
    if size == "small":
        return _steps_in_turns(before, stage, size)
    return in_fresh_process(_steps_in_turns, before, stage, size, environment=environment())


def _steps_in_turns(before: frozenset[str], stage: str, size: str) -> Row:
    named = {" + ".join(sorted(before)) or "start": before, stage: before | {stage}}
    data = {"preset": size, "path": local_wikitext() if size != "small" else None}
    trainers = {name: build_trainer(stages, **data) for name, stages in named.items()}
    workers, rounds_of = dict.fromkeys(named, 0), "small" if size == "small" else "cpu"
    turns = functools.partial(in_turns, trainers, workers, rounds_of)
    return paired(next(iter(named)), stage, turns, size == "small")
