"""The two slow loops: what is found in them, whether promises are kept, where a step's time goes, what fixes gain."""

from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pandas as pd

from ...lab.estimate import EFFECT
from ...lab.records.values import PERCENT, TIMES, Number, derived, judged, lacking, over_runs, pick, share_of, speedup
from ...training import CLOTHES, LANGUAGE
from ...training.switched import Switched

NAMES = {"vit": "ViT", "gpt": "language model"}
MARGIN = 0.05  # of the step: a fix that gains this much more than predicted counts as missed
ALL = "all"  # of the fixes
SAME = 0.03  # without an interval, a fix that changes less has no effect
# Parts of a model, by the types of their modules or by their names.
PARTS = {
    "embedding": {"ReshapedPatches", "ConvPatches", "Embedding", "PositionalEncoding", "RecomputedPositions"},
    "attention": {"attention"},
    "attention's output": {"NonDynamicallyQuantizableLinear"},
    "softmax": {"Softmax"},
    "feed-forward": {"mlp", "linear1", "linear2"},
    "GELU": {"GELU"},
    "normalisation": {"LayerNorm"},
    "head": {"head"},
}
NESTED = ("model", "softmax", "GELU")  # parts that contain others, or lie within one


def diagnose(rows: pd.DataFrame) -> SimpleNamespace:
    """The largest findings of the slow loops, and how many there are in each loop."""
    slow = rows[rows["variant"] == "slow"].sort_values(["pipeline", "rank"], ascending=[False, True])
    first = slow.groupby("pipeline", sort=False).head(5)
    largest = pd.DataFrame(
        {
            "model": first["pipeline"].map(NAMES),
            "finding": first["finding"],
            "source line": first["where"].fillna("").str.split(" in ").str[0].str.split("/").str[-1],
            "gain_ms": first["gain_ms"],
            "gain, % of step": (100 * first["gain_share"]).map("{:.1f}".format),
            "why it is slow": first["evidence"],
        }
    )
    counts = rows.groupby(["pipeline", "variant"])["finding"].agg(lambda names: (names != "nothing").sum())
    of = {key: derived(count, "counted findings", "", 0) for key, count in counts.items()}
    commits = ", ".join(rows["commit"].unique())
    return SimpleNamespace(largest=largest, commit=commits, vit=_by_variant(of, "vit"), gpt=_by_variant(of, "gpt"))


def _by_variant(numbers: dict[tuple[str, str], Number], pipeline: str, unit: str = "") -> SimpleNamespace:
    """The numbers of a pipeline's slow and fixed loop."""
    absent = lacking(f"the {NAMES[pipeline]}'s loops", unit)
    return SimpleNamespace(**{variant: numbers.get((pipeline, variant), absent) for variant in ("slow", "fixed")})


def predicted(rows: pd.DataFrame) -> SimpleNamespace:
    """Predicted and measured gains as shares of a step: of each fix, the errors, and the order in pairs of faults."""
    visible = rows["finding"].fillna("") != ""
    points = rows[visible].assign(pair=rows["faults"].str.contains(" + ", regex=False))
    points = points.assign(miss=points["promised_share"] - points["gained_share"])
    pairs = points[points["pair"]].groupby(["pipeline", "faults"]).filter(lambda pair: len(pair) == 2)
    by_pair = pairs.groupby(["pipeline", "faults"])
    better = pairs.loc[by_pair["gained_share"].idxmax()]
    right = (better["first_finding"] == better["finding"]).to_numpy()
    apart, noise = by_pair["gained_share"].agg(np.ptp), by_pair["noise_share"].agg(lambda both: np.hypot(*both))
    clear = (apart > 2 * noise).to_numpy()
    worst = points.loc[points["miss"].abs().idxmax()]
    hidden = rows[~visible].assign(model=rows["pipeline"].map(NAMES))
    hidden["measured gain, % of step"] = (100 * hidden["gained_share"]).map("{:.1f}".format)
    return SimpleNamespace(
        points=points,
        fixes=counted(len(points)),
        median_error=Number(points["miss"].abs().median(), PERCENT),
        largest_excess=Number(-points["miss"].min(), PERCENT),
        beyond=counted((points["miss"] < -MARGIN).sum()),
        pairs=counted(len(right)),
        pairs_right=counted(right.sum()),
        share_right=share_of(right.sum(), len(right)),
        clear_pairs=counted(clear.sum()),
        clear_right=counted((clear & right).sum()),
        worst=f"{worst['fix']} in the {NAMES[worst['pipeline']]} ({worst['faults']})",
        worst_predicted=Number(worst["promised_share"], PERCENT, decimals=0),
        worst_measured=Number(worst["gained_share"], PERCENT, decimals=0),
        hidden=hidden[["model", "fix", "step_ms", "measured gain, % of step"]],
    )


