"""The tables and sentences of chapter 6, made from the records."""

import pandas as pd

from helpers.lab.tables import groups, number, reached

from .selection import LEAST, RANDOM

GOAL_SHARDS, GOAL_SHARE, GOAL_LOST = 3.0, 0.3, 0.5
FILES, SHARDS, MAPPED = "files", ("webdataset", "webdataset by index", "tfrecord"), ("mapped", "ffcv")
SKLEARN, MATRIX = "scikit-learn, each step", "confusion matrix"


def sizes(formats: pd.DataFrame) -> pd.DataFrame:
    """A row for each kind of data and format: what it takes on disk and to build, and to find one sample or some."""
    columns = ["build_s", "files", "bytes_on_disk", "bytes_allocated", "lookup_us", "subset_s", "find_s"]
    rows = []
    for keys, found in groups(formats, ["gpu", "kind", "format"]):
        warm = found[found["cached"] == "warm"]
        first = (warm if len(warm) else found).iloc[0]
        row = keys | {name: first[name] for name in columns}
        row["to the data"] = row["bytes_allocated"] / first["payload_bytes"]
        rows.append(row)
    return pd.DataFrame(rows)


def format_verdicts(formats: pd.DataFrame) -> list[str]:
    """How much faster than small files each format is read, in order, cold, without workers; and what limits it."""
    said = []
    cold = formats[(formats["cached"] == "cold") & (formats["order"] == "sequential")] if len(formats) else formats
    for keys, found in groups(cold, ["gpu", "kind"]):
        alone = found[found["workers"] == 0].set_index("format")
        if FILES not in alone.index:
            continue
        for format in [name for name in (*SHARDS, *MAPPED) if name in alone.index]:
            row, base = alone.loc[format], alone.loc[FILES]
            ratio = row["samples_per_s"] / base["samples_per_s"]
            limit = base["raw_s"] / row["raw_s"]
            said.append(
                f"{keys['gpu']}, {keys['kind']}: {format} is read {ratio:.1f}× as fast as small files, in order, with "
                f"{row['cache']} out of the cache ({reached(ratio >= GOAL_SHARDS)}: at least {GOAL_SHARDS:g}); "
                f"the bare files, without any reader, {limit:.1f}×"
            )
    return said or ["The formats have not been measured yet."]


def _gains(formats: pd.DataFrame) -> pd.DataFrame:
    """Against small files, cold, in order and without workers: each format's `gain`, and `bare`, that of its files."""
    cold = formats[(formats["cached"] == "cold") & (formats["order"] == "sequential") & (formats["workers"] == 0)]
    rows = []
    for keys, found in groups(cold, ["gpu", "kind"]):
        by = found.set_index("format")
        if FILES in by.index:
            base = by.loc[FILES]
            for format, row in by.drop(FILES).iterrows():
                gain, bare = row["samples_per_s"] / base["samples_per_s"], base["raw_s"] / row["raw_s"]
                rows.append(keys | {"format": format, "gain": gain, "bare": bare})
    return pd.DataFrame(rows)


def best_gain(formats: pd.DataFrame, names: tuple[str, ...]) -> float | None:
    """The best of these formats against small files, over the kinds of data."""
    gains = _gains(formats)
    gains = gains[gains["format"].isin(names)] if len(gains) else gains
    return gains["gain"].max() if len(gains) else None


def shards_between(formats: pd.DataFrame) -> str:
    """Why the best of the shards isn't faster."""
    gains = _gains(formats)
    best = gains.loc[gains[gains["format"].isin(SHARDS)]["gain"].idxmax()]
    return (
        f"{best['format']}, {best['kind']}: its bare files are read {best['bare']:.1f}× as fast as small ones, so the "
        f"disk allows it; finding and unpacking each sample in Python takes the rest"
    )


def format_headline(formats: pd.DataFrame) -> str:
    """The chapter in a sentence: the best of the shards, and of the mapped files, against small files."""
    gains = _gains(formats) if len(formats) else formats
    if not len(gains):
        return "The formats have not been measured yet."
    told = []
    for name, formats_of in (("shards", SHARDS), ("a mapped file", MAPPED)):
        rows = gains[gains["format"].isin(formats_of)]
        if len(rows):
            best = rows.loc[rows["gain"].idxmax()]
            told.append(f"{name} {best['gain']:.1f}× ({best['format']}, {best['kind']})")
    return f"Against small files, read cold and in order, at best: {'; '.join(told)}."


def loader_verdicts(loader: pd.DataFrame) -> list[str]:
    """From how many workers on the device doesn't wait, and how far the prediction is from it."""
    said = []
    rows = loader[loader["where"] == "simulated"] if len(loader) else loader
    rows = rows[(rows["prefetch"] == 2) & (rows["decode"] == "Pillow")] if len(rows) else rows
    for keys, found in groups(rows, ["gpu", "step_ms"]):
        found = found.sort_values("workers")
        waits = found[found["idle_share"] >= 0.05]["workers"]
        enough = found[found["workers"] > waits.max()]["workers"] if len(waits) else found["workers"]
        told = f"from {int(enough.min())} workers on" if len(enough) else "with no number of workers that was tried"
        apart = (found["idle_share"] - found["predicted_idle_share"]).abs().max()
        said.append(
            f"{keys['gpu']}: a device that takes {keys['step_ms']:g} ms a step is idle for less than 5 % {told}; "
            f"with {int(found['workers'].iloc[0])} workers for {found['idle_share'].iloc[0]:.0%}. "
            f"The prediction is off by at most {apart:.0%} of the time"
        )
    return said or ["The loader has not been measured yet."]


