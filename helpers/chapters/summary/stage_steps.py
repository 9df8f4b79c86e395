"""What each stage brings in a step: with it and without it in turns."""

import functools

from ...book import Worth
from ...book.table import table
from ...lab import in_fresh_process
from ...lab.machine import missing_because
from ...lab.rows import Row
from ...text import local_wikitext
from ...training.stages import COMPILED, MIXED, STAGES, build_trainer, environment
from ..profiling.fixes import COLUMNS, paired
from ..profiling.planted_faults import in_turns

NAMES = list(STAGES)


def missing(stage: str, size: str, **_: object) -> str:
    """A CPU that doesn't multiply bf16 would train in fp32 once more."""
    return missing_because("native bf16") if stage == MIXED and size == "reduced" else ""


@table(
    small=[{"stage": MIXED, "size": "small"}],
    cpu=[{"stage": stage, "size": "reduced"} for stage in NAMES if stage != COMPILED],
    gpu=[],
    columns=COLUMNS,
    missing=missing,
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
