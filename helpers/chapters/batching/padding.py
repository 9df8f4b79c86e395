"""How much of a batch is padding, by sampler."""

from types import SimpleNamespace

import numpy as np
import pandas as pd

from ...batching import BalancedBatchSampler
from ...book.table import Worth, table
from ...book.values import PERCENT, derived
from ...lab import Row
from .feeds import SPREADS
from .inputs import MAX_LENGTH, wikitext_lengths


@table(
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


@padding.numbers()
def _(rows: pd.DataFrame) -> SimpleNamespace:
    """Padding and eligible batch-mates, a row for each sampler; `filled` is the least share of filled places."""
    percent = rows.assign(padding=100 * rows["padding_share"])
    wide = percent.pivot_table(index="variant", columns="batch_size", values="padding", sort=False)
    wide.columns = [f"padding, batches of {size}, %" for size in wide.columns]
    mates = 100 * rows.groupby("variant", sort=False)["candidate_share"].first().rename("eligible batch-mates, %")
    shown = pd.concat([mates, wide], axis=1).map("{:.1f}".format).reset_index()
    filled = derived(rows["fill"].min(), "counted", PERCENT, 0)
    return SimpleNamespace(table=shown, filled=filled, samples=derived(rows["samples"].max(), "configured", "", 0))
