"""What needs no rows: how many GPUs scale, and the speed of well-known models on GPUs that aren't there."""

from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd

from ... import fit
from ...book.values import PERCENT, derived
from ...distributed import Job
from ...fit.ranks import Link
from ...fit.speed import published
from ...lab import cards
from ...lab.memory import GIB
from ...rush.rates import flops_per_token

SHARDED = ("ddp", "zero2", "zero3")
PLANNED: dict[str, Any] = {"precision": "amp-bf16", "checkpointing": "full"}
STRATEGIES = {"single": "one process", "ddp": "DDP", "zero2": "ZeRO-2", "zero3": "ZeRO-3"}
SHOWN_RANKS = (2, 4, 8, 64, 512)
FEW = SHOWN_RANKS[:3]
SCALED: dict[str, Any] = {"model": "llama-3.1-8b", "sequence": 4096}  # of a GPU, one sequence
TASK: dict[str, Any] = {"model": "llama-3.2-1b", "sequence": 2048, "checkpointing": "none"}
TASK_BATCH = 8  # of a GPU, the ladder's last
ASSUMED_MFU = 0.5  # of the computation without communication
GPUS = ("t4", "rtx4090", "a100_80gb", "h100_80gb", "b200")
TRAININGS = {
    "Llama-3.2-1B": fit.Plan(model="llama-3.2-1b", sequence=2048, batch=4),
    "Llama-3.1-8B on 8": fit.Plan(model="llama-3.1-8b", sequence=2048, batch=8, strategy="zero3", ranks=8),
}


def scaling() -> SimpleNamespace:
    """The predicted share of a step that computes, by links, strategy and number of GPUs: no rows are needed."""
    lines = []
    for cluster, strategy in product(fit.CLUSTERS, SHARDED):
        line = {"cluster": cluster.name, "strategy": STRATEGIES[strategy]}
        for ranks in SHOWN_RANKS:
            line[f"{ranks} GPUs"] = _computing("H200", cluster, ranks, strategy=strategy, **SCALED)
        lines.append(line)
    efficiency = pd.DataFrame(lines).set_index(["cluster", "strategy"])
    pcie = next(cluster for cluster in fit.CLUSTERS if cluster.name == "PCIe 4")
    task = {ranks: _computing("a100_80gb", pcie, ranks, TASK_BATCH, strategy="ddp", **TASK) for ranks in FEW}
    about = "predicted share of a step that computes"
    of_few = {
        name: {ranks: derived(efficiency.loc[(cluster, "ZeRO-3"), f"{ranks} GPUs"], about, PERCENT, 0) for ranks in FEW}
        for name, cluster in (("nvlink", "NVLink 4"), ("pcie", "PCIe 5"))
    }
    of_few["task"] = {ranks: derived(share, about, PERCENT, 0) for ranks, share in task.items()}
    rates = {each.name: derived(each.gb_s, "published rate of collectives", "GB/s", 0) for each in fit.CLUSTERS}
    return SimpleNamespace(efficiency=efficiency.reset_index(), rates=rates, **of_few)


def _computing(gpu: str, cluster: Link, ranks: int, batch: int = 1, **job: Any) -> float:
    """The share of a step that computes, at half of the card's peak, with a batch of so many sequences a GPU."""
    flops = flops_per_token(job["model"], job["sequence"]) * job["sequence"] * batch
    compute_ms = flops / (ASSUMED_MFU * 1e9 * cards.card(gpu).bf16_tflops)
    planned = Job(batch=batch * ranks, **(PLANNED | job))
    return float(fit.predict(planned, ranks, cluster, compute_ms)["efficiency"])


def _fits(plan: fit.Plan, card: fit.Card) -> str:
    gib = fit.peak(plan).bytes / GIB
    return "yes" if gib <= card.memory_gib else f"no: {gib:.0f} of {card.memory_gib:.0f} GiB"


def published_speed() -> SimpleNamespace:
    """Tokens/s of well-known models by GPU, as predicted, and the predictions of published runs: no rows are needed."""
    rows = []
    for model, plan in TRAININGS.items():
        for gpu in GPUS:
            row = fit.speed(fit.plan_run(plan) | {"gpu": gpu})
            near = row["nearest"][0]
            rows.append(
                {
                    "model": model,
                    "GPU": gpu,
                    "tokens/s a GPU": f"{row['tokens_per_s_gpu']:,.0f}",
                    "band": f"{row['low']:,.0f} to {row['high']:,.0f}",
                    "fits": _fits(plan, cards.card(gpu)),
                    "bound by": row["bound"],
                    "nearest published run": f"{near['model']} on {near['gpu']}: {near['tok_s_gpu']:,.0f}",
                }
            )
    runs = pd.DataFrame(published())
    errors = (runs["predicted"] / runs["tok_s_gpu"] - 1).abs()
    weights = runs.groupby("source")["source"].transform("size") ** -0.5  # as in the fit: two sources have nearly all
    shares = np.quantile(errors, (0.5, 0.9), weights=weights, method="inverted_cdf")
    median, p90 = (derived(share, "arithmetic over published runs", PERCENT, 0) for share in shares)
    count, sources = (derived(number, "counted", "", 0) for number in (len(runs), runs["source"].nunique()))
    return SimpleNamespace(
        table=pd.DataFrame(rows),
        runs=runs,
        count=count,
        sources=sources,
        median=median,
        p90=p90,
        mfu=_published_mfu(runs[runs["precision"] == "bf16"]),
    )


def _published_mfu(runs: pd.DataFrame) -> SimpleNamespace:
    """The MFU of published runs, counted as the ladder's: the range of their middle half, and how many they are."""
    flops = 6 * runs["params"] + 12 * runs["layers"] * runs["width"] * runs["seq"]
    shares = runs["tok_s_gpu"] * flops / runs["card"].map(lambda card: 1e12 * card.bf16_tflops)
    low, high = (derived(share, "of published runs", PERCENT, 0) for share in shares.quantile([0.25, 0.75]))
    return SimpleNamespace(low=low, high=high, count=derived(len(runs), "counted", "", 0))
