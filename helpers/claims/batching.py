"""Chapter 2: what padding, samplers and packers cost; how fast and well a model learns from each kind of batches."""

from statistics import NormalDist
from types import SimpleNamespace

import numpy as np
import pandas as pd

from ..experiments.batching.attention_variants import PADDED
from ..experiments.batching.model_times import BY_TOKENS, STEPS
from ..experiments.batching.samplers_and_packers import OURS
from ..lab.estimate import LUCK_HERE, estimate
from ..lab.records.values import (
    NORMAL,
    PERCENT,
    TIMES,
    Number,
    cost,
    derived,
    in_unit,
    lacking,
    mean_of,
    of_kernels,
    over,
    over_runs,
    pick,
    speedup,
    timed,
)

BRAIN, BIG_BRAIN, BALANCED, PACKED = STEPS
NO_PADDING = "equally long, no padding"
DENSE, VARLEN = f"{PACKED}, dense", f"{PACKED}, varlen"
KERNELS = ("flex", "varlen")  # that compute no scores across documents
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
    columns += ["loader_s"] if rows["loader_s"].notna().any() else []
    shaped = rows.assign(**{"padding, %": (100 * rows["padding_share"]).map("{:.1f}".format)})
    sizes = [int(size) for size in sorted(rows["batch_size"].unique())]
    rates = rows.pivot(index="variant", columns="batch_size", values="real_tokens_per_s")
    # Without turns as uncertain as if the batches of an epoch, which differ in length, had been drawn.
    deviations = (rows["p75_ms"] - rows["p25_ms"]) / QUARTILES / rows["mean_ms"]
    reaches = rows.assign(reach=NORMAL * deviations / rows["batches"] ** 0.5)
    reaches = reaches.pivot(index="variant", columns="batch_size", values="reach")
    against_brain = rates / rates.reindex([BRAIN]).to_numpy()

    def most(name: str) -> Number:
        if name not in rates.index or BRAIN not in rates.index:
            return lacking(f"epochs of {name} and {BRAIN}")
        size = against_brain.loc[name].idxmax()
        if paired := _paired(rows[rows["batch_size"] == size], name, BRAIN):
            return paired
        rate, brain = (Number(rates.loc[of, size], reach=reaches.loc[of, size]) for of in (name, BRAIN))
        return over(rate, brain)

    gain = {name: most(name) for name in dict.fromkeys([*STEPS, *rates.index])}
    padding = rows.groupby("variant")["padding_share"].max().reindex(STEPS)
    brain_padding = Number(padding[BRAIN], PERCENT, missing=f"an epoch of {BRAIN}", decimals=0)
    first = rows.iloc[0]
    epoch = f"an epoch of {rows['samples'].max():,.0f} samples, width {first['width']}"
    return SimpleNamespace(
        tables=[timed(shaped[rows["batch_size"] == size], ["variant", *columns]) for size in sizes],
        sizes=sizes,
        model=f"{epoch}, {first['dtype']}, {first['source']}",
        against_brain=against_brain.reindex(STEPS),
        big_brain=gain[BIG_BRAIN],
        balanced=gain[BALANCED],
        packed=gain[PACKED],
        largest=max((one for one in gain.values() if one.measured), key=float, default=gain[BRAIN]),
        brain_padding=brain_padding,
        bound=derived(1 / (1 - brain_padding.value), "1 / (1 − padding)", decimals=1),
        balanced_padding=Number(padding[BALANCED], PERCENT, missing=f"an epoch of {BALANCED}", decimals=1),
    )


def attention(rows: pd.DataFrame) -> SimpleNamespace:
    """Attention within documents by each variant; `within` is the faster kernel against the padded batch's.

    Both are at the most tokens, whose arrays no cache holds. Without a padded batch, on a CPU, there is no such ratio.
    """
    names = ["tokens", "variant", "build_ms", "median_ms", "p20_ms", "p80_ms", "ratio", "peak_mib"]
    shapes = sorted(set(zip(rows["heads"], rows["head_dim"], strict=True)))
    baseline = rows["baseline"].iloc[0]
    longest = rows[rows["tokens"] == rows["tokens"].max()]
    padded = longest[longest["variant"] == PADDED].to_dict("records")
    kernels = longest[longest["variant"].isin(KERNELS) & (longest["baseline"] == PADDED)].to_dict("records")
    gains = {row["variant"]: of_kernels(speedup(row), row["variant"], row, *padded) for row in kernels}
    fastest = max((name for name in gains if gains[name].measured), key=lambda name: float(gains[name]), default="")
    absent = next(iter(gains.values()), lacking("attention within documents beside a padded batch", TIMES))
    return SimpleNamespace(
        table=timed(rows.assign(peak_mib=1024 * rows["peak_gib"]), names).rename(
            columns={"ratio": f"time, {baseline} = 1"}
        ),
        shape=", ".join(f"{heads} heads of {size}" for heads, size in shapes),
        tokens=int(longest["tokens"].iloc[0]),
        within=gains.get(fastest, absent),
        fastest=fastest,
    )


