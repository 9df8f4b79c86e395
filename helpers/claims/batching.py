"""Chapter 2: what padding, samplers and packers cost; how fast and well a model learns from each kind of batches."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from statistics import NormalDist
from types import SimpleNamespace

import pandas as pd

from helpers.experiments.batching.model_times import STEPS
from helpers.experiments.batching.samplers_and_packers import OURS
from helpers.lab.estimate import SHOWN, students
from helpers.lab.values import NORMAL, PERCENT, Number, derived, lacking, over, pick

BRAIN, BIG_BRAIN, BALANCED, PACKED = STEPS
QUARTILES = 2 * NormalDist().inv_cdf(0.75)  # from one to the other, in standard deviations


def padding(rows: pd.DataFrame) -> SimpleNamespace:
    """Padding, filled places and eligible batch-mates, a row for each sampler."""
    percent = rows.assign(padding=100 * rows["padding_share"], filled=100 * rows["fill"])
    wide = percent.pivot_table(index="variant", columns="batch_size", values=["padding", "filled"], sort=False)
    wide.columns = [f"{name}, batch {size}, %" for name, size in wide.columns]
    mates = 100 * rows.groupby("variant", sort=False)["candidate_share"].first().rename("eligible batch-mates, %")
    table = pd.concat([mates, wide], axis=1).map("{:.1f}".format).reset_index()
    return SimpleNamespace(table=table, samples=derived(rows["samples"].max(), "configured", "", 0))


def sampler_scaling(rows: pd.DataFrame) -> SimpleNamespace:
    """Our sampler beside torchtext's by the number of samples; the goals' numbers."""
    names = {"init_ms": "init, ms", "first_batch_ms": "first batch, ms", "batch_us": "batch, µs"}
    library = rows["variant"].where(rows["variant"] == OURS, "torchtext").replace({OURS: "ours"})
    shaped = rows.assign(samples=rows["samples"].map("{:,}".format), variant=library, init_ms=1000 * rows["init_s"])
    wide = shaped.pivot_table(index="samples", columns="variant", values=list(names), sort=False)
    wide.columns = [f"{names[name]}: {variant}" for name, variant in wide.columns]
    few, many = (pick(rows, "batch_us", "µs", variant=OURS, samples=samples) for samples in (10**4, 10**6))
    million_s = pick(rows, "init_s", "s", variant=OURS, samples=10**6)
    return SimpleNamespace(table=wide.reset_index(), million_s=million_s, growth=over(many, few))


def packing(rows: pd.DataFrame) -> SimpleNamespace:
    """Fill and time of each strategy for most samples, a row for each capacity."""
    samples = rows["samples"].max()
    largest = rows[rows["samples"] == samples]
    shaped = largest.assign(**{"filled, %": 100 * largest["fill"], "time, ms": 1000 * largest["pack_s"]})
    wide = shaped.pivot_table(index="capacity", columns="strategy", values=["filled, %", "time, ms"], sort=False)
    wide.columns = [f"{name}: {strategy}" for name, strategy in wide.columns]
    return SimpleNamespace(table=wide.reset_index(), samples=derived(samples, "configured", "", 0))


def batch_time(rows: pd.DataFrame) -> SimpleNamespace:
    """An epoch of forward passes by batch size: gains over BRAIN, padding, and what packs gain over k = 10."""
    columns = ["min_ms", "mean_ms", "median_ms", "max_ms", "batches", "padding, %", "epoch_s", "real_tokens_per_s"]
    shaped = rows.assign(**{"padding, %": (100 * rows["padding_share"]).map("{:.1f}".format)})
    names = dict.fromkeys([*STEPS, *rows["variant"]])
    sizes = [int(size) for size in sorted(rows["batch_size"].unique())]
    rates = rows.pivot(index="variant", columns="batch_size", values="real_tokens_per_s")
    rate = {key: _rate(rows, *key) for key in product(names, sizes)}
    gains = {name: _most(over(rate[name, size], rate[BRAIN, size]) for size in sizes) for name in names}
    brain, balanced = (
        _most(pick(rows, "padding_share", PERCENT, decimals, variant=name, batch_size=size) for size in sizes)
        for name, decimals in ((BRAIN, 0), (BALANCED, 1))
    )
    first = rows.iloc[0]
    epoch = f"an epoch of {rows['samples'].max():,.0f} samples, width {first['width']}"
    return SimpleNamespace(
        tables=[shaped.loc[rows["batch_size"] == size, ["variant", *columns]] for size in sizes],
        sizes=sizes,
        model=f"{epoch}, {first['dtype']}, {first['source']}",
        against_brain=rates.reindex(STEPS) / rates.reindex([BRAIN]).to_numpy(),
        big_brain=gains[BIG_BRAIN],
        balanced=gains[BALANCED],
        packed=gains[PACKED],
        largest=_most(gains.values()),
        brain_padding=brain,
        bound=derived(1 / (1 - brain.value), "1 / (1 − padding)", decimals=1),
        balanced_padding=balanced,
    )


def _rate(rows: pd.DataFrame, variant: str, size: int) -> Number:
    """Real tokens/s of an epoch, as uncertain as if its batches, which differ in length, had been drawn."""
    rate = pick(rows, "real_tokens_per_s", variant=variant, batch_size=size)
    if not rate.measured:
        return rate
    (row,) = rows[(rows["variant"] == variant) & (rows["batch_size"] == size)].to_dict("records")
    deviation = (row["p75_ms"] - row["p25_ms"]) / QUARTILES / row["mean_ms"]
    return replace(rate, reach=NORMAL * deviation / row["batches"] ** 0.5)


def _most(numbers: Iterable[Number]) -> Number:
    """The largest that is measured."""
    return max(numbers, key=lambda number: (number.measured, number.value))


def attention(rows: pd.DataFrame) -> SimpleNamespace:
    """Attention within documents by each variant, and its ratio to the dense mask."""
    names = ["tokens", "variant", "build_ms", "median_ms", "p20_ms", "p80_ms", "ratio", "peak_mib"]
    shapes = sorted(set(zip(rows["heads"], rows["head_dim"], strict=True)))
    return SimpleNamespace(
        table=rows.assign(peak_mib=1024 * rows["peak_gib"])[names].rename(columns={"ratio": "time, dense = 1"}),
        shape=", ".join(f"{heads} heads of {size}" for heads, size in shapes),
    )


def throughput(rows: pd.DataFrame) -> SimpleNamespace:
    """Training steps by kind of batches, each variant at its best batch size, against equally long samples."""
    names = ["batch_size", "variant", "median_ms", "p20_ms", "p80_ms", "n", "real_tokens_per_s", "ratio_to_no_padding"]
    best = rows.sort_values("ratio_to_no_padding", ascending=False).drop_duplicates("variant")
    packed = next(iter(best.loc[best["variant"].str.startswith(PACKED), "variant"]), PACKED)
    rate = {name: pick(best, "real_tokens_per_s", "real tokens/s", 0, variant=name) for name in (BRAIN, packed)}
    share = {name: pick(best, "ratio_to_no_padding", PERCENT, 0, variant=name) for name in (BRAIN, BALANCED, packed)}
    first = rows.iloc[0]
    return SimpleNamespace(
        table=rows[names].rename(columns={"ratio_to_no_padding": "tokens/s, limit = 1"}),
        model=f"{first['layers']} layers of width {first['width']}, {first['dtype']}",
        fastest=packed,
        packed=share[packed],
        balanced=share[BALANCED],
        brain=share[BRAIN],
        packed_rate=rate[packed],
        brain_rate=rate[BRAIN],
        gain=over(rate[packed], rate[BRAIN]),
    )


def training(rows: pd.DataFrame) -> SimpleNamespace:
    """Whole trainings on each kind of batches: means over the seeds, and by how much losses exceed random batches'."""
    metrics = ["steps", "train_s", "peak_mib", "validation_loss", "guess_loss", "validation_accuracy", "guess_accuracy"]
    groups = rows.assign(peak_mib=1024 * rows["peak_gib"]).groupby("data", sort=False)
    table = groups[metrics].mean().assign(std=groups["validation_loss"].std())
    table = table[[*metrics[:4], "std", *metrics[4:]]].rename(columns={"std": "loss, std"})
    table.columns = [name.removeprefix("validation_").replace("guess_", "guess ") for name in table]
    losses = rows.pivot(index="seed", columns="data", values="validation_loss").reindex(columns=STEPS)
    first = rows.iloc[0]
    return SimpleNamespace(
        table=table.reset_index(),
        sizes=f"{rows['seed'].nunique()} seeds, {first['real_tokens']:,} real tokens, width {first['width']}",
        balanced_excess=_excess(losses, BALANCED),
        packed_excess=_excess(losses, PACKED),
        seeds_differ=float(losses[BIG_BRAIN].max() - losses[BIG_BRAIN].min()),
    )


def _excess(losses: pd.DataFrame, variant: str) -> Number:
    """How much higher the loss is than with random batches, from seed to seed, with a 95 % interval."""
    excess = (losses[variant] - losses[BIG_BRAIN]).dropna()
    if len(excess) < 2:
        return lacking(f"the losses of {variant} and {BIG_BRAIN} for two seeds or more")
    error = students(SHOWN, len(excess) - 1) * excess.std() / len(excess) ** 0.5
    return Number(excess.mean(), "nats", excess.mean() - error, excess.mean() + error, len(excess), decimals=2)
