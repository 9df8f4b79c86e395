"""The ladder in pairs: each rung takes turns with the one it stands on.

On a CPU in processes of their own, each with its allocator. On a GPU in one process: there `ladder` itself has the
pairs, so that a trainer is built once for both, and here is the best rung against the plain loop.
"""

import dataclasses
import itertools
import statistics
from collections.abc import Callable

from ...lab import Worth, device, experiment
from ...lab.records import Row
from ...lab.trials import Program, trial
from ...rush import Setup, Trainer, stands_on
from ...rush.measurement import in_turns, text_tokens
from ...rush.setup import LADDERS, START
from .steps import BEST, FULL, HEADLINES, MEDIUM, ON_CPU, PAIRED, SMALL, missing, setup_of

RUNG_BY_RUNG = "each change of the ladder against the one before it"
BATCHES = 4  # different ones, in turn
TINY, SECONDS = SMALL | {"trial_s": 4.0}, {"trial_s": 50.0}


def _pairs(kind: str, sizes: Row) -> list[Row]:
    """The best rung of a ladder beside the plain loop; on a CPU after the kept rungs, each beside its baseline."""
    steps, left = LADDERS[kind]
    kept = [name for name in steps if name not in left] if kind == "cpu" else []
    named = [*((stands_on(name, kind), name) for name in kept), (START, BEST[kind])]
    return [sizes | {"baseline": baseline, "rung": rung} for baseline, rung in named]


def _trial(setups: dict[str, Setup], seconds: float) -> Row:
    """A trial of two setups, whose calls are of as many sequences; nothing of theirs is queued, so all steps count."""
    step, sequences = f"{__name__}:training_step", max(setup.batch for setup in setups.values())
    sides = []
    for name, setup in setups.items():
        arguments = {"setup": dataclasses.asdict(setup), "sequences": sequences}
        sides.append(Program(name, function=step, arguments=arguments, environment=setup.environment))
    return trial(*sides, seconds=seconds, drop=0, turn_steps=2, wanted=2)


@experiment(
    small=[TINY | {"baseline": START, "rung": "fused AdamW"}],
    cpu=_pairs("cpu", ON_CPU | SECONDS),
    gpu=_pairs("cuda", MEDIUM | PAIRED),
    big_gpu=_pairs("cuda", FULL | PAIRED),
    columns="median_ms baseline_ms",
    version=3,
    timed=False,
    missing=lambda rung, **sizes: missing(step=rung, **sizes),
    worth=Worth(100, RUNG_BY_RUNG, cpu=60.3, gpu=25, big_gpu=12, headline={"rung": HEADLINES}),
)
def pairs(model: str, sequence: int, trial_s: float, baseline: str, rung: str) -> Row:
    """A kept rung of the ladder against the one it stands on, and the best against the plain loop."""
    before, after = (setup_of(model, sequence, name) for name in (baseline, rung))
    before = before.possible(device())
    if device().type == "cpu":
        return _trial({baseline: before, rung: after}, trial_s)
    step_ms, row = in_turns(before, after, trial_s)
    return {"median_ms": statistics.median(step_ms)} | row


@experiment(
    small=[TINY | {"rung": START}],
    cpu=[ON_CPU | {"trial_s": 150.0, "rung": START}, ON_CPU | {"trial_s": 100.0, "rung": BEST["cpu"]}],
    gpu=[],
    columns="median_ms baseline baseline_ms",
    version=3,
    timed=False,
    missing=lambda rung, **sizes: missing(step=rung, **sizes),
    worth=Worth(20, "what glibc's defaults cost", cpu=126, gpu=126, big_gpu=0),
)
def allocator(model: str, sequence: int, trial_s: float, rung: str) -> Row:
    """A rung whose allocator keeps its pages against the same rung with glibc's defaults."""
    kept = setup_of(model, sequence, rung)
    return _trial({"default": dataclasses.replace(kept, allocator="default"), "kept": kept}, trial_s)


def training_step(setup: dict[str, object], sequences: int) -> Callable[[], None]:
    """Train by a setup on the text's batches, as many sequences a call as given."""
    chosen = Setup(**setup)
    trainer, batches = Trainer(chosen), itertools.cycle(text_tokens(chosen, BATCHES))

    def step() -> None:
        for _ in range(sequences // chosen.batch):
            trainer.step(next(batches))

    return step
