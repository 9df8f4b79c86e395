"""The CPU's ladder in pairs: each rung takes turns with the one before it, in processes of their own."""

import dataclasses
import itertools
from collections.abc import Callable

from helpers.lab import Worth, device, experiment
from helpers.lab.records import Row
from helpers.lab.trials import Program, trial
from helpers.rush import Setup, Trainer, stands_on
from helpers.rush.measurement import text_tokens
from helpers.rush.setup import CPU_LEFT, CPU_STEPS, START

from .steps import BEST, ON_CPU, SMALL, missing, setup_of

BATCHES = 4  # different ones, in turn
TINY, SECONDS = SMALL | {"trial_s": 4.0}, ON_CPU | {"trial_s": 50.0}
PAIRS = [{"baseline": stands_on(name, "cpu"), "rung": name} for name in CPU_STEPS if name not in CPU_LEFT]
PAIRS += [{"baseline": START, "rung": BEST["cpu"]}]


def _missing(rung: str, **sizes: object) -> str:
    """Why a rung can't be compared here; a baseline that isn't possible is the nearest that is."""
    if device().type != "cpu":
        return "for a CPU: a GPU's ladder is compared in one process"
    return missing(step=rung, **sizes)


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
    cpu=[SECONDS | pair for pair in PAIRS],
    columns="median_ms baseline_ms",
    version=3,
    timed=False,
    missing=_missing,
    worth=Worth(100, "each change of the ladder against the one before it", cpu=60.3, gpu=60, big_gpu=60),
)
def pairs(model: str, sequence: int, trial_s: float, baseline: str, rung: str) -> Row:
    """A kept rung of the ladder against the one it stands on, and the best against the plain loop."""
    before, after = (setup_of(model, sequence, name) for name in (baseline, rung))
    return _trial({baseline: before.possible(device()), rung: after}, trial_s)


@experiment(
    small=[TINY | {"rung": START}],
    cpu=[SECONDS | {"trial_s": 150.0, "rung": START}, SECONDS | {"trial_s": 100.0, "rung": BEST["cpu"]}],
    columns="median_ms baseline baseline_ms",
    version=3,
    timed=False,
    missing=_missing,
    worth=Worth(20, "what glibc's defaults cost", cpu=126, gpu=126, big_gpu=126),
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
