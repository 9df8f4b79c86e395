"""Chapter 5: the ladder and what each rung brings, its memory, its peers, and training on many ranks."""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import torch

from .. import fit
from ..distributed import Job
from ..experiments.rush.ranks import PLANNED, SHARDED
from ..experiments.rush.steps import BEFORE_BATCHES, BEST
from ..fit.speed import left_out, published
from ..lab.estimate import LUCK
from ..lab.memory import GIB, MIB
from ..lab.records.values import PERCENT, TIMES, Number, derived, in_unit, lacking, over, paired, pick, speedup, visible
from ..rush import Setup, climb
from ..rush.measurement import LOSS_STEPS, ON_CPU_LOSS_STEPS
from ..rush.rates import PEAKS, flops_per_token, parameters
from ..rush.setup import LADDERS, START, stands_on

STRATEGIES = {"single": "one process", "ddp": "DDP", "zero2": "ZeRO-2", "zero3": "ZeRO-3", "tp": "tensor parallel"}
PARTS = ("weight copies", "gradients", "activations", "logits")
IN_FP32 = (START, "TF32", "fp32 products by oneDNN")  # rungs whose products are of fp32 numbers
KINDS = {"kind": {"layer": "LayerNorm", "rms": "RMSNorm"}}
PAGES = (START, BEST["cpu"])
SHOWN_RANKS = (2, 4, 8, 64, 512)
SCALED: dict[str, Any] = {"model": "llama-3.1-8b", "sequence": 4096}  # of a GPU, one sequence
ASSUMED_MFU = 0.5  # of the computation without communication
GPUS = ("t4", "rtx4090", "a100_80gb", "h100_80gb", "b200")
TRAININGS: dict[str, Any] = {
    "GPT-2 124M": {"layers": 12, "width": 768, "vocab": 50304, "seq": 1024, "micro_batch": 16},
    "Llama-3.2-1B": fit.Plan(model="llama-3.2-1b", sequence=2048, batch=4),
    "Llama-3.1-8B on 8": fit.Plan(model="llama-3.1-8b", sequence=2048, batch=8, strategy="zero3", ranks=8),
}