def counted(number: int) -> Number:
    return derived(number, "counted", "", 0)


def modules(rows: pd.DataFrame) -> SimpleNamespace:
    """Forward and backward of a step by part of the model, and layers against their lower bounds."""
    parts = {key: _parts_of(step) for key, step in rows.groupby(["pipeline", "variant"], sort=False)}
    ratios, outside = {}, {}
    for key, times in parts.items():
        inside, beside = times.loc["model", ["forward_ms", "backward_ms"]], times["outside"].iloc[0]
        ratios[key] = derived(inside["backward_ms"] / inside["forward_ms"], "of the same steps", decimals=1)
        outside[key] = Number(beside / (beside + inside.sum()), PERCENT, decimals=0)
    return SimpleNamespace(
        tables={name: _slow_and_fixed(parts, name) for name in NAMES},
        vit=_by_variant(ratios, "vit", TIMES),
        gpt=_by_variant(ratios, "gpt", TIMES),
        vit_outside=_by_variant(outside, "vit", PERCENT),
        gpt_outside=_by_variant(outside, "gpt", PERCENT),
        least_ratio=min(ratios.values(), key=float),
        largest_ratio=max(ratios.values(), key=float),
        bounds=_against_bounds(rows),
    )


def _parts_of(step: pd.DataFrame) -> pd.DataFrame:
    """Milliseconds of each part of a model, forward and backward; `outside` are those outside of the model."""
    called = step[step["calls"] > 0]
    names = called["module"].str.rpartition(".")[2]
    chosen = {"model": ~called["module"].str.contains(".", regex=False)}
    chosen |= {part: called["type"].isin(of) | names.isin(of) for part, of in PARTS.items()}
    times = {part: called.loc[of, ["forward_ms", "backward_ms"]].sum() for part, of in chosen.items() if of.any()}
    times["rest"] = times["model"] - sum(of for part, of in times.items() if part not in NESTED)
    return pd.DataFrame(times).T.assign(outside=step.loc[step["module"] == "outside", "total_ms"].sum())


def _slow_and_fixed(parts: dict[tuple[str, str], pd.DataFrame], pipeline: str) -> pd.DataFrame:
    columns = []
    for variant in ("slow", "fixed"):
        times = parts.get((pipeline, variant), pd.DataFrame(columns=["forward_ms", "backward_ms"]))
        times = times[["forward_ms", "backward_ms"]].assign(ratio=times["backward_ms"] / times["forward_ms"])
        columns.append(times.add_prefix(f"{variant} "))
    return columns[0].join(columns[1]).rename_axis("part").reset_index()


def _against_bounds(rows: pd.DataFrame) -> pd.DataFrame:
    """Layers by type, of at least `SAME` of a step: their time against their operations' or their bytes'."""
    bounded = rows.dropna(subset="lower_bound_ms").replace({"type": {"NonDynamicallyQuantizableLinear": "Linear"}})
    by = ["pipeline", "variant"]
    sums = bounded.groupby([*by, "type"], sort=False)[["lower_bound_ms", "total_ms"]].sum().reset_index()
    sums = sums[sums["total_ms"] > SAME * sums.groupby(by)["total_ms"].transform("sum")]
    sums = sums.assign(slowdown=sums["total_ms"] / sums["lower_bound_ms"], pipeline=sums["pipeline"].map(NAMES))
    names = {"pipeline": "model", "variant": "loop", "type": "layers", "slowdown": "slowdown against bound"}
    return sums.sort_values(by, ascending=False, kind="stable").rename(columns=names)


