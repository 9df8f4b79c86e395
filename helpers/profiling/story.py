"""The tables and sentences of chapter 3, made from the records."""

import pandas as pd

from helpers.experiments.profiling import ALONE, CUMULATIVE, PIPELINES, SLOW
from helpers.lab.tables import groups, reached

from . import findings as found_as

NAMES = {"vit": "ViT on photos", "gpt": "language model"}
GOAL_SPEEDUP = {"vit": 5.0, "gpt": 3.0}
GOAL_IDLE = 0.05

# What gives each planted inefficiency away: a finding of the diagnosis, or something else to look at.
GIVEN_AWAY = {
    "workers": found_as.LOADER_WAITS,
    "token_cache": found_as.LOADER_WAITS,
    "decode_once": found_as.LOADER_WAITS,
    "photos_on_device": found_as.LOADER_WAITS,
    "pinned": found_as.PAGEABLE,
    "constants_once": found_as.PAGEABLE,
    "uint8_transfer": "the bytes of a copy: four times the photos'",
    "single_cut": "the loader's own profile: two resamplings of each photo",
    "short_padding": "the share of padding",
    "packed": "the share of padding",
    "width_256": found_as.UNALIGNED,
    "width_1024": found_as.UNALIGNED,
    "vocabulary_64": found_as.UNALIGNED,
    "fused_qkv": found_as.SEPARATE,
    "fused_attention": found_as.ATTENTION,
    "no_dead_projection": found_as.UNUSED,
    "positions_once": found_as.CONSTANT,
    "conv_patches": "the embedding's time against its floor",
    "fused_loss": "kernels over all logits between head and loss",
    "inference_mode": found_as.KEPT_GRAPH,
    "no_item": found_as.HOST_WAITS,
    "streaming_metrics": found_as.HOST_WAITS,
    "streaming_accuracy": found_as.HOST_WAITS,
    "fused_optimizer": found_as.UNFUSED,
    "set_to_none": found_as.ZEROED,
    "cudnn_benchmark": found_as.UNBENCHMARKED,
    "any_algorithm": "the loop's own settings",
    "keep_memory": found_as.RETURNED,
    "bf16": found_as.FP32,
    "compile": found_as.TINY_KERNELS,
    "cuda_graph": found_as.TINY_KERNELS,
}

# Parts of a model: by the type of a module, or by its name. What is indented is within the part above.
PARTS: tuple[tuple[str, set[str], set[str]], ...] = (
    ("embedding", {"ReshapedPatches", "ConvPatches", "Embedding", "PositionalEncoding", "RecomputedPositions"}, set()),
    ("attention", set(), {"attention", "self_attn", "multihead_attn"}),
    ("attention's output", {"NonDynamicallyQuantizableLinear"}, set()),  # nn.MultiheadAttention's
    ("  softmax", {"Softmax"}, set()),
    ("feed-forward", set(), {"mlp", "linear1", "linear2"}),
    ("  GELU", {"GELU"}, set()),
    ("normalisation", {"LayerNorm"}, set()),
    ("head", set(), {"head"}),
)


def parts(modules: pd.DataFrame) -> pd.DataFrame:
    """Forward and backward time of the parts of each model, from the rows of its modules."""
    rows = []
    for keys, found in groups(modules, ["gpu", "pipeline", "variant"]):
        step_ms = found.loc[found["module"] == "step", "total_ms"].iloc[0]
        names = found["module"].str.rpartition(".")[2]
        whole = [("model", ~found["module"].str.contains(".", regex=False) & (found["type"] != ""))]
        whole += [(part, found["type"].isin(types) | names.isin(called)) for part, types, called in PARTS]
        for part, chosen in whole:
            times = found[chosen & (found["calls"] > 0)]
            if len(times):
                sums = {name: times[name].sum() for name in ("calls", "forward_ms", "backward_ms", "activation_mib")}
                both = sums["forward_ms"] + sums["backward_ms"]
                rows.append(keys | {"part": part} | sums | {"share": both / step_ms})
        outside = found.loc[found["module"] == "outside", "total_ms"].iloc[0]
        rows.append(keys | {"part": "outside the model", "share": outside / step_ms})
    return pd.DataFrame(rows)


def floors(modules: pd.DataFrame) -> pd.DataFrame:
    """Layers of one type together: what they took against what their work must cost at least."""
    known = modules.dropna(subset="lower_bound_ms") if "lower_bound_ms" in modules else modules[:0]
    known = known.replace({"type": {"NonDynamicallyQuantizableLinear": "Linear"}})  # nn.MultiheadAttention's output
    rows = []
    for keys, found in groups(known, ["gpu", "pipeline", "variant", "type"]):
        sums = {name: found[name].sum() for name in ("calls", "gflop", "moved_mib", "lower_bound_ms", "total_ms")}
        rows.append(keys | sums | {"time to floor": sums["total_ms"] / sums["lower_bound_ms"]})
    return pd.DataFrame(rows)


def fixes(plan: pd.DataFrame, pipeline: str) -> pd.DataFrame:
    """Each fix: what it mends, its kind, its gain alone, and the time and gain with all before it."""
    switches = {switch.name: switch for switch in PIPELINES[pipeline].switches}
    rows = []
    for gpu, found in plan.groupby("gpu", dropna=False, sort=False) if "gpu" in plan else [(None, plan)]:
        slow_ms = _ms(found, SLOW, "none")
        before_ms = slow_ms
        for name, switch in switches.items():
            alone_ms, so_far_ms = _ms(found, ALONE, name), _ms(found, CUMULATIVE, name)
            row = {"gpu": gpu, "fix": name, "kind": switch.kind.split(":")[0], "alone_ms": alone_ms}
            row |= {"gain alone": _ratio(slow_ms, alone_ms), "cumulative_ms": so_far_ms}
            row |= {"gain of the step": _ratio(before_ms, so_far_ms), "gain in all": _ratio(slow_ms, so_far_ms)}
            at = found[(found["variant"] == CUMULATIVE) & (found["fix"] == name)]
            row |= {column: _value(at, column) for column in ("device_idle_share", "peak_gib")}
            rows.append(row | {"status": ", ".join(sorted(set(at["status"]))) if len(at) else ""})
            before_ms = so_far_ms or before_ms
    return pd.DataFrame(rows)


