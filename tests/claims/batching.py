"""Chapter 2."""

import math
from itertools import pairwise

import numpy as np

from helpers.text import SyntheticText

from . import NUMBER, Records, claim


@claim(
    "Half of the samples have {median} tokens or fewer, {short} are headings of ten or fewer, and the longest has "
    "{longest}. Padded to 640, {padding} of all tokens are padding"
)
def _(records, **_):
    lengths = np.array([min(len(sample), 640) for sample in SyntheticText(20_000, seed=0)])
    told = {"median": float(np.median(lengths)), "short": np.mean(lengths <= 10), "longest": lengths.max()}
    return told | {"padding": 1 - lengths.sum() / (640 * len(lengths))}


@claim(
    "{gpu}, {samples} samples in batches of {batch}: at k of 5 and more at least {full} full ({verdict}: at least 97%)"
)
def _(records, gpu, samples, batch, **_):
    rows = records.rows("batching/padding", gpu=gpu, samples=samples, batch_size=batch)
    lowest = min(row.fill for row in rows.itertuples() if row.variant.startswith("k = ") and int(row.variant[4:]) >= 5)
    return {"full": _down(lowest), "verdict": lowest >= 0.97}


@claim(
    "{gpu}: a batch out of a million samples costs {growth} of one out of ten thousand ({flat}: at most 1.5); making "
    "the sampler takes {init} s ({quick}: below 0.5)"
)
def _(records, gpu, **_):
    at = {size: _sampler(records, gpu, size) for size in (10_000, 1_000_000)}
    growth, init = at[1_000_000]["batch_us"] / at[10_000]["batch_us"], at[1_000_000]["init_s"]
    return {"growth": growth, "flat": growth <= 1.5, "init": init, "quick": init < 0.5}


@claim(
    "{gpu}, {strategy}: a million lengths in {slowest} s ({quick}: below 1), {full} full ({dense}: at least 99.5%), "
    "{lost} tokens lost"
)
def _(records, gpu, strategy, **_):
    rows = records.rows("batching/packing", gpu=gpu, strategy=strategy, samples=1_000_000)
    slowest, fill = rows["pack_s"].max(), rows["fill"].min()
    told = {"slowest": slowest, "quick": slowest < 1, "full": _down(fill), "dense": fill >= 0.995}
    return told | {"lost": rows["tokens_lost"].sum()}


@claim("{gpu}, batches of {batch}, real tokens a second against the way before: {gains} ({verdict}: each a gain)")
def _(records, gpu, batch, **_):
    rate = records.rows("batching/batch_time", gpu=gpu, batch_size=batch).set_index("variant")["real_tokens_per_s"]
    ways = [way for way in ("BRAIN", "BIG BRAIN", "k = 10", "packed") if way in rate]
    gains = {now: rate[now] / rate[before] for before, now in pairwise(ways)}
    told = ", ".join(f"{way} {gain:.2f}×" for way, gain in gains.items())
    return {"gains": told, "verdict": min(gains.values()) > 1}


@claim(
    "{gpu}, batches of {batch}: {way} trains at {ratio} of the rate on samples that need no padding "
    "({verdict}: at least 0.97)"
)
def _(records, gpu, batch, **_):
    rows = records.rows("batching/throughput", gpu=gpu, batch_size=batch)
    packed = rows[rows["variant"].str.startswith("packed")].sort_values("ratio_to_no_padding").iloc[-1]
    ratio = packed["ratio_to_no_padding"]
    return {"way": packed["variant"], "ratio": ratio, "verdict": ratio >= 0.97}


@claim(
    "{gpu}, batches of {batch}: {ours}, {ratio}× the real tokens a second of transformers' padding-free collator at "
    "its best, {theirs} ({verdict}: at least 1.3)",
    ratio=NUMBER,
)
def _(records, gpu, batch, **_):
    rows = records.rows("batching/collator", gpu=gpu, batch_size=batch).sort_values("real_tokens_per_s")
    packs = rows["variant"].str.startswith("packs")
    ours, theirs = rows[packs].iloc[-1], rows[~packs].iloc[-1]
    ratio = ours["real_tokens_per_s"] / theirs["real_tokens_per_s"]
    return {"ours": ours["variant"], "theirs": theirs["variant"], "ratio": ratio, "verdict": ratio >= 1.3}


def _sampler(records: Records, gpu: str, samples: int):
    return records.one("batching/sampler_scaling", gpu=gpu, samples=samples, variant="BalancedBatchSampler")


def _down(share: float) -> str:
    """What isn't quite full doesn't read as full."""
    return f"{math.floor(share * 10_000) / 100:.2f}%"
