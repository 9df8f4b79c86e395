"""The tables and sentences of chapter 2, made from the records."""

import math

import pandas as pd

from helpers.lab.tables import groups, reached

GOAL_FILL, GOAL_K = 0.97, 5
GOAL_PACK_S, GOAL_PACK_FILL = 1.0, 0.995
GOAL_INIT_S, GOAL_GROWTH = 0.5, 1.5
GOAL_NO_PADDING, GOAL_COLLATOR = 0.97, 1.3
STEPS = ("BRAIN", "BIG BRAIN", "k = 10", "packed")
OURS = "BalancedBatchSampler"


def gains(batch_time: pd.DataFrame) -> pd.DataFrame:
    """Each way of batching against the one before it, in real tokens a second over a whole epoch."""
    rows = []
    for keys, found in groups(batch_time, ["gpu", "batch_size"]):
        rates = found.set_index("variant")["real_tokens_per_s"]
        before = None
        for way in STEPS:
            if way in rates:
                row = keys | {"variant": way, "real_tokens_per_s": rates[way]}
                rows.append(
                    row | {"gain": rates[way] / before if before else None, "total gain": rates[way] / rates[STEPS[0]]}
                )
                before = rates[way]
    return pd.DataFrame(rows)


def training(plan: pd.DataFrame) -> pd.DataFrame:
    """A row for each kind of data: mean over the seeds, and the spread of the loss."""
    rows = []
    for data, runs in plan.groupby("data", sort=False):
        for gpu, found in runs.groupby("gpu", dropna=False) if "gpu" in runs else [(None, runs)]:
            row = {"gpu": gpu, "data": data, "seeds": int((found["status"] == "ok").sum())}
            for name in ("train_s", "peak_gib", "validation_loss", "validation_accuracy"):
                known = name in found and found[name].notna().any()
                row[name] = found[name].mean() if known else None
            spread = found["validation_loss"].std(ddof=1) if row["validation_loss"] is not None else None
            rows.append(row | {"deviation of the loss": spread, "status": ", ".join(sorted(set(found["status"])))})
    return pd.DataFrame(rows)


def host_verdicts(padding: pd.DataFrame, scaling: pd.DataFrame, packing: pd.DataFrame) -> list[str]:
    """What the chapter aims at in the work of the CPU, held against the records."""
    said = []
    for keys, found in groups(padding, ["gpu", "batch_size"]):
        ks = found[found["variant"].str.startswith("k = ")]
        ks = ks[ks["variant"].str.removeprefix("k = ").astype(int) >= GOAL_K]
        lowest = ks["fill"].min()
        said.append(
            f"{keys['gpu']}, {found['samples'].iloc[0]:,} samples in batches of {keys['batch_size']}: "
            f"at k of {GOAL_K} and more at least {_down(lowest)} full "
            f"({reached(lowest >= GOAL_FILL)}: at least {GOAL_FILL:.0%})"
        )
    for keys, found in groups(scaling[scaling["variant"] == OURS] if len(scaling) else scaling, ["gpu"]):
        at = found.set_index("samples")
        if {10_000, 1_000_000} <= set(at.index):
            growth = at.loc[1_000_000, "batch_us"] / at.loc[10_000, "batch_us"]
            init = at.loc[1_000_000, "init_s"]
            said.append(
                f"{keys['gpu']}: a batch out of a million samples costs {growth:.2f} of one out of ten thousand "
                f"({reached(growth <= GOAL_GROWTH)}: at most {GOAL_GROWTH}); making the sampler takes {init:.2f} s "
                f"({reached(init < GOAL_INIT_S)}: below {GOAL_INIT_S})"
            )
    million = packing[packing["samples"] == 1_000_000] if len(packing) else packing
    for keys, found in groups(million, ["gpu", "strategy"]):
        if keys["strategy"] == "greedy":
            continue
        slowest, emptiest, lost = found["pack_s"].max(), found["fill"].min(), int(found["tokens_lost"].sum())
        said.append(
            f"{keys['gpu']}, {keys['strategy']}: a million lengths in {slowest:.2f} s "
            f"({reached(slowest < GOAL_PACK_S)}: below {GOAL_PACK_S:g}), {_down(emptiest)} full "
            f"({reached(emptiest >= GOAL_PACK_FILL)}: at least {GOAL_PACK_FILL:.1%}), {lost} tokens lost"
        )
    return said or ["Nothing has been measured yet."]


def emptiest(padding: pd.DataFrame) -> pd.Series:
    """The row of the least full batches at the k of the goal and more."""
    ks = padding[padding["variant"].str.startswith("k = ")]
    ks = ks[ks["variant"].str.removeprefix("k = ").astype(int) >= GOAL_K]
    return ks.loc[ks["fill"].idxmin()]


def _down(share: float) -> str:
    """A share in percent, rounded down: what isn't quite full doesn't read as full."""
    return f"{math.floor(share * 1e4) / 1e2:.2f}%"


def gpu_verdicts(batch_time: pd.DataFrame, throughput: pd.DataFrame, collator: pd.DataFrame) -> list[str]:
    """What the chapter aims at on a GPU, held against the records."""
    if not any(map(len, (batch_time, throughput, collator))):
        return ["How fast each way of batching trains has not been measured on a GPU yet."]
    said = []
    for keys, found in groups(gains(batch_time), ["gpu", "batch_size"]) if len(batch_time) else []:
        steps = found.dropna(subset="gain")
        told = ", ".join(f"{row['variant']} {row['gain']:.2f}×" for row in steps.to_dict("records"))
        every = bool((steps["gain"] > 1).all())
        said.append(
            f"{keys['gpu']}, batches of {keys['batch_size']}, real tokens a second against the way before: {told} "
            f"({reached(every)}: each a gain)"
        )
    packed = throughput[throughput["variant"].str.startswith("packed")] if len(throughput) else throughput
    for keys, found in groups(packed, ["gpu", "batch_size"]):
        best = found.loc[found["ratio_to_no_padding"].idxmax()]
        ratio = best["ratio_to_no_padding"]
        said.append(
            f"{keys['gpu']}, batches of {keys['batch_size']}: {best['variant']} trains at {ratio:.3f} of the rate on "
            f"samples that need no padding ({reached(ratio >= GOAL_NO_PADDING)}: at least {GOAL_NO_PADDING})"
        )
    for keys, found in groups(collator, ["gpu", "batch_size"]):
        packs = found["variant"].str.startswith("packs")
        if packs.all() or not packs.any():
            continue
        best, theirs = (part.loc[part["real_tokens_per_s"].idxmax()] for part in (found[packs], found[~packs]))
        ratio = best["real_tokens_per_s"] / theirs["real_tokens_per_s"]
        said.append(
            f"{keys['gpu']}, batches of {keys['batch_size']}: {best['variant']}, {ratio:.2f}× the real tokens a "
            f"second of transformers' padding-free collator at its best, "
            f"{theirs['variant']} ({reached(ratio >= GOAL_COLLATOR)}: at least {GOAL_COLLATOR})"
        )
    return said
