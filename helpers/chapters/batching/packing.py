"""How full packed sequences become by each strategy, and how long packing takes."""

import time
from types import SimpleNamespace

import numpy as np
import pandas as pd

from ...batching import pack
from ...batching.packing import STRATEGIES
from ...book import Worth
from ...book.table import table
from ...book.values import derived
from ...lab.rows import Row
from .inputs import wikitext_lengths


@table(
    small=[{"samples": 2000, "capacity": 1024, "strategy": strategy} for strategy in STRATEGIES],
    cpu=[
        {"samples": samples, "capacity": capacity, "strategy": strategy}
        for samples in (10_000, 1_000_000)
        for capacity in (640, 2048, 8192)
        for strategy in STRATEGIES
    ],
    gpu=[],  # one core of the host packs
    columns="fill pack_s n",
    worth=Worth(2, "fill of packed sequences", cpu=0.9),
)
def packing(samples: int, capacity: int, strategy: str) -> Row:
    """How full sequences become by each strategy, and how long packing takes."""
    lengths = wikitext_lengths(samples)
    times_s = []
    for _ in range(5):
        began = time.perf_counter()
        packs = pack(lengths, capacity, strategy)
        times_s.append(time.perf_counter() - began)
    return {"fill": packs.fill, "pack_s": float(np.median(times_s)), "n": len(times_s)}


@packing.numbers()
def _(rows: pd.DataFrame) -> SimpleNamespace:
    """Fill and time of each strategy for most samples, a row for each capacity."""
    samples = rows["samples"].max()
    largest = rows[rows["samples"] == samples]
    shaped = largest.assign(**{"filled, %": 100 * largest["fill"], "time, ms": 1000 * largest["pack_s"]})
    wide = shaped.pivot_table(index="capacity", columns="strategy", values=["filled, %", "time, ms"], sort=False)
    wide.columns = [f"{name}: {strategy}" for name, strategy in wide.columns]
    return SimpleNamespace(table=wide.reset_index(), samples=derived(samples, "configured", "", 0))