def throughput(rows: pd.DataFrame) -> SimpleNamespace:
    """Training steps by kind of batches, each at its best batch size, against equally long samples.

    `alone`, `over_longest` and `over_balanced` are packing with the kernel that padded batches have: FlashAttention,
    which a GPU's packs give the texts' ends and a CPU's a mask. `kernel` is what the packs' fastest kernel adds, and
    `gain` is both. All of these are at one batch size, that of the fastest packs. A step's real tokens and its kernel
    of attention are columns of the table.
    """
    sizes = rows["batch_size"].unique()
    names = ["batch_size", "variant", "attention", "real tokens a step", "median_ms", "p20_ms", "p80_ms"]
    names = [*names[len(sizes) < 2 :], "real_tokens_per_s", "ratio_to_no_padding"]
    best = rows.sort_values("ratio_to_no_padding", ascending=False).drop_duplicates("variant")
    packed = next(iter(best.loc[best["variant"].str.startswith(PACKED), "variant"]), PACKED)

    def faster(variant: str, baseline: str, like: str = "", kernel: bool = False) -> Number:
        of = best.loc[best["variant"] == (like or variant), "batch_size"]
        if not len(of):
            return lacking(like or variant, TIMES)
        ratio = _rate_ratio(rows, variant, baseline, of.iloc[0])
        both = rows[(rows["batch_size"] == of.iloc[0]) & rows["variant"].isin([variant, baseline])]
        return of_kernels(ratio, f"{variant} over {baseline}", *both.to_dict("records")) if kernel else ratio

    same = DENSE if (rows["preset"] == "cpu").all() else VARLEN
    share = {name: in_unit(faster(name, NO_PADDING), PERCENT, 0) for name in (BRAIN, BALANCED, packed)}
    first = rows.iloc[0]
    table = rows.assign(
        attention=rows["variant"].map(_kernel_of),
        **{"real tokens a step": (rows["real_tokens_per_s"] * rows["median_ms"] / 1e3).round()},
    )
    return SimpleNamespace(
        table=timed(table, names).rename(columns={"ratio_to_no_padding": "tokens/s, limit = 1"}),
        model=f"{first['layers']} layers of width {first['width']}, {first['dtype']}, batches of "
        + " and ".join(map(str, sizes)),
        fastest=packed,
        packed=share[packed],
        balanced=share[BALANCED],
        brain=share[BRAIN],
        gain=faster(packed, BRAIN),
        by_length=faster(BALANCED, BRAIN),
        over_balanced=faster(same, BALANCED, packed),
        over_longest=faster(same, BIG_BRAIN, packed),
        alone=faster(same, BRAIN, packed),
        kernel=faster(packed, same, packed, kernel=True),
        kernel_name=_kernel_of(packed),
        same_kernel=_kernel_of(same),
    )


def _kernel_of(variant: str) -> str:
    """The attention of a kind of batches, as its table names it."""
    return variant.removeprefix(f"{PACKED}, ") if variant.startswith(PACKED) else "causal"


def _rate_ratio(rows: pd.DataFrame, variant: str, baseline: str, size: int) -> Number:
    """How many times as many tokens a second at one batch size: by the rounds of both, where they are recorded."""
    of_size = rows[rows["batch_size"] == size]
    rate, slower = (pick(of_size, "real_tokens_per_s", variant=name) for name in (variant, baseline))
    return _paired(of_size, variant, baseline) or over(rate, slower)


def _paired(rows: pd.DataFrame, variant: str, baseline: str) -> Number | None:
    """The ratio of the times of a real token by the turns of two variants; None where too few are recorded."""
    two = rows.set_index("variant").reindex([variant, baseline])
    if "us_per_token" not in two or two["us_per_token"].isna().any():
        return None
    ours, theirs = (np.array(of.split(), dtype=float) for of in two["us_per_token"])
    paired = estimate([np.log(ours / theirs)], LUCK_HERE)
    return speedup(paired.row()) if paired else None


def training(rows: pd.DataFrame) -> SimpleNamespace:
    """Whole trainings on each kind of batches: means over the seeds, and by how much losses exceed random batches'."""
    metrics = ["steps", "train_s", "peak_mib", "validation_loss", "guess_loss", "validation_accuracy", "guess_accuracy"]
    groups = rows.assign(peak_mib=1024 * rows["peak_gib"]).groupby("data", sort=False)
    table = groups[metrics].mean().assign(std=groups["validation_loss"].std())
    table = table[[*metrics[:4], "std", *metrics[4:]]].rename(columns={"std": "loss, std"})
    table.columns = [name.removeprefix("validation_").replace("guess_", "guess ") for name in table]
    losses, seconds = (
        rows.pivot(index="seed", columns="data", values=name).reindex(columns=[*STEPS, BY_TOKENS])
        for name in ("validation_loss", "train_s")
    )
    first, seeds = rows.iloc[0], rows["seed"].nunique()
    return SimpleNamespace(
        table=table.reset_index(),
        sizes=f"{seeds} seed{'s' * (seeds > 1)}, {first['real_tokens']:,} real tokens, width {first['width']}, "
        f"batches of {first['batch_size']}, samples cut to {first['max_length']} tokens",
        batch=int(first["batch_size"]),
        packed_speedup=over_runs(seconds[BRAIN], seconds[PACKED]),
        packed_over_longest=over_runs(seconds[BIG_BRAIN], seconds[PACKED]),
        packed_s=Number(seconds[PACKED].mean(), "s", missing=PACKED),
        balanced_s=Number(seconds[BALANCED].mean(), "s", missing=BALANCED),
        balanced_speedup=over_runs(seconds[BRAIN], seconds[BALANCED]),
        balanced_excess=mean_of(losses[BALANCED] - losses[BIG_BRAIN], "nats", BALANCED),
        balanced_gap=Number((losses[BALANCED] - losses[BIG_BRAIN]).mean(), "nats", missing=BALANCED, decimals=2),
        by_tokens_excess=mean_of(losses[BY_TOKENS] - losses[BIG_BRAIN], "nats", BY_TOKENS),
        packed_excess=mean_of(losses[PACKED] - losses[BIG_BRAIN], "nats", PACKED),
        cost=SimpleNamespace(balanced=cost(rows, "data", BALANCED, BRAIN), packed=cost(rows, "data", PACKED, BRAIN)),
        seeds_differ=float(losses[BIG_BRAIN].max() - losses[BIG_BRAIN].min()),
    )
