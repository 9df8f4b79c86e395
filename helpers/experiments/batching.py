"""What chapter 2 measures: what padding costs, what samplers and packers cost, how fast each way of batching is."""

import time
from functools import partial

import numpy as np

from helpers.batching import peers
from helpers.batching.balanced import BalancedBatchSampler
from helpers.batching.packing import pack
from helpers.batching.padding import padding_share
from helpers.batching.speed import MAX_LENGTH, SPREADS, attention, batch_time
from helpers.batching.steps import collator, throughput, training
from helpers.lab import experiment
from helpers.lab.machine import NOT_INSTALLED
from helpers.lab.records import STATUS, Row
from helpers.text.synthetic import draw_lengths

__all__ = ["attention", "batch_time", "collator", "packing", "padding", "sampler_scaling", "throughput", "training"]

STRATEGIES = ("greedy", "first-fit", "best-fit")
OURS, TORCHTEXT = "BalancedBatchSampler", "torchtext's BucketIterator"


def wikitext_lengths(samples: int) -> np.ndarray:
    """Lengths as WikiText's samples have them, cut to the task's 640."""
    return np.minimum(draw_lengths(samples, seed=0), MAX_LENGTH)


@experiment(
    small=[{"samples": 1000, "batch_size": 8}],
    cpu=[{"samples": 1_000_000, "batch_size": size} for size in (32, 256)],
)
def padding(samples: int, batch_size: int) -> list[Row]:
    """How much of each way's batches is padding, how full its batches are, and how much choice is left to chance.

    `choice` is the share of all samples that a sample can meet in a batch, on the mean.
    """
    lengths = wikitext_lengths(samples)
    rows = [{"way": "BRAIN", "padding_share": padding_share(lengths, MAX_LENGTH), "choice": 1.0, "fill": 1.0}]
    shuffled = np.random.default_rng(0).permutation(samples)
    chunks = [shuffled[begin : begin + batch_size] for begin in range(0, samples, batch_size)]
    rows.append({"way": "BIG BRAIN", "choice": 1.0} | _batches(lengths, chunks, batch_size))
    for k in SPREADS:
        batches = list(BalancedBatchSampler(lengths, batch_size, k))
        rows.append({"way": f"k = {k}", "choice": _choice(lengths, k)} | _batches(lengths, batches, batch_size))
    return rows


def _batches(lengths: np.ndarray, batches: list, batch_size: int) -> Row:
    area = sum(int(lengths[batch].max()) * len(batch) for batch in batches)
    return {
        "padding_share": 1 - int(lengths.sum()) / area,
        "batches": len(batches),
        "fill": len(lengths) / (len(batches) * batch_size),
    }


def _choice(lengths: np.ndarray, k: int) -> float:
    counts = np.bincount(lengths)
    before = np.concatenate([[0], np.cumsum(counts)])
    places = np.arange(len(counts))
    near = before[np.minimum(places + k + 1, len(counts))] - before[np.maximum(places - k, 0)]
    return float((counts * near).sum() / len(lengths) ** 2)


@experiment(
    small=[{"samples": n, "way": way} for n in (1000, 4000) for way in (OURS, TORCHTEXT)],
    cpu=[{"samples": 10**power, "way": way} for power in range(3, 8) for way in (OURS, TORCHTEXT)],
)
def sampler_scaling(samples: int, way: str) -> Row:
    """What a sampler of batches of 32 costs: to make, until an epoch's first batch, and a batch, over whole epochs."""
    lengths, batch_size = wikitext_lengths(samples), 32
    began = time.perf_counter()
    try:
        make = peers.bucket_iterator if way == TORCHTEXT else partial(BalancedBatchSampler, k=5)
        made = make(lengths, batch_size)
    except ImportError:
        return {STATUS: f"{NOT_INSTALLED}torchtext"}
    init_s = time.perf_counter() - began
    begin = made if way == TORCHTEXT else partial(iter, made)
    first_ms, batch_us, began = [], [], time.perf_counter()
    while len(batch_us) < 2 or (len(batch_us) < 20 and time.perf_counter() - began < 3):
        start = time.perf_counter()
        batches = begin()
        next(batches)
        first_ms.append((time.perf_counter() - start) * 1e3)
        number = 1 + sum(1 for _ in batches)
        batch_us.append((time.perf_counter() - start) / number * 1e6)
    p20, median, p80 = np.percentile(batch_us, [20, 50, 80])
    row = {"init_s": init_s, "first_batch_ms": float(np.median(first_ms))}
    return row | {"batch_us": median, "batch_p20_us": p20, "batch_p80_us": p80, "n": len(batch_us)}


@experiment(
    small=[{"samples": 2000, "capacity": 1024, "strategy": strategy} for strategy in STRATEGIES],
    cpu=[
        {"samples": samples, "capacity": capacity, "strategy": strategy}
        for samples in (10_000, 1_000_000)
        for capacity in (640, 2048, 8192)
        for strategy in STRATEGIES
    ],
)
def packing(samples: int, capacity: int, strategy: str) -> Row:
    """How full sequences become by each strategy, what is lost, and how long it takes to find out."""
    lengths = wikitext_lengths(samples)
    took = []
    for _ in range(5):
        began = time.perf_counter()
        packs = pack(lengths, capacity, strategy)
        took.append(time.perf_counter() - began)
    lost = int(lengths.sum()) - int(packs.loads.sum())
    return {"sequences": len(packs), "fill": packs.fill, "tokens_lost": lost, "pack_s": float(np.median(took)), "n": 5}
