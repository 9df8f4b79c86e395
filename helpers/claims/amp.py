"""Chapter 1: which gradients underflow, how well each precision trains, and what scaling and casting cost."""

from types import SimpleNamespace

import pandas as pd

from helpers.experiments.amp import FP32_KERNELS, TORCHS_KERNELS
from helpers.lab.values import PERCENT, TIMES, Number, derived, lacking, number, over, pick

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
SUBNORMAL, ZERO = -14, -25  # binary exponents below which fp16 rounds to subnormals, and to zero
SCORED = ("amp", "static", "dynamic", "bf16")


def exponents(rows: pd.DataFrame) -> SimpleNamespace:
    """The distribution of gradients by task and kind, and the shares that fp16 loses."""
    lost = []
    for (task, kind), of_kind in rows.dropna(subset="exponent").groupby(["task", "kind"], sort=False):
        shares = {
            name: of_kind.loc[of_kind["exponent"] < limit, "share"].sum() / of_kind["share"].sum()
            for name, limit in (("below 2⁻¹⁴", SUBNORMAL), ("below 2⁻²⁵", ZERO))
        }
        lost.append({"task": TASKS[task], "gradients of": kind} | shares)
    return SimpleNamespace(panels=_by_task(rows.dropna(subset="exponent")), lost=pd.DataFrame(lost))


