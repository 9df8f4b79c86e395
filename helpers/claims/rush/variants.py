"""The best setup beside others: by transformers; norms and AdamW by variant."""

from types import SimpleNamespace

import numpy as np
import pandas as pd

from ...experiments.rush.transformers_llama import ALIKE
from ...lab.estimate import LUCK_HERE
from ...lab.records.values import PERCENT, TIMES, Number, derived, lacking, paired, timed
from ...lab.trials.start_noise import of_ratios

KINDS = {"kind": {"layer": "LayerNorm", "rms": "RMSNorm"}}
COMPILED_ALIKE = f"transformers, fused AdamW, compile{ALIKE}"
LIGER_ALIKE = f"transformers, liger-kernel, fused AdamW, compile{ALIKE}"
UNFUSED = " A fused AdamW without compilation, which may save a few percent, wasn't measured."


def peers(rows: pd.DataFrame) -> SimpleNamespace:
    """transformers' step against ours, trained in turn in one process."""
    names = ["variant", "speedup", "step_gib", "ours_step_gib", "loss", "ours_loss"]
    heads = {"speedup": "our speedup", "step_gib": "peak, GiB", "ours_step_gib": "ours, peak, GiB"}
    rows = rows.assign(speedup=[paired(row) for row in rows.to_dict("records")])
    rows.loc[rows["ours_step_gib"] == 0, "ours_step_gib"] = None  # of a graph's replay, which adds no memory
    shown = rows.assign(speedup=rows["speedup"].map(str))
    every, rows = rows, rows[~rows["variant"].str.endswith(ALIKE)]
    alike = dict(zip(every["variant"], every["speedup"], strict=True))
    rows = rows if len(rows) else every
    fastest = rows.loc[rows["ratio"].idxmin()]
    compiled = rows[rows["variant"].str.contains("compile")].sort_values("ratio")["speedup"]
    return SimpleNamespace(
        variants=shown[names].rename(columns=heads | {"ours_loss": "ours, loss"}),
        count=derived(len(rows), "counted", "", 0),
        fastest=fastest["variant"],
        over_compiled=next(iter(compiled), lacking("a compiled variant", TIMES)),
        alike=alike.get(COMPILED_ALIKE, lacking("compiled transformers with equal features", TIMES)),
        alike_liger=alike.get(LIGER_ALIKE, lacking("liger-kernel and compile with equal features", TIMES)),
        speedup=fastest["speedup"],
        loss=Number(fastest["loss"], decimals=3),
        ours_loss=Number(fastest["ours_loss"], decimals=3),
        left_out="" if "transformers, fused AdamW" in set(rows["variant"]) else UNFUSED,
    )


def nulls(rows: pd.DataFrame) -> SimpleNamespace:
    """Rungs in turns with themselves: intervals that leave 1 out, and the deviation of the ratios in one process."""
    rows = rows.reindex(columns=rows.columns.union(["low", "high", "ratio", "pairs", "starts"])).dropna(subset="ratio")
    excluded, one = (rows["low"] > 1) | (rows["high"] < 1), rows[rows["processes"] == 1]
    cells = rows.assign(trials=1, excluded=excluded, farthest=100 * (rows["ratio"] - 1).abs())
    cells = cells.groupby(["step", "processes"], sort=False)
    table = cells.agg({"trials": "sum", "pairs": "median", "excluded": "sum", "farthest": "max"})
    heads = {"step": "rung", "excluded": "intervals without 1", "farthest": "farthest from 1, %"}
    there = of_ratios(np.log(one["ratio"]), one["starts"]) if len(one) else None
    return SimpleNamespace(
        table=table.reset_index().rename(columns=heads),
        model=next(iter(rows["model"]), ""),
        luck=Number(there.value, PERCENT, there.low, there.high, there.trials, decimals=2)
        if there
        else lacking("trials in one process", PERCENT),
        assumed=derived(LUCK_HERE, "assumed", PERCENT, 1),
    )


def norms(rows: pd.DataFrame) -> SimpleNamespace:
    """LayerNorm and RMSNorm by variant, at the widest; rows and width are columns only where there are several."""
    rows = rows[rows["width"] == rows["width"].max()]
    table = _varied(_bandwidth(rows, ["kind", "rows", "width"]), ["rows", "width"]).replace(KINDS)
    sizes = ", ".join(f"{name} {rows[name].iloc[0]}" for name in ("rows", "width") if name not in table)
    return SimpleNamespace(variants=table, sizes=sizes)


def adam(rows: pd.DataFrame) -> SimpleNamespace:
    """A step of AdamW by variant."""
    return SimpleNamespace(variants=_bandwidth(rows, ["million_parameters"]))


def _bandwidth(rows: pd.DataFrame, sizes: list[str]) -> pd.DataFrame:
    names = [*sizes, "variant", "median_ms", "p20_ms", "p80_ms", "share_of_copy"]
    return timed(rows, names).rename(columns={"share_of_copy": "share of copy bandwidth"})


def lecture(rows: pd.DataFrame) -> SimpleNamespace:
    """The lecture's stack of decoder layers, against fp32."""
    speedup = [Number(1 / ratio, TIMES, decimals=2) for ratio in rows["ratio_to_fp32"]]
    names = ["batch", "variant", "median_ms", "p20_ms", "p80_ms", "speedup", "peak_gib"]
    return SimpleNamespace(stack=timed(rows.assign(speedup=speedup), names))


def _varied(table: pd.DataFrame, names: list[str]) -> pd.DataFrame:
    """Without those of the columns that hold one value."""
    return table.drop(columns=[name for name in names if name in table and table[name].nunique() == 1])