def timeline(rows: pd.DataFrame) -> SimpleNamespace:
    """The steps with a fault and without it: whole loops by name, single faults by pipeline and fault."""
    pairs = {key: pair for key, pair in rows.groupby(["pipeline", "fault"]) if pair["variant"].nunique() == 2}
    return SimpleNamespace(
        whole={NAMES[name]: pairs[name, "all"] for name in NAMES if (name, "all") in pairs},
        single={key: pair for key, pair in pairs.items() if key[1] != "all"},
    )


def vit_fixes(rows: pd.DataFrame) -> SimpleNamespace:
    return _fixes(rows, CLOTHES)


def gpt_fixes(rows: pd.DataFrame) -> SimpleNamespace:
    return _fixes(rows, LANGUAGE)


def _fixes(rows: pd.DataFrame, pipeline: Switched) -> SimpleNamespace:
    """Each fix against the slow loop, those with an effect first, the largest before others, and all together."""
    times = rows.assign(median_ms=rows["us_per_target"], baseline_ms=rows["baseline_us_per_target"])
    gains = {row["fix"]: speedup(row) for row in times.to_dict("records")}
    together = gains.pop(ALL, lacking("all fixes together", TIMES))
    alone = dict(sorted(gains.items(), key=lambda item: (judged(item[1], SAME)[0] != EFFECT, -item[1].value)))
    switches = {switch.name: switch for switch in pipeline.switches}
    shown = alone | ({ALL: together} if together.measured else {})
    table = rows.set_index("fix").loc[list(shown), ["baseline_us_per_target", "us_per_target"]]
    table.insert(0, "the slow loop", [switches[name].slow if name in switches else "" for name in shown])
    table.insert(1, "changes", [(name in switches and switches[name].changes) or "" for name in shown])
    table["speedup"] = [f"{gain:bare}" for gain in shown.values()]
    headings = {"baseline_us_per_target": "slow loop, µs", "us_per_target": "fixed, µs"}
    (largest, largest_gain), (second, second_gain) = (*alone.items(), *[("", lacking("a fix", TIMES))] * 2)[:2]
    return SimpleNamespace(
        table=table.rename(columns=headings).reset_index(),
        largest=largest,
        second=second,
        largest_gain=largest_gain,
        second_gain=second_gain,
        together=together,
        alone=defaultdict(lambda: lacking("a fix", TIMES), alone),
        decode_once=alone.get("decode_once", lacking("decode_once", TIMES)),
    )


def whole_runs(rows: pd.DataFrame) -> SimpleNamespace:
    """Trainings of the slow and the fixed loop: time of an epoch, and what was learned over the seeds."""
    groups = rows.groupby(["pipeline", "variant"], sort=False)
    table = groups.agg(
        seeds=("seed", "nunique"),
        epochs=("epochs", "first"),
        epoch_s=("epoch_s", "median"),
        train_loss=("train_loss", "mean"),
        accuracy=("validation_accuracy", "mean"),
        deviation=("validation_accuracy", "std"),
        guess=("constant_accuracy", "mean"),
    ).reset_index()
    names = {"pipeline": "model", "variant": "loop", "deviation": "accuracy, std", "guess": "constant guess"}
    return SimpleNamespace(
        table=table.replace({"pipeline": NAMES}).rename(columns=names),
        data="; ".join(rows["source"].drop_duplicates()),
        vit=_training(rows, table, "vit"),
        gpt=_training(rows, table, "gpt"),
    )


def _training(rows: pd.DataFrame, table: pd.DataFrame, pipeline: str) -> SimpleNamespace:
    loops = [{"pipeline": pipeline, "variant": variant} for variant in ("slow", "fixed")]
    seeds = rows[rows["pipeline"] == pipeline].pivot_table(index="seed", columns="variant", values="epoch_s")
    seeds = seeds.reindex(columns=["slow", "fixed"])
    slow_s, fixed_s = (pick(table, "epoch_s", "s", 1, **loop) for loop in loops)
    slow, fixed = (pick(table, "accuracy", PERCENT, 1, **loop) for loop in loops)
    return SimpleNamespace(
        slow_s=slow_s,
        fixed_s=fixed_s,
        speedup=over_runs(seeds["slow"], seeds["fixed"]),
        points=Number(100 * (fixed.value - slow.value), "points", decimals=1),
    )
