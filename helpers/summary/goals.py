"""Every figure that the chapters aim at: the goal, what was reached by the records, and what limits it.

A goal that only a test can hold (equal outputs, nothing lost) is in `held`, with its test.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from helpers.amp import story as amp
from helpers.batching import story as batching
from helpers.compilers import story as compilers
from helpers.experiments import select
from helpers.experiments.profiling import CUMULATIVE
from helpers.lab import records
from helpers.lab.tables import reached
from helpers.pipelines import story as pipelines
from helpers.profiling import story as profiling
from helpers.rush import story as rush
from helpers.swiglu import peers as swiglu_peers

AT_LEAST, AT_MOST, BELOW, ABOVE = "at least", "at most", "below", "above"
MET: dict[str, Callable[[float, float], bool]] = {
    AT_LEAST: lambda value, goal: value >= goal,
    AT_MOST: lambda value, goal: value <= goal,
    BELOW: lambda value, goal: value < goal,
    ABOVE: lambda value, goal: value > goal,
}
NOT_MEASURED = "not measured"
VISIBLY = 0.005  # what the eye sees in a plot of accuracies: half a point

Find = Callable[..., float | None]


@dataclass(frozen=True)
class Goal:
    """`find` takes what one device has recorded in each of `tables`, and gives the figure, or None if it isn't there.

    `limit` says what no implementation gets past.
    """

    notebook: str
    what: str
    relation: str
    goal: float
    tables: str  # "chapter/table chapter/table"
    find: Find
    limit: str
    share: bool = False  # to be told in percent
    on: str = ""  # "cpu" or "gpu", where the goal is about one of them only
    between: Callable[..., str] | None = None  # what stands between, of the same tables, where it is missed


def against_records(results: Path | None = None) -> pd.DataFrame:
    """A row for each goal, and each device that has a record of it."""
    return pd.DataFrame([row for goal in GOALS for row in _rows(goal, results)])


def _rows(goal: Goal, results: Path | None) -> list[dict]:
    about = {"chapter": goal.notebook[:2], "what": goal.what, "goal": f"{goal.relation} {_told(goal, goal.goal)}"}
    experiments = select(goal.tables.split())
    found = []
    for device in _devices(goal, experiments, results):
        frames = _recorded(experiments, device, results)
        value = goal.find(*frames) if frames else None
        if value is not None and value == value:
            verdict = reached(MET[goal.relation](value, goal.goal))
            name = frames[0]["gpu"].iloc[0]
            row = about | {"reached": _told(goal, value), "verdict": verdict, "limit": goal.limit, "gpu": name}
            found.append(row | {"between": goal.between(*frames) if goal.between and verdict == "missed" else ""})
    return found or [about | {"reached": None, "verdict": NOT_MEASURED, "limit": goal.limit, "gpu": None}]


def _devices(goal: Goal, experiments: list, results: Path | None) -> list[str]:
    """Those that the goal is about: GPUs, or where none has a record of the host's work, CPUs."""
    gpus, cpus = records.devices(results), records.devices(results, cpu=True)
    if goal.on == "cpu":
        return cpus
    if goal.on == "gpu" or not all(e.configurations("cpu") for e in experiments):
        return gpus
    return gpus if any(_recorded(experiments, device, results) for device in gpus) else cpus


def _recorded(experiments: Iterable, device: str, results: Path | None) -> list[pd.DataFrame]:
    """What the device has measured of each table; nothing if one of them has no row."""
    frames = []
    for e in experiments:
        rows = records.read(device, e.chapter, e.table, results)
        rows = rows[(rows["preset"] != "small") & (rows[records.STATUS] == "ok")] if len(rows) else rows
        if not len(rows):
            return []
        frames.append(rows)
    return frames


def _told(goal: Goal, value: float) -> str:
    if goal.share:
        return f"{value:.3g}" if abs(value) > 10 else f"{value:.2%}".replace(".00%", "%")
    return f"{value:.4g}"


def _accuracy(precision: str) -> Find:
    return lambda runs: _cars(runs, precision).min()


def _cars(runs: pd.DataFrame, precision: str) -> pd.Series:
    return runs[(runs["task"] == "segmentation") & (runs["precision"] == precision)]["validation_accuracy"]


