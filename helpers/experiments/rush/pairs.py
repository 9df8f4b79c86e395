"""The ladder in pairs: each rung takes turns with the one it stands on, both in one process.

On a CPU that process has their allocator. On a GPU `ladder` itself has the pairs, so that a trainer is built once for
both, and here is the best rung against the plain loop. Two allocators need two processes.
"""

import dataclasses
import itertools
import statistics
from collections.abc import Callable

from ...lab import Worth, device, experiment, in_fresh_process
from ...lab.records import Row
from ...lab.trials import Program, trial
from ...rush import Setup, Trainer, stands_on
from ...rush.measurement import in_turns, text_tokens
from ...rush.setup import LADDERS, START
from .steps import BEST, FULL, HEADLINES, MEDIUM, ON_CPU, PAIRED, SMALL, missing, setup_of

RUNG_BY_RUNG = "each change of the ladder against the one before it"
BATCHES = 4  # different ones, in turn
TINY, SECONDS = SMALL | {"trial_s": 4.0}, {"trial_s": 32.0}
MOST_ROUNDS = 64  # on a CPU, whose steps are turns of their own


def _pairs(kind: str, sizes: Row) -> list[Row]:
    """The best rung of a ladder beside the plain loop; on a CPU after the kept rungs, each beside its baseline."""
    steps, left = LADDERS[kind]
    kept = [name for name in steps if name not in left] if kind == "cpu" else []
    named = [*((stands_on(name, kind), name) for name in kept), (START, BEST[kind])]
    return [sizes | {"baseline": baseline, "rung": rung} for baseline, rung in named]


@experiment(
    small=[TINY | {"baseline": START, "rung": "fused AdamW"}],
    cpu=_pairs("cpu", ON_CPU | SECONDS),
    gpu=_pairs("cuda", MEDIUM | PAIRED),
    big_gpu=_pairs("cuda", FULL | PAIRED),
    columns="median_ms baseline_ms",
    version=4,
    timed=False,
    missing=lambda rung, **sizes: missing(step=rung, **sizes),
    worth=Worth(100, RUNG_BY_RUNG, cpu=58, gpu=25, big_gpu=12, headline={"rung": HEADLINES}, on_gpu=2),
)
def pairs(model: str, sequence: int, trial_s: float, baseline: str, rung: str) -> Row:
    """A kept rung of the ladder against the one it stands on, and the best against the plain loop."""
    before, after = (setup_of(model, sequence, name) for name in (baseline, rung))
    before = before.possible(device())
    if device().type == "cpu":
        options = {"environment": after.environment, "rounds": MOST_ROUNDS}
        step_ms, row = in_fresh_process(in_turns, before, after, trial_s, **options)
    else:
        step_ms, row = in_turns(before, after, trial_s)
    return {"median_ms": statistics.median(step_ms)} | row


@experiment(
    small=[TINY | {"rung": START}],
    cpu=[ON_CPU | {"trial_s": 90.0, "rung": START}],
    gpu=[],
    columns="median_ms baseline baseline_ms",
    version=4,
    timed=False,
    missing=lambda rung, **sizes: missing(step=rung, **sizes),
    worth=Worth(20, "what glibc's defaults cost", cpu=94, gpu=94, big_gpu=0),
)
def allocator(model: str, sequence: int, trial_s: float, rung: str) -> Row:
    """A rung whose allocator keeps its pages against the same rung with glibc's defaults."""
    kept = setup_of(model, sequence, rung)
    sides = []
    for setup in (dataclasses.replace(kept, allocator="default"), kept):
        made = {"function": f"{__name__}:training_step", "arguments": {"setup": dataclasses.asdict(setup)}}
        sides.append(Program(setup.allocator, environment=setup.environment, **made))
    return trial(*sides, seconds=trial_s, drop=0, turn_steps=1, wanted=2)  # nothing is queued, so all steps count


def training_step(setup: dict[str, object]) -> Callable[[], object]:
    """Train by a setup on the text's batches, one a call."""
    chosen = Setup(**setup)
    trainer, batches = Trainer(chosen), itertools.cycle(text_tokens(chosen, BATCHES))
    return lambda: trainer.step(next(batches))
