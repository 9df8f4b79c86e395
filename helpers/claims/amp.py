"""Chapter 1: which gradients fp16 loses, how well each precision trains, and what loss scaling and autocast cost."""

from dataclasses import replace
from types import SimpleNamespace

import pandas as pd

from ..experiments.amp.gradients import TORCHS_KERNELS
from ..experiments.amp.overheads import TORCHS
from ..lab.records.values import (
    PERCENT,
    TIMES,
    Number,
    derived,
    lacking,
    marked,
    mean_of,
    number,
    of_kernels,
    over,
    pick,
    timed,
)

TASKS = {"segmentation": "segmentation", "lm": "language model"}
RUNS = {
    "fp32": "fp32",
    "fp16": "pure fp16",
    "amp": "AMP, no scaler",
    "static": "AMP, static scale",
    "dynamic": "AMP, dynamic scale",
    "torch-scaler": "AMP, torch's scaler",
    "bf16": "AMP, bf16",
}
OURS = "ours"
LIMITS = {"below 2⁻¹⁴": -14, "below 2⁻²⁵": -25}  # fp16's smallest normal number; what it rounds to zero
TIMED = ["variant", "median_ms", "p20_ms", "p80_ms", "ratio_to_torch"]


def exponents(rows: pd.DataFrame) -> SimpleNamespace:
    """Shares of nonzero gradients by exponent: task → kind → rows; and the shares below fp16's limits.

    `zeroed` is the share of each task's activation gradients that fp16 rounds to zero.
    """
    tasks: dict[str, dict[str, pd.DataFrame]] = {}
    lost = []
    for (task, kind), part in rows.dropna(subset="exponent").groupby(["task", "kind"], sort=False):
        tasks.setdefault(task, {})[kind] = part
        share, exponent = part["share"], part["exponent"]
        shares = {name: share[exponent < limit].sum() / share.sum() for name, limit in LIMITS.items()}
        lost.append({"task": TASKS[task], "gradients of": kind} | shares)
    table = pd.DataFrame(lost, columns=["task", "gradients of", *LIMITS])
    activations = table[table["gradients of"] == "activations"]
    zeroed = {task: pick(activations, "below 2⁻²⁵", PERCENT, 0, task=name) for task, name in TASKS.items()}
    return SimpleNamespace(tasks=tasks, lost=table, zeroed=zeroed)


def zeros(rows: pd.DataFrame) -> SimpleNamespace:
    """The share of zero weight gradients by training, of all weights and over layers; none if some aren't finite."""
    cells: dict[str, dict] = {name: {"training": RUNS[name]} for name in RUNS if name in set(rows["precision"])}
    for (task, precision), layers in rows.groupby(["task", "precision"], sort=False):
        share, weights = layers["zero_share"], layers["weights"]
        finite = not share.isna().any()
        cells[precision][f"{TASKS[task]}, all"] = (share * weights).sum() / weights.sum() if finite else None
        cells[precision][f"{TASKS[task]}, by layer"] = f"{share.min():.2g} – {share.max():.2g}" if finite else None
    return SimpleNamespace(table=pd.DataFrame(list(cells.values())), step=_count(rows["step"].max()))


def quality(rows: pd.DataFrame) -> SimpleNamespace:
    """How each precision trains each task, and the scales that the scalers start with."""
    scales = rows.groupby("precision")["first_scale"].max()
    return SimpleNamespace(
        **{name: _task(name, rows[rows["task"] == name]) for name in TASKS},
        static_scale=_count(scales.get("static")),
        dynamic_scale=_count(scales.get("dynamic")),
        growth_interval=_count(rows["growth_interval"].max()),
    )


def _task(name: str, rows: pd.DataFrame) -> SimpleNamespace:
    """A task's table; by precision the accuracy, its difference to fp32's in points, and the steps skipped."""
    trained = rows[rows["diverged"] != "yes"]
    accuracy = trained.pivot(index="seed", columns="precision", values="validation_accuracy").reindex(columns=RUNS)
    guess = rows.groupby("seed")["constant_accuracy"].first()
    first = rows.iloc[0] if len(rows) else pd.Series(index=rows.columns, dtype=object)
    columns = ("zero_share", "skipped_steps", "training_s")
    zero_share, skipped, seconds = (trained.groupby("precision")[name].mean() for name in columns)
    present = [run for run in RUNS if run in set(rows["precision"])]
    return SimpleNamespace(
        table=pd.DataFrame([_training(rows[rows["precision"] == run], accuracy) for run in present]),
        steps=_count(first["steps"]),
        seeds=_count(rows["seed"].nunique()),
        micro_batches=_count(first["micro_batches"]),
        source=first["source"],
        guess=_mean(guess, TASKS[name]),
        scaled=replace(mean_of(pd.concat([accuracy["static"], accuracy["dynamic"]]), "", "both scales"), decimals=4),
        lowest=Number(accuracy[["static", "dynamic"]].min().min(), decimals=4, missing="both scales"),
        seconds={run: Number(seconds.get(run, float("nan")), "s", decimals=0, missing=RUNS[run]) for run in RUNS},
        accuracy={run: _mean(accuracy[run], f"{TASKS[name]}, {RUNS[run]}") for run in RUNS},
        points={run: mean_of(100 * (accuracy[run] - accuracy["fp32"]), "points", RUNS[run]) for run in RUNS},
        over_guess=mean_of(100 * (accuracy["amp"] - guess), "points", RUNS["amp"]),
        skipped={run: Number(skipped.get(run, float("nan")), decimals=0, missing=RUNS[run]) for run in RUNS},
        lost=Number(zero_share.get("amp", float("nan")), PERCENT, decimals=0, missing=RUNS["amp"]),
    )