def ladder(rows: pd.DataFrame, trials: pd.DataFrame | None = None, *timed: pd.DataFrame) -> SimpleNamespace:
    """Each rung against its baseline, by `trials` where there are any, and against matrix products alone.

    The share of the matmul rate that the best rung reaches is the median of all timings of its setup, also in
    those `timed` beside it (loading, peers, allocator), and its bounds are the least and the largest of them.
    """
    _, left = LADDERS[_kind(rows)]
    trials = _trials(rows, trials)
    measured = _rungs(rows, trials)
    rungs, others = measured[~measured["rung"].isin(left)], measured[measured["rung"].isin(left)]
    ranked = rungs.dropna(subset="baseline").sort_values("gain", key=lambda gains: gains.map(float), ascending=False)
    best, start_loss = _best(rungs, trials), pick(measured, "loss", decimals=3, rung=START)
    losses = (measured["loss"] - float(start_loss)).abs().fillna(0)
    kept = ["rung", "gain", "tokens/s", "step_ms", "matmul_share", "product_tflops", "peak_gib", "loss"]
    heads = {"gain": "speedup", "matmul_share": "share of matmul rate", "product_tflops": "matmul, TFLOP/s"}
    left_out = others[["rung", "baseline", "gain", "compile_s", "peak_gib", "loss"]]
    unseen = [row["rung"] for row in rungs.to_dict("records") if row["gain"].measured and not visible(row["gain"])]
    before_flash = stands_on("FlashAttention", _kind(rows))
    stored, flash = (pick(rungs, "peak_gib", rung=name) for name in (before_flash, "FlashAttention"))
    first = rows.iloc[0]
    model, length = first["model"], int(first["sequence"])
    setups = climb(Setup(model=model, sequence=length), _kind(rows))
    rates = pd.Series([best["tokens/s"] * best["step_ms"] / ms for ms in _timings(best, trials, timed)])
    limit, operations = best["tokens/s"] / best["matmul_share"], flops_per_token(model, length)
    causal = (operations + 6 * parameters(model)) / 2 / operations  # half of attention's operations
    of = {"rate": (rates, "tokens/s"), "share": (rates / limit, PERCENT), "causal": (causal * rates / limit, PERCENT)}
    reached = {f"best_{name}": _range(values, unit) for name, (values, unit) in of.items()}
    return SimpleNamespace(
        job=f"{model}, sequences of {length} tokens, {first['text']}",
        climb={row["rung"]: row["gain"] for row in rungs.to_dict("records") if row["gain"].measured},
        rungs=rungs[kept].rename(columns=heads),
        left=left_out.rename(columns={"rung": "change"} | heads).assign(note=others["rung"].map(left)),
        unseen=", ".join(unseen) or "none",
        gains=dict(zip(measured["rung"], measured["gain"], strict=True)),
        **{name: _ranked(ranked, place) for place, name in enumerate(("first", "second", "third"))},
        mixed_to_first=over(_gain(ranked, "mixed precision"), _ranked(ranked, 0).gain),
        best=best["rung"],
        **reached,
        timings=derived(len(rates), "counted", "", 0),
        start_share=pick(measured, "matmul_share", PERCENT, 0, rung=START),
        best_loss=Number(best["loss"], decimals=3),
        model=model,
        changes=derived(len(setups[best["rung"]].differs(setups[START])), "counted", "", 0),
        loss_steps=derived(ON_CPU_LOSS_STEPS if _kind(rows) == "cpu" else LOSS_STEPS, "counted", "", 0),
        onednn=_gain(ranked, IN_FP32[-1]),
        mixed=_gain(ranked, "mixed precision"),
        compiled=_gain(ranked, "compile"),
        adamw=_gain(ranked, "fused AdamW"),
        attention_bytes=replace(over(stored, flash), derivation="allocated bytes"),
        total=_speedup(rows, trials, best["rung"], START),
        start_loss=start_loss,
        loss_apart=Number(losses.max(), decimals=3) if start_loss.measured else start_loss,
        loss_rung=measured.loc[losses.idxmax(), "rung"],
    )


def _trials(rows: pd.DataFrame, trials: pd.DataFrame | None) -> pd.DataFrame:
    """The pairs of rungs: those that a GPU's ladder has in its rows, and those of a table of their own."""
    of_rows = _in_pairs(rows)
    given = [table for table in (of_rows.assign(rung=of_rows["step"]), trials) if table is not None and len(table)]
    return pd.concat(given) if given else pd.DataFrame(columns=["baseline", "rung"])