def _of(table_way: str, column: str, choose: str = "max") -> Find:
    """The largest (or smallest) figure in a column among a way's rows."""

    def find(rows: pd.DataFrame) -> float | None:
        if column not in rows:
            return None
        kind = rows["variant"] if "variant" in rows else rows["way"]
        values = rows[kind == table_way][column].dropna()
        return getattr(values, choose)() if len(values) else None

    return find


def _sampler(column: str, among: int | None = None) -> Find:
    """A million samples' figure of our sampler, or its ratio to that of fewer."""

    def find(scaling: pd.DataFrame) -> float | None:
        at = scaling[scaling["variant"] == batching.OURS].set_index("samples")[column]
        if 1_000_000 not in at or (among is not None and among not in at):
            return None
        return at[1_000_000] / (1 if among is None else at[among])

    return find


def _packs(column: str, choose: str) -> Find:
    def find(packing: pd.DataFrame) -> float:
        million = packing[(packing["samples"] == 1_000_000) & (packing["strategy"] != "greedy")]
        return getattr(million[column], choose)()

    return find


def _least_gain(batch_time: pd.DataFrame) -> float | None:
    return batching.gains(batch_time)["gain"].min()


def _packed_rate(throughput: pd.DataFrame) -> float | None:
    return throughput[throughput["variant"].str.startswith("packed")]["ratio_to_no_padding"].max()


def _collator(collator: pd.DataFrame) -> float | None:
    ours = collator["variant"].str.startswith("packs")
    rates = collator["real_tokens_per_s"]
    return rates[ours].max() / rates[~ours].max() if ours.any() and not ours.all() else None


def _epochs(pipeline: str) -> Find:
    def find(runs: pd.DataFrame) -> float | None:
        mean = runs[runs["pipeline"] == pipeline].groupby("variant")["epoch_s"].mean()
        return mean["slow"] / mean["fixed"] if {"slow", "fixed"} <= set(mean.index) else None

    return find


def _idle(fixes: pd.DataFrame) -> float | None:
    last = [switch.name for switch in profiling.PIPELINES["vit"].switches if not switch.optional][-1]
    return fixes[(fixes["variant"] == CUMULATIVE) & (fixes["fix"] == last)]["device_idle_share"].max()


def _of_level(level: int, column: str) -> Find:
    """The worst of all shapes."""

    def find(rows: pd.DataFrame) -> float | None:
        return rows[rows["variant"] == f"{swiglu_peers.OURS}{level}"][column].max()

    return find


def _against_liger(column: str) -> Find:
    def find(rows: pd.DataFrame) -> float | None:
        kept = rows[rows["variant"] == f"{swiglu_peers.OURS}2"].set_index("hidden_dim")[column]
        theirs = rows[rows["variant"] == swiglu_peers.LIGER].set_index("hidden_dim")[column]
        return (kept / theirs).max()

    return find


def _rung(column: str, step: str | None = None) -> Find:
    """A figure of a rung of the ladder; of the fastest in bf16 if none is named."""

    def find(ladder: pd.DataFrame) -> float | None:
        told = rush.ladder(ladder).dropna(subset="tokens_per_s")
        chosen = told[told["step"] == step] if step else told[told["step"] != "float8"]
        return chosen.loc[chosen["tokens_per_s"].idxmax(), column] if len(chosen) else None

    return find


def _best_peer(peers: pd.DataFrame) -> float | None:
    rates = peers.set_index("variant")["tokens_per_s"].dropna()
    return rates["ours"] / rates[rush.LIGER] if {"ours", rush.LIGER} <= set(rates.index) else None


def _apart(*ranks: int) -> Find:
    def find(planned: pd.DataFrame) -> float | None:
        ratios = planned[planned["ranks"].isin(ranks)]["derived_ratio"]
        return (ratios - 1).abs().max() if len(ratios) else None

    return find


AMP, BATCHING, PROFILING = "01_amp", "02_batching", "03_profiling"
SWIGLU, RUSH = "04_swiglu_checkpointing", "05_optimization_rush"
PIPELINES, COMPILERS = "06_data_pipelines", "07_compilers"

