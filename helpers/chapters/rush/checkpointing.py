"""Checkpointing where it matters: at what length which kind still fits in memory, and what it costs in time."""

from dataclasses import dataclass, replace

import pandas as pd

from ...book.table import Worth, table
from ...book.values import PERCENT, Number, in_unit, lacking, marked, over, pick, speedup
from ...lab import Row
from ...training.trainer import WARM_UP
from .setups import FULL, MEDIUM, PAIRED, RUN_PAIRED, SMALL, beside, missing, run_apart, setup_of

KINDS = ("none", "selective", "memory budget", "full")  # from no recomputation to most
LENGTHS = tuple(2**power for power in range(12, 17))  # at 2**17 a step would take a quarter of a minute


@table(
    small=[SMALL | {"checkpointing": name} for name in ("none", "full")],
    cpu=[MEDIUM | {"sequence": length, "checkpointing": name} for length in (512, 2048) for name in KINDS],
    gpu=[MEDIUM | PAIRED | {"sequence": n, "checkpointing": name} for n in (2048, 8192) for name in KINDS],
    big_gpu=[FULL | PAIRED | {"sequence": n, "checkpointing": name} for n in LENGTHS for name in KINDS],
    version=3,
    missing=missing,
    columns=RUN_PAIRED,
    worth=Worth(60, "checkpointing at longer sequences", cpu=19.9, gpu=20, big_gpu=25, on_gpu=10),
)
def checkpointing(model: str, sequence: int, checkpointing: str, trial_s: float = 0.0) -> Row:
    """A batch of one sequence of growing length: which checkpointing still fits in memory, and its speed.

    On a GPU in turns with the same training without any.
    """
    setup, without = (setup_of(model, sequence, checkpointing=name) for name in (checkpointing, "none"))
    warm = {"loss_steps": WARM_UP + 1}  # only speed and memory matter: enough to compile and to capture a graph
    return beside(setup, "none", without, trial_s, **warm) if trial_s else run_apart(setup, **warm)


@dataclass(frozen=True)
class Checkpointing:
    """Speed and memory by length; `memory` and `speed` are those of full checkpointing against none, at `length`.

    `selective` is the speed of selective against full checkpointing there, `selective_memory` the ratio of the peaks,
    and `short` the speed of full against none at the shortest length.
    """

    lengths: pd.DataFrame
    length: int
    memory: Number
    speed: Number
    selective: Number
    selective_memory: Number
    short: Number
    over_full: Number
    shortest: int


@checkpointing.numbers()
def _(rows: pd.DataFrame) -> Checkpointing:
    """At the longest length that all kinds fit."""
    rates = [marked(row["tokens_per_s"], row) for row in rows.to_dict("records")]
    wide = rows.assign(tokens_per_s=rates)
    wide = wide.pivot(index="checkpointing", columns="sequence", values=["tokens_per_s", "peak_gib"])
    wide = wide.reindex([kind for kind in KINDS if kind in wide.index])
    heads = {"tokens_per_s": "tokens/s", "peak_gib": "peak, GiB"}
    wide.columns = [f"{heads[name]} at {length}" for name, length in wide.columns]
    kinds = rows.groupby("sequence")["checkpointing"].nunique()
    length = int(kinds[kinds == kinds.max()].index.max())
    full, none, selective = (
        {name: pick(rows, name, sequence=length, checkpointing=kind) for name in heads}
        for kind in ("full", "none", "selective")
    )
    shortest = int(rows["sequence"].min())
    short_full, short_none, short_selective = (
        pick(rows, "tokens_per_s", sequence=shortest, checkpointing=kind) for kind in ("full", "none", "selective")
    )
    pairs = rows[(rows["sequence"] == length) & (rows["checkpointing"] == "full")]
    paired = len(pairs) and "ratio" in pairs and pd.notna(pairs["ratio"].iloc[0])
    speed = speedup(pairs.iloc[0]) if paired else over(full["tokens_per_s"], none["tokens_per_s"])
    return Checkpointing(
        lengths=wide.reset_index(),
        length=length,
        memory=in_unit(over(full["peak_gib"], none["peak_gib"]), PERCENT, 0),
        speed=in_unit(speed, PERCENT, 0) if speed.measured else lacking("full checkpointing", PERCENT),
        selective=over(selective["tokens_per_s"], full["tokens_per_s"]),
        selective_memory=_bytes(over(selective["peak_gib"], full["peak_gib"])),
        short=in_unit(over(short_full, short_none), PERCENT, 0),
        over_full=over(short_selective, short_full),
        shortest=shortest,
    )


def _bytes(ratio: Number) -> Number:
    """A ratio of peaks, which are counted and need no interval."""
    return replace(ratio, derivation="allocated bytes", decimals=2)