def decoder_faults(faults: pd.DataFrame) -> pd.DataFrame:
    """What each library makes of each fault, a column for each library; `decode` refuses what can be seen."""
    if not len(faults):
        return faults
    return faults.pivot_table(
        index="fault", columns="variant", values="library", aggfunc="first", sort=False
    ).reset_index()


def metric_verdicts(growth: pd.DataFrame) -> list[str]:
    """What a step of the metric costs at first and at last, of scikit-learn and of counts."""
    said = []
    for keys, found in groups(growth, ["gpu"]):
        by = found.set_index("variant")
        for variant in [name for name in (SKLEARN, "torchmetrics, update", MATRIX) if name in by.index]:
            row = by.loc[variant]
            said.append(
                f"{keys['gpu']}, {variant}: {number(row['first_ms'])} ms a step at first, "
                f"{number(row['last_ms'])} ms at last, {number(row['total_s'])} s over the epoch"
            )
    return said or ["The metrics have not been measured yet."]


def choice(measured: pd.DataFrame) -> pd.DataFrame:
    """Means over the seeds, with their standard error; leaving out nothing is the same in every variant."""
    rows = []
    for keys, found in groups(measured, ["gpu", "data", "budget", "variant", "share"]):
        lost, variants = found["lost_points"], [keys["variant"]]
        if keys["share"] == 0:
            variants = list(dict.fromkeys(measured[measured["data"] == keys["data"]]["variant"]))
        rows += [
            keys
            | {"variant": variant, "seeds": len(found), "samples_kept": int(found["samples_kept"].iloc[0])}
            | {"test_accuracy": found["test_accuracy"].mean(), "lost_points": lost.mean()}
            | {"standard_error": lost.std(ddof=1) / len(found) ** 0.5}
            for variant in variants
        ]
    return pd.DataFrame(rows)


def choice_verdicts(told: pd.DataFrame) -> list[str]:
    """What leaving out the least forgotten share of the goal costs, beside leaving out any."""
    said = []
    for keys, found in groups(told[told["share"] == GOAL_SHARE] if len(told) else told, ["gpu", "data", "budget"]):
        by = found.set_index("variant")
        if not {LEAST, RANDOM} <= set(by.index):
            continue
        least, random = by.loc[LEAST], by.loc[RANDOM]
        said.append(
            f"{keys['gpu']}, {keys['data']}, as many {keys['budget']}: without the least forgotten {GOAL_SHARE:.0%}, "
            f"{_points(least)} points ({reached(least['lost_points'] <= GOAL_LOST)}: at most {GOAL_LOST} lost); "
            f"without any {GOAL_SHARE:.0%}, {_points(random)}"
        )
    return said or ["The choice of data has not been measured yet."]


def _points(row: pd.Series) -> str:
    """Points gained, with their standard error if there are several seeds."""
    error = row["standard_error"]
    return f"{-row['lost_points']:+.2f}" + (f" ± {error:.2f}" if error == error else "")


def choice_between(forgetting: pd.DataFrame) -> str:
    """Why leaving out the least forgotten costs more than the goal: what leaving out any costs, in as many steps."""
    told = choice(forgetting)
    rows = told[told["share"] == GOAL_SHARE]
    worst = rows[(rows["variant"] == LEAST) & (rows["budget"] == "epochs")]
    name = worst.loc[worst["lost_points"].idxmax(), "data"]
    any_left = rows[(rows["data"] == name) & (rows["variant"] == RANDOM)]
    said = ", ".join(f"{_points(row)} points in as many {row['budget']}" for _, row in any_left.iterrows())
    share = forgetting[forgetting["data"] == name]["unforgettable_share"].mean()
    return (
        f"{name}: {share:.0%} are never forgotten, yet leaving out any {GOAL_SHARE:.0%} costs {said}, so data "
        f"is short: what isn't forgotten is needed all the same"
    )


def lost_points(forgetting: pd.DataFrame) -> float | None:
    """Points lost without the least forgotten share of the goal; the largest of the data sets."""
    told = choice(forgetting)
    rows = told[(told["share"] == GOAL_SHARE) & (told["variant"] == LEAST) & (told["budget"] == "epochs")]
    return rows["lost_points"].max() if len(rows) else None


def noise_verdicts(noise: pd.DataFrame) -> list[str]:
    """How many of those left out had wrong labels, and what leaving them out did."""
    said = []
    for keys, found in groups(noise, ["gpu", "data", "variant"]):
        said.append(
            f"{keys['gpu']}, {keys['data']}: of those left out, {keys['variant']}, {found['precision'].mean():.0%} "
            f"had wrong labels, and accuracy changed by {found['gained_points'].mean():+.1f} points"
        )
    return said or ["Wrong labels have not been looked for yet."]


def jit_verdicts(jit: pd.DataFrame) -> list[str]:
    """How much faster numba is, and after how many turns of the loop its compiling has paid."""
    said = []
    rows = jit[jit["variant"] == "numba"].dropna(subset="turns") if "turns" in jit else jit[:0]
    for keys, found in groups(rows, ["gpu", "program"]):
        last = found.loc[found["size"].idxmax()]
        said.append(
            f"{keys['gpu']}, {keys['program']}, {last['size']:,} turns: {last['speedup']:.1f}× as fast once compiled, "
            f"which takes {last['compile_s']:.2g} s and has paid after {last['turns']:,.0f} turns of the loop"
        )
    return said or ["Python's speed has not been measured yet."]