GOALS = [
    Goal(AMP, "segmentation accuracy with a static scale, lowest of all seeds", AT_LEAST, amp.GOAL_ACCURACY,
         "amp/quality", _accuracy("static"), "what fp32 reaches", on="gpu"),
    Goal(AMP, "segmentation accuracy with a dynamic scale, lowest of all seeds", AT_LEAST, amp.GOAL_ACCURACY,
         "amp/quality", _accuracy("dynamic"), "what fp32 reaches", on="gpu"),
    Goal(AMP, "accuracy that AMP without a scaler lacks", AT_LEAST, VISIBLY, "amp/quality",
         lambda runs: _cars(runs, "dynamic").mean() - _cars(runs, "amp").mean(), "the gradients that fp16 makes 0"),
    Goal(AMP, "runs that diverged, pure fp16 apart", AT_MOST, 0, "amp/quality",
         lambda runs: (runs[runs["precision"] != "fp16"]["diverged"] == "yes").sum(), "0"),
    Goal(AMP, "unscale, clip and step, times as fast as torch's", AT_LEAST, amp.GOAL_SPEEDUP, "amp/scaler_step",
         lambda rows: (1 / rows[rows["variant"] == "ours"]["ratio_to_torch"]).min(),
         "48 bytes a parameter against 36: 1.33, where nothing waits"),
    Goal(AMP, "the same against a clipped step without scaling", AT_MOST, amp.GOAL_OVERHEAD, "amp/scaler_step",
         _of("ours", "ratio_to_no_scaler"), "equal bytes: 1"),
    Goal(AMP, "waits for the GPU in a step of the scaler", AT_MOST, 0, "amp/scaler_step",
         _of("ours", "host_reads"), "0"),
    Goal(AMP, "a step under our Autocast, against torch's", AT_MOST, amp.GOAL_AUTOCAST, "amp/autocast_overhead",
         _of("ours", "ratio_to_torch"), "the same kernels: 1"),
    Goal(BATCHING, "how full batches of WikiText's lengths are, k of 5 and more", AT_LEAST, batching.GOAL_FILL,
         "batching/padding", lambda padding: batching.emptiest(padding)["fill"], "100%", share=True),
    Goal(BATCHING, "a batch out of a million samples, against one out of ten thousand", AT_MOST,
         batching.GOAL_GROWTH, "batching/sampler_scaling", _sampler("batch_us", 10_000), "1"),
    Goal(BATCHING, "seconds to make the sampler of a million", BELOW, batching.GOAL_INIT_S,
         "batching/sampler_scaling", _sampler("init_s"), "one sort of a million numbers"),
    Goal(BATCHING, "seconds to pack a million lengths", BELOW, batching.GOAL_PACK_S, "batching/packing",
         _packs("pack_s", "max"), "one pass over them"),
    Goal(BATCHING, "how full the packs are", AT_LEAST, batching.GOAL_PACK_FILL, "batching/packing",
         _packs("fill", "min"), "100%", share=True),
    Goal(BATCHING, "tokens lost in packing", AT_MOST, 0, "batching/packing", _packs("tokens_lost", "sum"), "0"),
    Goal(BATCHING, "BRAIN, BIG BRAIN, balanced, packed: the least gain of a step in real tokens a second", ABOVE, 1.0,
         "batching/batch_time", _least_gain, "the padding that is left"),
    Goal(BATCHING, "packed, against equally long samples without padding", AT_LEAST, batching.GOAL_NO_PADDING,
         "batching/throughput", _packed_rate, "1, at equal attention"),
    Goal(BATCHING, "packs, against transformers' padding-free collator", AT_LEAST, batching.GOAL_COLLATOR,
         "batching/collator", _collator, "what changing shapes cost the collator"),
    Goal(PROFILING, "an epoch of the ViT with all fixes, times as fast", AT_LEAST, profiling.GOAL_SPEEDUP["vit"],
         "profiling/whole_runs", _epochs("vit"), "what the loop spends on nothing"),
    Goal(PROFILING, "an epoch of the language model with all fixes, times as fast", AT_LEAST,
         profiling.GOAL_SPEEDUP["gpt"], "profiling/whole_runs", _epochs("gpt"), "what the loop spends on nothing"),
    Goal(PROFILING, "the device idle in a step of the ViT with all fixes", BELOW, profiling.GOAL_IDLE,
         "profiling/vit_fixes", _idle, "0%", share=True),
    *(
        Goal(SWIGLU, goal, AT_MOST, at_most, "swiglu/peers", _of_level(level, column), limit)
        for goal, level, column, at_most, limit in (
            ("level 2, time of torch.compile's", 2, "ratio_to_compiled", 1.00, "the same nine products: 1"),
            ("level 2, bytes of the plain layer's", 2, "saved_ratio", 0.55, "as derived"),
            ("level 3, time of torch.compile's", 3, "ratio_to_compiled", 1.05, "the same nine products: 1"),
            ("level 3, bytes of the plain layer's", 3, "saved_ratio", 0.31, "as derived"),
        )
    ),
    Goal(SWIGLU, "keeping two, time of liger-kernel's", BELOW, 1.0, "swiglu/peers", _against_liger("median_ms"),
         "the same nine products: 1"),
    Goal(SWIGLU, "keeping two, bytes of liger-kernel's", BELOW, 1.0, "swiglu/peers", _against_liger("saved_mib"),
         "36 KiB against 52 a token: 0.69"),
    Goal(RUSH, "Llama-3.2-1B in bf16, share of the vendor's peak", AT_LEAST, rush.GOAL_MFU, "rush/ladder",
         _rung("mfu"), "the measured rate of large products", share=True),
    Goal(RUSH, "the same, times the unoptimised start", AT_LEAST, rush.GOAL_START, "rush/ladder",
         _rung("gain in all"), "fp32's rate against bf16's"),
    Goal(RUSH, "times transformers with liger-kernel, FlashAttention-2 and fused AdamW", AT_LEAST, rush.GOAL_PEER,
         "rush/peers", _best_peer, "what they leave of the peak"),
    Goal(RUSH, "float8, times the same in bf16", AT_LEAST, rush.GOAL_FLOAT8, "rush/ladder", _rung("gain", "float8"),
         "2, where all is products"),
    Goal(RUSH, "norm kernels, share of a copy's bandwidth", AT_LEAST, rush.GOAL_NORM, "rush/norms",
         _of("triton", "share_of_copy", "min"), "100%", share=True),
    Goal(RUSH, "AdamW, share of a copy's bandwidth", AT_LEAST, rush.GOAL_ADAM, "rush/adam",
         _of("triton", "share_of_copy", "min"), "100%", share=True),
    Goal(RUSH, "simulated memory of one rank, from the measured", AT_MOST, rush.GOAL_SIMULATED, "rush/memory_alone",
         lambda alone: (alone["ratio"] - 1).abs().max(), "what the allocator rounds up", share=True),
    Goal(RUSH, "memory of a rank as derived, from the simulated, at 8 and 64 ranks", AT_MOST, rush.GOAL_DERIVED,
         "rush/memory_plan", _apart(8, 64), "0%", share=True),
    Goal(PIPELINES, "tar or TFRecord shards against small files, cold and in order", AT_LEAST, pipelines.GOAL_SHARDS,
         "pipelines/formats", lambda formats: pipelines.best_gain(formats, pipelines.SHARDS),
         "the bare shards against the bare files",
         between=pipelines.shards_between),
    Goal(PIPELINES, "the memory-mapped file against small files, the same way", AT_LEAST, pipelines.GOAL_SHARDS,
         "pipelines/formats", lambda formats: pipelines.best_gain(formats, pipelines.MAPPED),
         "the bare file against the bare files"),
    Goal(PIPELINES, "points of accuracy lost without the least forgotten 30 %", AT_MOST, pipelines.GOAL_LOST,
         "pipelines/forgetting", pipelines.lost_points, "what is lost at random",
         between=pipelines.choice_between),
    Goal(COMPILERS, "ONNX Runtime or compile on one of two models on a CPU, times eager, mean over batches", AT_LEAST,
         compilers.GOAL_INFERENCE, "compilers/latency", compilers.inference_gain, "the products' rate", on="cpu"),
    Goal(COMPILERS, "torch.compile in training on a GPU, times eager, the best of modes and models", AT_LEAST,
         compilers.GOAL_TRAINING, "compilers/training", compilers.training_gain, "the products' rate", on="gpu"),
]  # fmt: skip