def _training(rows: pd.DataFrame, accuracy: pd.DataFrame) -> dict:
    """A row of a task's table: means over the seeds, of the trainings that did not diverge."""
    run = rows["precision"].iloc[0]
    trained = rows[rows["diverged"] != "yes"]
    points = 100 * (accuracy[run].mean() - accuracy["fp32"].mean())
    return {
        "training": RUNS[run],
        "accuracy": _spread(trained["validation_accuracy"]),
        "points against fp32": f"{points:+.2f}" if points == points else "–",
        "loss": _spread(trained["validation_loss"]),
        "zero gradients": trained["zero_share"].mean(),
        "steps skipped": trained["skipped_steps"].mean(),
        "diverged": f"{len(rows) - len(trained)} of {len(rows)}",
    }


def _spread(values: pd.Series) -> str:
    deviation = f" ± {values.std():.4f}" if len(values) > 1 else ""
    return f"{values.mean():.4f}{deviation}" if len(values) else "–"


def _mean(values: pd.Series, missing: str) -> Number:
    return Number(values.mean(), decimals=3, missing=missing)


def _count(value: float | None) -> Number:
    missing = value is None or pd.isna(value)
    return lacking("trainings") if missing else derived(value, "counted", "", 0)


def curves(rows: pd.DataFrame) -> SimpleNamespace:
    """Loss and scale by step: task → precision → rows, where the loss stays finite for half of the steps."""
    tasks: dict[str, dict[str, pd.DataFrame]] = {}
    for (task, precision), line in rows.groupby(["task", "precision"], sort=False):
        if line["loss"].notna().mean() >= 0.5:
            tasks.setdefault(task, {})[precision] = line
    return SimpleNamespace(tasks=tasks)


def gradient_time(rows: pd.DataFrame) -> SimpleNamespace:
    """Time and memory of a gradient by training; what 16 bits take by torch's own kernels, against fp32."""
    fp16, by_torch = ~rows["precision"].isin(["fp32", "bf16"]), rows["kernels"] == TORCHS_KERNELS
    named = fp16 & by_torch & (rows["kernels"].nunique() > 1)
    cells: dict[str, dict] = {}
    for row in rows.assign(named=named).to_dict("records"):
        training = RUNS[row["precision"]] + (", torch's kernels" if row["named"] else "")
        columns = cells.setdefault(training, {"training": training})
        middle, low, high = number(marked(row["median_ms"], row)), number(row["p20_ms"]), number(row["p80_ms"])
        columns[f"{TASKS[row['task']]}, ms"] = f"{middle} ({low} – {high})"
        columns[f"{TASKS[row['task']]}, GiB"] = row["peak_gib"]
    pictures = rows[by_torch & (rows["task"] == "segmentation")]
    fp32, dynamic, bf16 = (pick(pictures, "median_ms", "ms", precision=run) for run in ("fp32", "dynamic", "bf16"))
    return SimpleNamespace(table=pd.DataFrame(list(cells.values())), fp16=over(dynamic, fp32), bf16=over(bf16, fp32))


def scaler_step(rows: pd.DataFrame) -> SimpleNamespace:
    """A scaled step of each variant, and ours against torch's scaler and against none, for most parameters."""
    sizes = rows["million_parameters"].unique()
    table = timed(rows, ["million_parameters", *TIMED, "ratio_to_no_scaler", "host_reads"])
    ours = rows[(rows["variant"] == OURS) & (rows["million_parameters"] == max(sizes))]
    largest = rows[(rows["million_parameters"] == max(sizes)) & rows["variant"].isin([OURS, TORCHS])]
    name = "a step of scaler and AdamW"
    over_torch = of_kernels(_ratio(ours, "ratio_to_torch"), name, *largest.to_dict("records"))
    return SimpleNamespace(
        table=table if len(sizes) > 1 else table.drop(columns="million_parameters"),
        sizes=", ".join(map(str, sizes)),
        over_torch=over_torch,
        over_none=_ratio(ours, "ratio_to_no_scaler"),
        speedup=_inverse(over_torch),
        predicted_over_torch=derived(36 / 48, "bytes moved"),
        predicted_over_none=derived(36 / 40, "bytes moved"),
    )


def autocast_overhead(rows: pd.DataFrame) -> SimpleNamespace:
    """A step under each autocast; the largest ratio of ours to torch's over the sizes."""
    ours = rows[rows["variant"] == OURS]
    return SimpleNamespace(
        table=timed(rows, ["hidden", "layers", "batch", *TIMED]),
        dtype=rows["dtype"].iloc[0],
        ratio=_ratio(ours.nlargest(1, "ratio_to_torch"), "ratio_to_torch"),
    )


def _ratio(row: pd.DataFrame, column: str) -> Number:
    """A ratio of the only row, with its interval where it was recorded."""
    ratio, low, high, pairs = (pick(row, column + end, TIMES) for end in ("", "_low", "_high", "_pairs"))
    return replace(ratio, low=low.value, high=high.value, n=int(pairs.value)) if low.measured else ratio


def _inverse(ratio: Number) -> Number:
    if ratio.low is None:
        return over(derived(1, "one"), ratio)
    return Number(1 / ratio.value, TIMES, 1 / ratio.high, 1 / ratio.low, ratio.n)