def _in_pairs(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows that took turns with a baseline."""
    return rows.reindex(columns=rows.columns.union(["ratio", "baseline"])).dropna(subset="ratio")


def predicted(rows: pd.DataFrame) -> SimpleNamespace:
    """What `fit` predicts of a GPU's rungs that it can express, from fused attention on, beside what was measured.

    It counts the memory of uncompiled steps, and knows no kernel's name: the prediction is one of sizes and types.
    """
    lines, setups = [], climb(Setup(model=rows["model"].iloc[0], sequence=int(rows["sequence"].iloc[0])))
    for row in rows[rows["preset"] != "cpu"].to_dict("records"):
        setup = setups[row["step"]]
        if setup.attention == "eager" or setup.precision != "amp-bf16" or setup.float8 != "none":
            continue
        same = {name: getattr(setup, name) for name in ("model", "sequence", "batch", "precision", "checkpointing")}
        plan = fit.Plan(**same, head="full" if setup.head == "full" else "chunked")
        time, gib = fit.speed(fit.plan_run(plan) | {"gpu": row["gpu"]}), fit.peak(plan).bytes / GIB
        told = {"tokens_per_s": time["tokens_per_s"], "mfu": time["mfu"], "peak_gib": gib}
        within = time["low"] <= row["tokens_per_s"] <= time["high"]
        lines.append({"rung": row["step"], "in the band": within} | _beside(row, told))
    table = pd.DataFrame(lines)
    errors = {name: table[f"{name}, error"].map(float).abs() if len(table) else table for name in TOLD}
    return SimpleNamespace(
        table=table.rename(columns=HEADS),
        speed_error=Number(errors["tokens_per_s"].median() if lines else math.nan, PERCENT, missing="a GPU's ladder"),
        memory_error=Number(errors["peak_gib"].median() if lines else math.nan, PERCENT, missing="a GPU's ladder"),
    )


TOLD = {"tokens_per_s": "", "mfu": PERCENT, "peak_gib": ""}  # what is predicted of a rung
HEADS = {"tokens_per_s": "tokens/s", "tokens_per_s, predicted": "predicted", "tokens_per_s, error": "off by"}
HEADS |= {"mfu": "MFU", "mfu, predicted": "predicted MFU", "mfu, error": "MFU off by"}
HEADS |= {"peak_gib": "peak, GiB", "peak_gib, predicted": "counted, GiB", "peak_gib, error": "count off by"}


def _beside(row: dict, told: dict[str, float]) -> dict[str, Number]:
    """Measured, predicted, and the prediction's error as a share of what was measured."""
    cells: dict[str, Number] = {}
    for name, unit in TOLD.items():
        both = {name: row[name], f"{name}, predicted": told[name]}
        cells |= {key: Number(value, unit, missing=name) for key, value in both.items()}
        cells[f"{name}, error"] = Number(told[name] / row[name] - 1, PERCENT, missing=name, decimals=0)
    return cells


def _best(rungs: pd.DataFrame, trials: pd.DataFrame) -> pd.Series:
    """The rung that was tried against the plain loop, else the fastest."""
    before = dict(zip(rungs["rung"], rungs["baseline"], strict=True))
    whole = [rung for rung in trials.loc[trials["baseline"] == START, "rung"] if before.get(rung, START) != START]
    return rungs.loc[rungs["rung"] == whole[-1]].iloc[0] if whole else rungs.loc[rungs["tokens/s"].idxmax()]


def _timings(best: pd.Series, trials: pd.DataFrame, timed: tuple[pd.DataFrame, ...]) -> Iterator[float]:
    """Milliseconds of a step of the best rung, wherever they were recorded."""
    yield best["step_ms"]
    yield from trials.reindex(columns=["rung", "median_ms"]).query("rung == @best.rung")["median_ms"].dropna()
    for table in timed:
        if "wait_ms" in table:
            yield from table["step_ms"]
        elif "ours_loss" in table and not best["rung"].startswith("batch "):  # theirs is smaller
            yield from table["baseline_ms"]
        elif "rung" in table:
            yield from table.loc[table["rung"] == best["rung"], "median_ms"]


def _range(values: pd.Series, unit: str) -> Number:
    """Their median, between the least and the largest."""
    return Number(float(values.median()), unit, values.min(), values.max(), decimals=0)


def _kind(rows: pd.DataFrame) -> str:
    return "cpu" if rows["preset"].iloc[0] == "cpu" else "cuda"


def _limits(rows: pd.DataFrame) -> pd.Series:
    """Tokens/s at the highest product rate that any rung measured in the type that a rung multiplies in."""
    in_fp32 = rows["step"].isin(IN_FP32)
    flops = flops_per_token(rows["model"].iloc[0], int(rows["sequence"].iloc[0]))
    return 1e12 * rows["product_tflops"].groupby(in_fp32).transform("max") / flops


def _rungs(rows: pd.DataFrame, trials: pd.DataFrame) -> pd.DataFrame:
    """The measured rungs in the ladder's order, each with its baseline and its speedup over that."""
    kind = _kind(rows)
    order = [name for name in (START, *LADDERS[kind][0]) if name in set(rows["step"])]
    rungs = rows.assign(matmul_share=rows["tokens_per_s"] / _limits(rows)).set_index("step", drop=False).loc[order]
    rungs = rungs.rename(columns={"step": "rung", "tokens_per_s": "tokens/s"}).reset_index(drop=True)
    rungs["baseline"] = [None if name == START else stands_on(name, kind) for name in order]
    return rungs.assign(gain=[_speedup(rows, trials, n, b) for n, b in zip(order, rungs["baseline"], strict=True)])


def _speedup(rows: pd.DataFrame, trials: pd.DataFrame, step: str, baseline: str | None) -> Number:
    """How many times as many tokens/s a step trains as another one: of their trial, else of their rows.

    Each row is of a process of its own.
    """
    if baseline is None:
        return lacking("a rung before the first", TIMES)
    together = trials[(trials["rung"] == step) & (trials["baseline"] == baseline)]
    if len(together):
        return speedup(together.iloc[0], 2)
    rate, base = (pick(rows, "tokens_per_s", step=name) for name in (step, baseline))
    return in_unit(over(rate, base, LUCK), TIMES, 2)


def _gain(ranked: pd.DataFrame, rung: str) -> Number:
    return next(iter(ranked.loc[ranked["rung"] == rung, "gain"]), lacking(rung, TIMES))


def _ranked(ranked: pd.DataFrame, place: int) -> SimpleNamespace:
    """The rung with the largest gain, or the second, or the third."""
    if place >= len(ranked):
        return SimpleNamespace(rung="", baseline="", gain=lacking("more rungs of the ladder", TIMES))
    row = ranked.iloc[place]
    return SimpleNamespace(rung=row["rung"], baseline=row["baseline"], gain=row["gain"])


def allocator(rows: pd.DataFrame) -> SimpleNamespace:
    """What keeping the pages of freed memory is worth to the plain loop, and to the best rung."""
    by_rung = rows.set_index("rung")
    plain, best = (speedup(by_rung.loc[name], 2) if name in by_rung.index else lacking(name, TIMES) for name in PAGES)
    return SimpleNamespace(plain=plain, best=best, rung=PAGES[1], sequence=int(rows["sequence"].iloc[0]))


def batch(rows: pd.DataFrame, ladder: pd.DataFrame) -> SimpleNamespace:
    """Batch sizes of the ladder and beyond, against the highest matmul rate of the ladder."""
    before = BEFORE_BATCHES[_kind(ladder)]
    sizes = ladder["step"].str.extract(r"^batch (\d+)$")[0].astype(float).where(ladder["step"] != before, 1)
    sized = pd.concat([ladder.assign(batch=sizes).dropna(subset="batch"), rows]).sort_values("batch")
    sized = sized.assign(batch=sized["batch"].astype(int), share=sized["tokens_per_s"] / _limits(ladder).max())
    names = ["batch", "tokens_per_s", "step_ms", "p20_ms", "p80_ms", "share", "peak_gib"]
    return SimpleNamespace(sizes=sized[names].rename(columns={"share": "share of matmul rate"}), setup=before)


def loading(rows: pd.DataFrame) -> SimpleNamespace:
    """Steps fed by a loader, and the largest share that a step waits for its batch."""
    names = ["workers", "pinned", "step_ms", "p20_ms", "p80_ms", "wait_ms", "copy_ms"]
    waits = (rows["wait_ms"] + rows["copy_ms"]) / rows["step_ms"]
    return SimpleNamespace(steps=_varied(rows[names], ["pinned"]), waits=Number(waits.max(), PERCENT))


def checkpointing(rows: pd.DataFrame) -> SimpleNamespace:
    """Speed and memory by sequence length, and what full checkpointing costs at the longest that most kinds fit."""
    wide = rows.pivot(index="checkpointing", columns="sequence", values=["tokens_per_s", "peak_gib"])
    wide = wide.reindex(dict.fromkeys(rows["checkpointing"]))
    heads = {"tokens_per_s": "tokens/s", "peak_gib": "peak, GiB"}
    wide.columns = [f"{heads[name]} at {length}" for name, length in wide.columns]
    kinds = rows.groupby("sequence")["checkpointing"].nunique()
    length = int(kinds[kinds == kinds.max()].index.max())
    full, none = (
        {name: pick(rows, name, sequence=length, checkpointing=kind) for name in heads} for kind in ("full", "none")
    )
    pairs = _in_pairs(rows[(rows["sequence"] == length) & (rows["checkpointing"] == "full")])
    speed = speedup(pairs.iloc[0]) if len(pairs) else over(full["tokens_per_s"], none["tokens_per_s"])
    return SimpleNamespace(
        lengths=wide.reset_index(),
        length=length,
        memory=in_unit(over(full["peak_gib"], none["peak_gib"]), PERCENT, 0),
        speed=in_unit(speed, PERCENT, 0),
    )


def peers(rows: pd.DataFrame) -> SimpleNamespace:
    """transformers' step against ours, trained in turn in one process."""
    names = ["variant", "speedup", "step_gib", "ours_step_gib", "loss", "ours_loss"]
    heads = {"speedup": "our speedup", "step_gib": "peak, GiB", "ours_step_gib": "ours, peak, GiB"}
    rows = rows.assign(speedup=[paired(row) for row in rows.to_dict("records")])
    shown = rows.assign(speedup=rows["speedup"].map(str))
    fastest = rows.loc[rows["ratio"].idxmin()]
    compiled = rows[rows["variant"].str.contains("compile")].sort_values("ratio")["speedup"]
    return SimpleNamespace(
        variants=shown[names].rename(columns=heads | {"ours_loss": "ours, loss"}),
        count=derived(len(rows), "counted", "", 0),
        fastest=fastest["variant"],
        over_compiled=next(iter(compiled), lacking("a compiled variant", TIMES)),
        speedup=fastest["speedup"],
        loss=Number(fastest["loss"], decimals=3),
        ours_loss=Number(fastest["ours_loss"], decimals=3),
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
    return rows[names].rename(columns={"share_of_copy": "share of copy bandwidth"})


def lecture(rows: pd.DataFrame) -> SimpleNamespace:
    """The lecture's stack of decoder layers, against fp32."""
    speedup = [Number(1 / ratio, TIMES, decimals=2) for ratio in rows["ratio_to_fp32"]]
    names = ["batch", "variant", "median_ms", "p20_ms", "p80_ms", "speedup", "peak_gib"]
    return SimpleNamespace(stack=rows.assign(speedup=speedup)[names])


def memory(rows: pd.DataFrame) -> SimpleNamespace:
    """The measured peak of each uncompiled kept rung, against a count of its step on fake tensors, in GiB.

    On a CPU the measured peak is what a step adds to the weights, AdamW's moments and the tokens, and so is the count.
    Counting takes a second or two.
    """
    kind = _kind(rows)
    (steps, left), first = LADDERS[kind], rows.iloc[0]
    start = Setup(model=first["model"], sequence=int(first["sequence"]))
    lines = []
    for step, setup in climb(start, kind).items():
        if setup.precision == "fp32-onednn":  # of the same bytes, and not every machine that counts has it
            setup = replace(setup, precision="fp32")
        peak = pick(rows, "peak_gib", step=step)
        if peak.measured and step not in left and _countable(setup) and set(steps.get(step, ())) != {"allocator"}:
            lines.append({"rung": step} | _counted(setup, float(peak), kind))
    if not lines:
        absent = lacking("the peak of an uncompiled rung", PERCENT)
        return SimpleNamespace(counts=pd.DataFrame(), apart=absent, largest="", largest_share=absent)
    counts = pd.DataFrame(lines)
    largest = counts.loc[0, list(PARTS)].astype(float).idxmax()
    return SimpleNamespace(
        counts=counts,
        apart=Number(max((counts["counted / measured"] - 1).abs().max(), 1e-3), PERCENT),
        largest=largest,
        largest_share=derived(counts.loc[0, largest] / counts.loc[0, "counted"], "counted", PERCENT, 0),
    )


def _countable(setup: Setup) -> bool:
    return setup.compile == "none" and setup.batch == 1 and not setup.missing(torch.device("cpu"))


def _counted(setup: Setup, measured: float, kind: str) -> dict[str, float]:
    count = fit.count(setup)
    between = {} if kind == "cpu" else {"between steps": count.at_rest / GIB}
    parts = {part: count.parts.get(part, 0) / GIB for part in PARTS}
    counted = (count.bytes - count.at_rest * (kind == "cpu")) / GIB
    return between | parts | {"counted": counted, "measured": measured, "counted / measured": counted / measured}


def distributed(rows: pd.DataFrame) -> SimpleNamespace:
    """What a rank holds by strategy, and how far the losses are from those of one process."""
    sizes = {"parameter_bytes": "weights, MiB", "gradient_bytes": "gradients, MiB", "optimizer_bytes": "optimizer, MiB"}
    table = rows[["ranks", "strategy", *sizes, "last_loss"]].replace({"strategy": STRATEGIES})
    alone = pick(rows, "last_loss", strategy="single")
    apart = (rows["last_loss"] - float(alone)).abs().max()
    return SimpleNamespace(
        strategies=table.assign(**{name: table[name] / MIB for name in sizes}).rename(columns=sizes),
        apart=Number(max(apart, 1e-6)) if alone.measured else alone,
    )


def memory_alone(rows: pd.DataFrame) -> SimpleNamespace:
    """One rank's peak, counted and measured."""
    names = ["strategy", "counted_gib", "measured_gib", "ratio"]
    table = rows[names].replace({"strategy": STRATEGIES}).rename(columns={"ratio": "counted / measured"})
    return SimpleNamespace(strategies=table, models=", ".join(rows["model"].unique()))


def memory_plan(rows: pd.DataFrame) -> SimpleNamespace:
    """The simulated peak of one of many ranks."""
    return SimpleNamespace(peaks=rows.replace({"strategy": STRATEGIES}))


def scaling() -> SimpleNamespace:
    """The predicted share of a step that computes, by links, strategy and number of GPUs: no rows are needed."""
    compute_ms = flops_per_token(**SCALED) * SCALED["sequence"] / (ASSUMED_MFU * PEAKS["H200"]) * 1e3
    lines = []
    for cluster, strategy in product(fit.CLUSTERS, SHARDED):
        line = {"cluster": cluster.name, "strategy": STRATEGIES[strategy]}
        for ranks in SHOWN_RANKS:
            job = Job(strategy=strategy, batch=ranks, **SCALED, **PLANNED)
            line[f"{ranks} GPUs"] = fit.predict(job, ranks, cluster, compute_ms)["efficiency"]
        lines.append(line)
    return SimpleNamespace(efficiency=pd.DataFrame(lines))


def published_speed() -> SimpleNamespace:
    """Tokens/s of well-known models by GPU, as predicted, and the predictions of published runs: no rows are needed."""
    rows = []
    for model, plan in TRAININGS.items():
        for gpu in GPUS:
            row = fit.speed((fit.plan_run(plan) if isinstance(plan, fit.Plan) else plan) | {"gpu": gpu})
            near = row["nearest"][0]
            rows.append(
                {
                    "model": model,
                    "GPU": gpu,
                    "tokens/s a GPU": f"{row['tokens_per_s_gpu']:,.0f}",
                    "band": f"{row['low']:,.0f} to {row['high']:,.0f}",
                    "bound by": row["bound"],
                    "nearest published run": f"{near['model']} on {near['gpu']}: {near['tok_s_gpu']:,.0f}",
                }
            )
    runs = pd.DataFrame(published()).assign(predicted=left_out())
    errors = (runs["predicted"] / runs["tok_s_gpu"] - 1).abs()
    weights = runs.groupby("source")["source"].transform("size") ** -0.5  # as in the fit: two sources have nearly all
    shares = np.quantile(errors, (0.5, 0.9), weights=weights, method="inverted_cdf")
    median, p90 = (derived(share, "arithmetic over published runs", PERCENT, 0) for share in shares)
    count, sources = (derived(number, "counted", "", 0) for number in (len(runs), runs["source"].nunique()))
    return SimpleNamespace(table=pd.DataFrame(rows), runs=runs, count=count, sources=sources, median=median, p90=p90)


def _varied(table: pd.DataFrame, names: list[str]) -> pd.DataFrame:
    """Without those of the columns that hold one value."""
    return table.drop(columns=[name for name in names if name in table and table[name].nunique() == 1])