def inefficiencies(pipeline: str) -> pd.DataFrame:
    """What is slow on purpose, what gives it away, and what mends it."""
    rows = []
    for switch in PIPELINES[pipeline].switches:
        row = {"switch": switch.name, "slow": switch.slow, "given away by": GIVEN_AWAY[switch.name]}
        rows.append(row | {"fixed": switch.fixed, "kind": switch.kind})
    return pd.DataFrame(rows)


def runs(plan: pd.DataFrame) -> pd.DataFrame:
    """Whole training runs, slow and fixed: mean over the seeds."""
    rows = []
    for (pipeline, variant), found in plan.groupby(["pipeline", "variant"], sort=False):
        for gpu, part in found.groupby("gpu", dropna=False) if "gpu" in found else [(None, found)]:
            row = {"gpu": gpu, "pipeline": NAMES[pipeline], "variant": variant}
            row["seeds"] = int((part["status"] == "ok").sum())
            for name in ("epoch_s", "iteration_mean_ms", "peak_gib", "validation_accuracy"):
                row[name] = part[name].mean() if name in part and part[name].notna().any() else None
            accuracy = part["validation_accuracy"] if row["validation_accuracy"] is not None else None
            row["deviation"] = None if accuracy is None else accuracy.std(ddof=1)
            rows.append(row | {"status": ", ".join(sorted(set(part["status"])))})
    return pd.DataFrame(rows)


def backward_verdicts(modules: pd.DataFrame) -> list[str]:
    """How long backward takes against forward. Its products are twice forward's, so about two is expected."""
    said = []
    for keys, found in groups(modules, ["gpu", "pipeline", "variant"]):
        model = found[~found["module"].str.contains(".", regex=False) & (found["type"] != "")].iloc[0]
        ratio = model["backward_ms"] / model["forward_ms"]
        said.append(
            f"{keys['gpu']}, {NAMES[keys['pipeline']]}, {keys['variant']}: forward {model['forward_ms']:.2f} ms, "
            f"backward {model['backward_ms']:.2f} ms, {ratio:.2f} times forward"
        )
    return said or ["Forward and backward have not been measured on a GPU yet."]


def verdicts(whole: pd.DataFrame, vit: pd.DataFrame, gpt: pd.DataFrame) -> list[str]:
    """What the chapter aims at, held against the records."""
    said = []
    for keys, found in groups(whole, ["gpu", "pipeline"]):
        mean = found.groupby("variant")[["epoch_s", "validation_accuracy"]].mean()
        if {"slow", "fixed"} <= set(mean.index):
            pipeline, goal = keys["pipeline"], GOAL_SPEEDUP[keys["pipeline"]]
            gain = mean.loc["slow", "epoch_s"] / mean.loc["fixed", "epoch_s"]
            more = mean.loc["fixed", "validation_accuracy"] - mean.loc["slow", "validation_accuracy"]
            spread = found[found["variant"] == "slow"]["validation_accuracy"].std(ddof=1)
            said.append(
                f"{keys['gpu']}, {NAMES[pipeline]}: an epoch {gain:.1f}× as fast ({reached(gain >= goal)}: at least "
                f"{goal:g}), accuracy {more:+.4f} "
                f"({reached(more >= -spread)}: no lower, within a deviation of the seeds)"
            )
    for pipeline, table in (("vit", vit), ("gpt", gpt)):
        if not len(table):
            continue
        last = [switch.name for switch in PIPELINES[pipeline].switches if not switch.optional][-1]
        ends = table[(table["variant"] == CUMULATIVE) & (table["fix"] == last)]
        for row in ends.dropna(subset="device_idle_share").to_dict("records"):
            idle = row["device_idle_share"]
            said.append(
                f"{row['gpu']}, {NAMES[pipeline]}, all fixes: the device is idle for {idle:.1%} of a step "
                f"({reached(idle < GOAL_IDLE)}: below {GOAL_IDLE:.0%})"
            )
    return said or ["What the fixes bring has not been measured on a GPU yet."]


def growth(cost: pd.DataFrame) -> list[str]:
    """How the time of a step grows with either metric, from the first tenth of the steps to the last."""
    said = []
    for keys, found in groups(cost, ["gpu", "variant"]):
        ordered = found.sort_values("step")["ms"]
        tenth = max(len(ordered) // 10, 1)
        first, last = ordered.iloc[:tenth].median(), ordered.iloc[-tenth:].median()
        said.append(f"{keys['gpu']}, {keys['variant']}: {first:.1f} ms a step at first, {last:.1f} ms at last")
    return said or ["What the metrics cost has not been measured on a GPU yet."]


def _ms(found: pd.DataFrame, variant: str, fix: str) -> float | None:
    """The mean time of an iteration: a loader that delivers in bursts has a median that hides it."""
    return _value(found[(found["variant"] == variant) & (found["fix"] == fix)], "iteration_mean_ms")


def _value(rows: pd.DataFrame, column: str) -> float | None:
    if column not in rows or not rows[column].notna().any():
        return None
    return float(rows[column].iloc[0])


def _ratio(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else before / after
