"""What is counted or predicted: memory of a step, many ranks, and the speed of GPUs that aren't there."""

import contextlib
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd

from ... import fit
from ...distributed import Job
from ...experiments.rush.ranks import PLANNED, SHARDED
from ...fit.speed import left_out, published
from ...lab import cards
from ...lab.memory import GIB, MIB
from ...lab.records.values import PERCENT, Number, derived, lacking, pick
from ...rush import Setup, climb
from ...rush.rates import flops_per_token
from ...rush.setup import LADDERS
from .rungs import kind_of

STRATEGIES = {"single": "one process", "ddp": "DDP", "zero2": "ZeRO-2", "zero3": "ZeRO-3"}
PARTS = ("weight copies", "gradients", "activations", "logits")
SHOWN_RANKS = (2, 4, 8, 64, 512)
SCALED: dict[str, Any] = {"model": "llama-3.1-8b", "sequence": 4096}  # of a GPU, one sequence
ASSUMED_MFU = 0.5  # of the computation without communication
GPUS = ("t4", "rtx4090", "a100_80gb", "h100_80gb", "b200")
TRAININGS: dict[str, Any] = {
    "GPT-2 124M": {"layers": 12, "width": 768, "vocab": 50304, "seq": 1024, "micro_batch": 16},
    "Llama-3.2-1B": fit.Plan(model="llama-3.2-1b", sequence=2048, batch=4),
    "Llama-3.1-8B on 8": fit.Plan(model="llama-3.1-8b", sequence=2048, batch=8, strategy="zero3", ranks=8),
}
TOLD = {  # what is predicted of a rung: its unit, and the heads of its measured value, the prediction and the error
    "tokens_per_s": ("", ("tokens/s", "predicted", "off by")),
    "mfu": (PERCENT, ("MFU", "predicted MFU", "MFU off by")),
    "peak_gib": ("", ("peak, GiB", "counted, GiB", "count off by")),
}


def _in_table(gpu: str) -> bool:
    with contextlib.suppress(ValueError):
        return bool(cards.card(gpu))
    return False


def predicted(rows: pd.DataFrame) -> SimpleNamespace:
    """What `fit` predicts of a GPU's rungs beside what was measured, from a count of each rung's own step.

    It takes some five seconds a rung. Of a card that isn't in its table it says nothing.
    """
    lines, setups = [], climb(Setup(model=rows["model"].iloc[0], sequence=int(rows["sequence"].iloc[0])))
    for row in rows[(rows["preset"] != "cpu") & rows["gpu"].map(_in_table)].to_dict("records"):
        try:
            gib = fit.count(setups[row["step"]]).bytes / GIB
        except ValueError:  # what only a library that isn't here could run
            continue
        time = fit.step_time(setups[row["step"]], cards.card(row["gpu"]))
        told = {"tokens_per_s": time["tokens_per_s"], "mfu": time["mfu"], "peak_gib": gib}
        line = {"rung": row["step"], "in the band": time["low"] <= row["tokens_per_s"] <= time["high"]}
        for name, (unit, heads) in TOLD.items():
            off = Number(told[name] / row[name] - 1, PERCENT, decimals=0)
            line |= dict(zip(heads, (Number(row[name], unit), Number(told[name], unit), off), strict=True))
        lines.append(line)

    def error(name: str) -> Number:
        head = TOLD[name][1][-1]
        median = pd.Series([abs(float(line[head])) for line in lines]).median()
        return Number(median, PERCENT, missing="a GPU's ladder")

    return SimpleNamespace(table=pd.DataFrame(lines), speed_error=error("tokens_per_s"), memory_error=error("peak_gib"))


def memory(rows: pd.DataFrame) -> SimpleNamespace:
    """The measured peak of each uncompiled kept rung, against a count of its step on fake tensors, in GiB.

    On a CPU the measured peak is what a step adds to the weights, AdamW's moments and the tokens, and so is the count.
    Counting takes a second or two.
    """
    kind = kind_of(rows)
    (steps, left), first = LADDERS[kind], rows.iloc[0]
    start = Setup(model=first["model"], sequence=int(first["sequence"]))
    lines = []
    for step, setup in climb(start, kind).items():
        peak = pick(rows, "peak_gib", step=step)
        if peak.measured and step not in left and setup.compile == "none" and set(steps.get(step, ())) != {"allocator"}:
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


def memory_plan(rows: pd.DataFrame) -> SimpleNamespace:
    """The simulated peak of one of many ranks."""
    return SimpleNamespace(peaks=rows.replace({"strategy": STRATEGIES}))


def scaling() -> SimpleNamespace:
    """The predicted share of a step that computes, by links, strategy and number of GPUs: no rows are needed."""
    flops_ms = ASSUMED_MFU * 1e9 * cards.card("H200").bf16_tflops
    compute_ms = flops_per_token(**SCALED) * SCALED["sequence"] / flops_ms
    lines = []
    for cluster, strategy in product(fit.CLUSTERS, SHARDED):
        line = {"cluster": cluster.name, "strategy": STRATEGIES[strategy]}
        for ranks in SHOWN_RANKS:
            job = Job(strategy=strategy, batch=ranks, **SCALED, **PLANNED)
            line[f"{ranks} GPUs"] = fit.predict(job, ranks, cluster, compute_ms)["efficiency"]
        lines.append(line)
    return SimpleNamespace(efficiency=pd.DataFrame(lines))


def _fits(plan: fit.Plan, card: fit.Card) -> str:
    gib = fit.peak(plan).bytes / GIB
    return "yes" if gib <= card.memory_gib else f"no: {gib:.0f} of {card.memory_gib:.0f} GiB"


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
                    "fits": _fits(plan, cards.card(gpu)) if isinstance(plan, fit.Plan) else "",
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
