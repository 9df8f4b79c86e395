"""What a sampler costs: to make, until an epoch's first batch, and a batch."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from operator import itemgetter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd

from ...batching import BalancedBatchSampler
from ...book.table import Worth, table
from ...book.values import over, pick
from ...lab import Row, missing_because
from .inputs import wikitext_lengths

OURS, TORCHTEXT = "BalancedBatchSampler", "torchtext's BucketIterator"


@table(
    small=[{"samples": n, "variant": name} for n in (1000, 4000) for name in (OURS, TORCHTEXT)],
    cpu=[{"samples": 10**power, "variant": name} for power in range(3, 8) for name in (OURS, TORCHTEXT)],
    gpu=[],
    columns="init_s first_batch_ms batch_us n",
    missing=lambda variant, **_: missing_because("torchtext") if variant == TORCHTEXT else "",
    worth=Worth(2, "the cost of a sampler", cpu=5.9),
)
def sampler_scaling(samples: int, variant: str) -> Row:
    """What a sampler of batches of 32 costs: to make, until an epoch's first batch, and a batch, over whole epochs."""
    lengths, batch_size = wikitext_lengths(samples), 32
    make = _bucket_iterator if variant == TORCHTEXT else partial(BalancedBatchSampler, k=5)
    began = time.perf_counter()
    sampler = make(lengths, batch_size)
    init_s = time.perf_counter() - began
    begin = sampler if variant == TORCHTEXT else partial(iter, sampler)
    return {"init_s": init_s} | _sampler_times(begin)


def _bucket_iterator(lengths: np.ndarray, batch_size: int) -> Callable[[], Iterator[list[tuple[int, int]]]]:
    """torchtext's BucketIterator: a call begins an epoch of batches of (length, index).

    It shuffles all samples when an epoch begins, then sorts 100 batches' worth at a time.
    """
    from torchtext.data import BucketIterator

    pairs = list(zip(lengths.tolist(), range(len(lengths)), strict=True))
    iterator = BucketIterator(pairs, batch_size, sort_key=itemgetter(0), sort_within_batch=True)

    def epoch() -> Iterator[list[tuple[int, int]]]:
        iterator.create_batches()
        return iterator.batches

    return epoch


def _sampler_times(begin: Callable[[], Iterator[Any]]) -> Row:
    """What a sampler takes until an epoch's first batch, and for a batch, over 2 to 20 whole epochs in 3 s."""
    first_ms: list[float] = []
    batch_us: list[float] = []
    began = time.perf_counter()
    while len(batch_us) < 2 or (len(batch_us) < 20 and time.perf_counter() - began < 3):
        start = time.perf_counter()
        batches = begin()
        next(batches)
        first_ms.append((time.perf_counter() - start) * 1e3)
        number = 1 + sum(1 for _ in batches)
        batch_us.append((time.perf_counter() - start) / number * 1e6)
    return {"first_batch_ms": np.median(first_ms), "batch_us": np.median(batch_us), "n": len(batch_us)}


@sampler_scaling.numbers()
def _(rows: pd.DataFrame) -> SimpleNamespace:
    """Our sampler beside torchtext's by the number of samples; the goals' numbers."""
    names = {"init_ms": "init, ms", "first_batch_ms": "first batch, ms", "batch_us": "batch, µs"}
    library = rows["variant"].where(rows["variant"] == OURS, "torchtext").replace({OURS: "ours"})
    shaped = rows.assign(samples=rows["samples"].map("{:,}".format), variant=library, init_ms=1000 * rows["init_s"])
    wide = shaped.pivot_table(index="samples", columns="variant", values=list(names), sort=False)
    wide.columns = [f"{names[name]}: {variant}" for name, variant in wide.columns]
    few, many = (pick(rows, "batch_us", "µs", variant=OURS, samples=samples) for samples in (10**4, 10**6))
    million_s = pick(rows, "init_s", "s", variant=OURS, samples=10**6)
    return SimpleNamespace(table=wide.reset_index(), million_s=million_s, growth=over(many, few))
