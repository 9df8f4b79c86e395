"""Tables without a model: how much of a batch is padding, and the costs of samplers and packers."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np

from ...batching import BalancedBatchSampler, pack
from ...batching.packing import STRATEGIES
from ...lab import Worth, experiment
from ...lab.machine import missing_because
from ...lab.records import Row
from .inputs import MAX_LENGTH, wikitext_lengths

SPREADS = (1, 5, 10, 20, 50, MAX_LENGTH)  # k
OURS, TORCHTEXT = "BalancedBatchSampler", "torchtext's BucketIterator"


@experiment(
    small=[{"samples": 1000, "batch_size": 8}],
    cpu=[{"samples": 10**6, "batch_size": b} for b in (32, 256)],
    gpu=[],  # a sampler is the host's, as below
    columns="variant candidate_share padding_share fill",
    worth=Worth(2, "padding by sampler", cpu=4.6),
)
def padding(samples: int, batch_size: int) -> list[Row]:
    """How much of each variant's batches is padding, how full they are, and how freely they are shuffled.

    `candidate_share` is the share of all samples that a sample can meet in a batch, on the mean.
    """
    lengths = wikitext_lengths(samples)
    shuffled = np.random.default_rng(0).permutation(samples)
    chunks = [shuffled[begin : begin + batch_size] for begin in range(0, samples, batch_size)]
    brain = {"padding_share": 1 - float(lengths.mean()) / MAX_LENGTH, "fill": 1.0}
    rows = [
        {"variant": "BRAIN", "candidate_share": 1.0} | brain,
        {"variant": "BIG BRAIN", "candidate_share": 1.0} | _fill(lengths, chunks, batch_size),
    ]
    for k in SPREADS:
        batches = list(BalancedBatchSampler(lengths, batch_size, k))
        row = {"variant": f"k = {k}", "candidate_share": _candidate_share(lengths, k)}
        rows.append(row | _fill(lengths, batches, batch_size))
    return rows


def _fill(lengths: np.ndarray, batches: list, batch_size: int) -> Row:
    """The share of padding in batches of these indices, and how full they are."""
    area = sum(int(lengths[batch].max()) * len(batch) for batch in batches)
    fill = len(lengths) / (len(batches) * batch_size)
    return {"padding_share": 1 - int(lengths.sum()) / area, "fill": fill}


def _candidate_share(lengths: np.ndarray, k: int) -> float:
    """The share of all samples that a sample can meet in a batch whose lengths differ by at most k, on the mean."""
    counts = np.bincount(lengths)
    before = np.concatenate([[0], np.cumsum(counts)])
    places = np.arange(len(counts))
    near = before[np.minimum(places + k + 1, len(counts))] - before[np.maximum(places - k, 0)]
    return float((counts * near).sum() / len(lengths) ** 2)


@experiment(
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
    first_ms, batch_us, began = [], [], time.perf_counter()
    while len(batch_us) < 2 or (len(batch_us) < 20 and time.perf_counter() - began < 3):
        start = time.perf_counter()
        batches = begin()
        next(batches)
        first_ms.append((time.perf_counter() - start) * 1e3)
        number = 1 + sum(1 for _ in batches)
        batch_us.append((time.perf_counter() - start) / number * 1e6)
    return {"first_batch_ms": np.median(first_ms), "batch_us": np.median(batch_us), "n": len(batch_us)}


@experiment(
    small=[{"samples": 2000, "capacity": 1024, "strategy": strategy} for strategy in STRATEGIES],
    cpu=[
        {"samples": samples, "capacity": capacity, "strategy": strategy}
        for samples in (10_000, 1_000_000)
        for capacity in (640, 2048, 8192)
        for strategy in STRATEGIES
    ],
    columns="fill pack_s n",
    worth=Worth(2, "fill of packed sequences", cpu=0.9, gpu=1, big_gpu=0.8),
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