def _by_task(rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    return {TASKS[task]: of_task for task, of_task in rows.groupby("task", sort=False)}


def zeros(rows: pd.DataFrame) -> SimpleNamespace:
    """The share of zero weight gradients by precision: of all weights, and the range over layers."""
    wide = {name: {"training": RUNS[name]} for name in RUNS if name in set(rows["precision"])}
    for (task, precision), of_run in rows.groupby(["task", "precision"], sort=False):
        share, weights = of_run["zero_share"], of_run["weights"]
        finite = share.notna().all()
        wide[precision][f"{TASKS[task]}, all"] = (share * weights).sum() / weights.sum() if finite else None
        wide[precision][f"{TASKS[task]}, by layer"] = f"{share.min():.2g} – {share.max():.2g}" if finite else None
    return SimpleNamespace(
        table=pd.DataFrame(list(wide.values())), step=derived(rows["step"].max(), "a setting", "", 0)
    )


def quality(rows: pd.DataFrame) -> SimpleNamespace:
    """Accuracy, loss and zero gradients of each precision, and its difference from fp32."""
    scales = rows.groupby("precision")["first_scale"].max()
    divided = rows.groupby("task")["micro_batches"].first()
    guess = rows[rows["task"] == "segmentation"]["constant_accuracy"].max()
    accuracy = {name: _accuracy(rows, name) for name in ("fp32", *SCORED)}
    return SimpleNamespace(
        tables={name: _scores(of_task) for name, of_task in _by_task(rows).items()},
        jobs={name: _job(of_task) for name, of_task in _by_task(rows).items()},
        segmentation=_against_fp32(rows, "segmentation"),
        lm=_against_fp32(rows, "lm"),
        segmentation_divided=derived(divided.get("segmentation", float("nan")), "a setting", "", 0),
        lm_divided=derived(divided.get("lm", float("nan")), "a setting", "", 0),
        static_scale=derived(scales.get("static", float("nan")), "a setting", "", 0),
        dynamic_scale=derived(scales.get("dynamic", float("nan")), "a setting", "", 0),
        growth_interval=derived(rows["growth_interval"].max(), "a setting", "", 0),
        fp32=accuracy["fp32"],
        unscaled=accuracy["amp"],
        static=accuracy["static"],
        dynamic=accuracy["dynamic"],
        guess=Number(guess, PERCENT),
        steps=derived(rows[rows["task"] == "segmentation"]["steps"].max(), "a setting", "steps", 0),
        zero_gradients=_mean(rows, "zero_share", "amp"),
    )


def _mean(rows: pd.DataFrame, column: str, precision: str, task: str = "segmentation") -> Number:
    chosen = rows[(rows["task"] == task) & (rows["precision"] == precision)][column]
    return Number(chosen.mean(), PERCENT, missing=f"{RUNS[precision]}, {TASKS[task]}")


def _accuracy(rows: pd.DataFrame, precision: str) -> Number:
    return _mean(rows, "validation_accuracy", precision)


def _job(of_task: pd.DataFrame) -> str:
    one = of_task.iloc[0]
    seeds = of_task["seed"].nunique()
    return f"{one['steps']:.0f} steps, {seeds} seeds, {one['source']}. Constant guess: {one['constant_accuracy']:.3f}"


def _scores(of_task: pd.DataFrame) -> pd.DataFrame:
    """A line a precision: means over the seeds that didn't diverge."""
    trained = of_task[of_task["diverged"] != "yes"]
    mean = trained.groupby("precision")["validation_accuracy"].mean()
    lines = []
    for precision in [name for name in RUNS if name in set(of_task["precision"])]:
        finite, total = trained[trained["precision"] == precision], (of_task["precision"] == precision).sum()
        points = 100 * (mean.get(precision, float("nan")) - mean.get("fp32", float("nan")))
        lines.append(
            {
                "training": RUNS[precision],
                "accuracy": _spread(finite["validation_accuracy"]),
                "points against fp32": f"{points:+.2f}" if points == points else "–",
                "loss": _spread(finite["validation_loss"]),
                "zero gradients": finite["zero_share"].mean(),
                "steps skipped": finite["skipped_steps"].mean(),
                "diverged": f"{total - len(finite)} of {total}",
            }
        )
    return pd.DataFrame(lines)


def _spread(values: pd.Series) -> str:
    deviation = f" ± {values.std():.4f}" if len(values) > 1 else ""
    return f"{values.mean():.4f}{deviation}" if len(values) else "–"


def _against_fp32(rows: pd.DataFrame, task: str) -> SimpleNamespace:
    """Points of accuracy from fp32, and the largest deviation over the seeds of one precision."""
    by = rows[rows["task"] == task].pivot(index="seed", columns="precision", values="validation_accuracy")
    by = by.reindex(columns=["fp32", *SCORED])
    points = {name: Number(100 * (by[name].mean() - by["fp32"].mean()), "points", decimals=1) for name in SCORED}
    points = {name: value if value.measured else lacking(RUNS[name], "points") for name, value in points.items()}
    furthest = max((points[name] for name in ("static", "dynamic", "bf16")), key=lambda value: abs(float(value)))
    noise = Number(100 * by[["fp32", "static", "dynamic"]].std().max(), "points", decimals=1, missing="seeds")
    return SimpleNamespace(**points, noise=noise, furthest=Number(abs(float(furthest)), "points", decimals=1))


def curves(rows: pd.DataFrame) -> SimpleNamespace:
    """Loss and scale by step of the runs that didn't diverge; the names of those that did."""
    finite = rows.groupby("precision")["loss"].apply(lambda loss: loss.notna().mean())
    diverged = [name for name in RUNS if finite.get(name, 1.0) < 0.5]
    shown = rows[~rows["precision"].isin(diverged)]
    return SimpleNamespace(panels=_by_task(shown), diverged=", ".join(RUNS[name] for name in diverged) or "none")


def gradient_time(rows: pd.DataFrame) -> SimpleNamespace:
    """Forward and backward of one batch by precision, and what torch's own fp16 kernels cost."""
    own = rows["kernels"].eq(TORCHS_KERNELS) & ~rows["precision"].isin(["fp32", "bf16"])
    mixed = rows["kernels"].nunique() > 1
    wide: dict[str, dict] = {}
    for row in rows.assign(own=own & mixed).itertuples():
        training, task = RUNS[row.precision] + (", torch's kernels" if row.own else ""), TASKS[row.task]
        cells = wide.setdefault(training, {"training": training})
        cells[f"{task}, ms"] = f"{number(row.median_ms)} ({number(row.p20_ms)} – {number(row.p80_ms)})"
        cells[f"{task}, GiB"] = row.peak_gib
    torchs = rows[(rows["kernels"] != FP32_KERNELS) & (rows["task"] == "segmentation")]

    def ms(precision: str) -> Number:
        return pick(torchs, "median_ms", "ms", precision=precision)

    return SimpleNamespace(
        table=pd.DataFrame(list(wide.values())), fp16=over(ms("dynamic"), ms("fp32")), bf16=over(ms("bf16"), ms("fp32"))
    )


def scaler_step(rows: pd.DataFrame) -> SimpleNamespace:
    """Unscale, clip and step: ours against torch's scaler and against a clipped step without scaling."""
    largest = rows[rows["million_parameters"] == rows["million_parameters"].max()]
    names = ["million_parameters", "variant", "median_ms", "p20_ms", "p80_ms", "ratio_to_torch", "ratio_to_no_scaler"]
    ours, torchs, none = (
        pick(largest, "median_ms", "ms", 1, variant=name) for name in ("ours", "torch.amp.GradScaler", "no scaler")
    )
    return SimpleNamespace(
        table=rows[[*names, "host_reads"]],
        ours_ms=ours,
        torch_ms=torchs,
        speedup=over(torchs, ours),
        over_torch=over(ours, torchs),
        over_none=over(ours, none),
        predicted_to_torch=derived(36 / 48, "36 bytes for 48"),
        predicted_to_none=derived(36 / 40, "36 bytes for 40"),
    )


def autocast_overhead(rows: pd.DataFrame) -> SimpleNamespace:
    """A step under the library's autocast against torch's; `ratio` is the largest of the sizes."""
    names = ["hidden", "layers", "batch", "variant", "median_ms", "p20_ms", "p80_ms", "ratio_to_torch"]
    ours = rows[rows["variant"] == "ours"]["ratio_to_torch"]
    return SimpleNamespace(
        table=rows[names], dtype=rows["dtype"].iloc[0], ratio=Number(ours.max(), TIMES, missing="ours", decimals=2)
    )
