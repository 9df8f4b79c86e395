"""The ladder's first rungs in pairs: each takes turns with the one before it, in processes of their own."""

import dataclasses
import itertools
from collections.abc import Callable

from helpers.lab import device, experiment
from helpers.lab.records import Row
from helpers.lab.trials import Program, trial
from helpers.rush import Setup, Trainer, rung
from helpers.rush.measurement import SEQUENCES, text_tokens
from helpers.rush.setup import START

CLIMB = (START, "mixed precision", "fused AdamW", "FlashAttention", "compile", "chunked cross-entropy")
PAIRS = [{"baseline": base, "rung": name} for base, name in itertools.pairwise(CLIMB)]
PAIRS += [{"baseline": START, "rung": CLIMB[-1]}]
TINY = {"model": "tiny", "sequence": 64, "trial_s": 4.0}
SHORT = {"model": "llama-60m", "sequence": 512, "trial_s": 60.0}


def _program(name: str, model: str, sequence: int) -> Program:
    """A rung on a CPU; the allocator keeps its pages in all of them, so that no rung gains by that."""
    setup = dataclasses.replace(rung(name, Setup(model=model, sequence=sequence), device()), allocator="kept")
    arguments = {"setup": dataclasses.asdict(setup)}
    return Program(name, function=f"{__name__}:training_step", arguments=arguments, environment=setup.environment)


@experiment(
    small=[TINY | PAIRS[1]],
    cpu=[SHORT | pair for pair in PAIRS],
    columns="median_ms baseline_ms",
    missing=lambda **_: "" if device().type == "cpu" else "for a CPU: a GPU's ladder is compared in one process",
)
def pairs(model: str, sequence: int, trial_s: float, baseline: str, rung: str) -> Row:
    """A rung of the ladder against the one before it, and the last against the plain loop, with pages kept in both."""
    sides = (_program(name, model, sequence) for name in (baseline, rung))
    return trial(*sides, seconds=trial_s).row()


def training_step(setup: dict[str, object]) -> Callable[[], None]:
    """Train by a setup on the text's batches, one a call."""
    chosen = Setup(**setup)
    trainer, batches = Trainer(chosen), itertools.cycle(text_tokens(chosen, SEQUENCES))
    return lambda: trainer.step(next(batches))
