"""The ladder in pairs: each rung takes turns with the one it stands on.

On a CPU in processes of their own, each with its allocator; on a GPU in one process, where both fit into memory.
"""

import dataclasses
import itertools
from collections.abc import Callable

from ...lab import Worth, compare, device, experiment
from ...lab.records import Row
from ...lab.trials import Program, trial
from ...rush import Setup, Trainer, stands_on
from ...rush.measurement import text_tokens
from ...rush.setup import LADDERS, START
from ...training.step import WARM_UP
from .steps import BEST, FULL, HEADLINES, MEDIUM, ON_CPU, SMALL, missing, setup_of

RUNG_BY_RUNG = "each change of the ladder against the one before it"
BATCHES = 4  # different ones, in turn
TURN_S, ROUNDS = 0.3, 12  # in one process
TINY, SECONDS = SMALL | {"trial_s": 4.0}, {"trial_s": 50.0}


def _pairs(kind: str, sizes: Row, extra: tuple[str, ...] = ()) -> list[Row]:
    """The kept rungs of a ladder and `extra` ones, each beside its baseline; and the best beside the plain loop."""
    steps, left = LADDERS[kind]
    rungs = [name for name in steps if name not in left or name in extra]
    named = [(stands_on(name, kind), name) for name in rungs] + [(START, BEST[kind])]
    return [sizes | {"baseline": baseline, "rung": rung} for baseline, rung in named]


def _missing(rung: str, **sizes: object) -> str:
    """Why a rung can't be compared here; a baseline that isn't possible is the nearest that is."""
    return missing(step=rung, **sizes)


def _in_turns(setups: dict[str, Setup], seconds: float) -> Row:
    """Both setups in this process, as many rounds as fit into the seconds, of turns that are long beside a launch."""
    sequences = max(setup.batch for setup in setups.values())
    steps = {name: training_step(dataclasses.asdict(setup), sequences) for name, setup in setups.items()}
    timed = compare(steps, check=False, rounds=ROUNDS, warmup=WARM_UP + 1, turn_s=TURN_S, seconds=seconds)
    baseline, rung = setups
    times = {"median_ms": timed.timing(rung).median_ms, "baseline_ms": timed.timing(baseline).median_ms}
    return times | timed.estimate(rung, baseline).row()


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
    gpu=_pairs("cuda", MEDIUM | {"trial_s": 8.0}, ("float8",)),
    big_gpu=_pairs("cuda", FULL | {"trial_s": 8.0}, ("float8",)),
    columns="median_ms baseline_ms",
    version=3,
    timed=False,
    missing=_missing,
    worth=Worth(100, RUNG_BY_RUNG, cpu=60.3, gpu=25, big_gpu=25, headline={"rung": HEADLINES}),
)
def pairs(model: str, sequence: int, trial_s: float, baseline: str, rung: str) -> Row:
    """A kept rung of the ladder against the one it stands on, and the best against the plain loop."""
    before, after = (setup_of(model, sequence, name) for name in (baseline, rung))
    setups = {baseline: before.possible(device()), rung: after}
    return (_in_turns if device().type == "cuda" else _trial)(setups, trial_s)


@experiment(
    small=[TINY | {"rung": START}],
    cpu=[ON_CPU | {"trial_s": 150.0, "rung": START}, ON_CPU | {"trial_s": 100.0, "rung": BEST["cpu"]}],
    gpu=[],
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
