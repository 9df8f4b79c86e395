"""The tables and sentences of chapter 1, made from the records."""

import pandas as pd

from helpers.lab.tables import reached

RUNS = {
    "fp32": "fp32",
    "fp16": "pure fp16",
    "amp": "AMP fp16, no scaler",
    "static": "AMP fp16, static scale",
    "dynamic": "AMP fp16, dynamic scale",
    "torch-scaler": "AMP fp16, torch's scaler",
    "bf16": "AMP bf16",
}
GOAL_ACCURACY = 0.985
GOAL_SPEEDUP, GOAL_OVERHEAD, GOAL_AUTOCAST = 1.3, 1.02, 1.02


def quality(plan: pd.DataFrame) -> pd.DataFrame:
    """A row for each task and precision: mean ± standard deviation over the seeds, and how many diverged."""
    rows = []
    for (task, precision), runs in plan.groupby(["task", "precision"], sort=False):
        for gpu, found in runs.groupby("gpu", dropna=False) if "gpu" in runs else [(None, runs)]:
            rows.append(
                {
                    "gpu": gpu,
                    "task": task,
                    "training": RUNS[precision],
                    "seeds": int((found["status"] == "ok").sum()),
                    "validation accuracy": _spread(found, "validation_accuracy"),
                    "validation loss": _spread(found, "validation_loss"),
                    "diverged": int((found["diverged"] == "yes").sum()) if "diverged" in found else None,
                    "zero gradients": _mean(found, "zero_share"),
                    "steps skipped": _mean(found, "skipped_steps"),
                    "status": ", ".join(sorted(set(found["status"]))),
                }
            )
    return pd.DataFrame(rows)


def quality_verdicts(measured: pd.DataFrame) -> list[str]:
    """What the chapter aims at in quality, held against the runs."""
    if not len(measured):
        return ["How well each precision trains has not been measured on a GPU yet."]
    said = []
    for gpu, runs in measured.groupby("gpu", sort=False):
        cars = runs[runs["task"] == "segmentation"]
        accuracy = cars.groupby("precision")["validation_accuracy"]
        lowest, mean = accuracy.min(), accuracy.mean()
        for precision in ("static", "dynamic"):
            if precision in lowest:
                met = reached(lowest[precision] >= GOAL_ACCURACY)
                said.append(
                    f"{gpu}: segmentation with a {precision} scale, lowest of all seeds: "
                    f"{lowest[precision]:.4f} (at least {GOAL_ACCURACY}: {met})"
                )
        if {"amp", "dynamic"} <= set(mean.index):
            less = mean["dynamic"] - mean["amp"]
            said.append(f"{gpu}: without a scaler, AMP is {less:.4f} below the dynamic scale, on the mean")
        if {"static", "dynamic"} <= set(mean.index):
            more = mean["dynamic"] - mean["static"]
            said.append(f"{gpu}: the dynamic scale is {more:+.4f} from the static one, on the mean")
        diverged = sorted(set(runs[runs["diverged"] == "yes"]["precision"]))
        said.append(f"{gpu}: diverged at least once: {', '.join(RUNS[p] for p in diverged) or 'none'}")
    return said


def against_fp32(measured: pd.DataFrame) -> list[str]:
    """How far from fp32 each kind of scaling ends, on the mean over the seeds that it shares with fp32."""
    if not len(measured):
        return ["Not measured yet."]
    said = []
    for gpu, runs in measured[measured["task"] == "segmentation"].groupby("gpu", sort=False):
        accuracy = runs.pivot(index="seed", columns="precision", values="validation_accuracy")
        for precision in [name for name in RUNS if name in accuracy and name != "fp32" and "fp32" in accuracy]:
            apart = (accuracy[precision] - accuracy["fp32"]).dropna()
            if len(apart):
                lost = runs[runs["precision"] == precision]["zero_share"].mean()
                said.append(
                    f"{gpu}: {RUNS[precision]}, {apart.mean():+.4f} in accuracy against fp32 "
                    f"(seeds: {len(apart)}), {lost:.1%} of the gradients zero"
                )
    return said


def step_verdicts(steps: pd.DataFrame, autocast: pd.DataFrame) -> list[str]:
    """What the chapter aims at in speed, held against the records."""
    if not len(steps) and not len(autocast):
        return ["What scaling and autocast cost has not been measured on a GPU yet."]
    said = []
    for row in steps[steps["variant"] == "ours"].to_dict("records") if len(steps) else []:
        faster = 1 / row["ratio_to_torch"]
        said.append(
            f"{row['gpu']}, {row['million_parameters']} M parameters: unscale, clip and step {faster:.2f}× as fast as "
            f"torch's ({reached(faster >= GOAL_SPEEDUP)}: at least {GOAL_SPEEDUP}), "
            f"{row['ratio_to_no_scaler']:.3f} of the step without a scaler "
            f"({reached(row['ratio_to_no_scaler'] <= GOAL_OVERHEAD)}: at most {GOAL_OVERHEAD}), "
            f"{int(row['host_reads'])} waits for the GPU"
        )
    for row in autocast[autocast["variant"] == "ours"].to_dict("records") if len(autocast) else []:
        said.append(
            f"{row['gpu']}, width {row['hidden']}: a step under our Autocast takes {row['ratio_to_torch']:.3f} of one "
            f"under torch's ({reached(row['ratio_to_torch'] <= GOAL_AUTOCAST)}: at most {GOAL_AUTOCAST})"
        )
    return said


def lost(exponents: pd.DataFrame) -> pd.DataFrame:
    """Of each task's gradients, the share below fp16's normal numbers, and below its smallest one."""
    rows = []
    for (task, kind), found in exponents.groupby(["task", "kind"], sort=False):
        present = found.dropna(subset="exponent")
        total = present["share"].sum()
        for name, below in (("below 2^-14, subnormal in fp16", -14), ("below 2^-25, zero in fp16", -25)):
            share = present.loc[present["exponent"] < below, "share"].sum() / total
            rows.append({"task": task, "gradients of": kind, "range": name, "share": share})
    return pd.DataFrame(rows)


def _spread(found: pd.DataFrame, column: str) -> str | None:
    if column not in found or not found[column].notna().any():
        return None
    mean, spread = found[column].mean(), found[column].std(ddof=1)
    return f"{mean:.4f}" + (f" ± {spread:.4f}" if spread == spread else "")


def _mean(found: pd.DataFrame, column: str) -> float | None:
    return found[column].mean() if column in found and found[column].notna().any() else None
