"""How well each precision trains: whole trainings, and loss and scale over their steps."""

import math
from collections.abc import Iterable
from dataclasses import replace
from types import SimpleNamespace

import pandas as pd
import torch
from torch import Tensor

from ... import train as training
from ...book.table import Worth, numbers_of, table
from ...book.values import PERCENT, Number, derived, lacking, mean_of
from ...lab import Row, device
from ...lab.precision import fp16_by_fp32
from ...train import PRECISIONS, Step
from ...training import Task
from .trainings import FULL_RUNS, LONG_RUNS, RUNS, SEEDS, SMALL_RUNS, TASKS, runs, training_setup, zero_share

COLUMNS = """
    validation_accuracy validation_loss constant_accuracy diverged zero_share skipped_steps first_scale growth_interval
    micro_batches steps source training_s curve?
"""
REDUCED_RUNS = [run | {"seed": 0} for run in LONG_RUNS]
REDUCED_RUNS += [run | {"seed": seed} for seed in SEEDS[1:] for run in runs("reduced", PRECISIONS, ["lm"])]
# More seeds for what is claimed: short trainings of the language model differ by seed more than by precision
COMPARED = ("fp32", "amp", "static", "dynamic", "bf16")
REDUCED_RUNS += [run | {"seed": seed} for seed in SEEDS[1:] for run in runs("long", COMPARED, ["segmentation"])]
REDUCED_RUNS += [run | {"seed": 3 + more} for more in SEEDS for run in runs("reduced", COMPARED[:4], ["lm"])]
REDUCED_RUNS.sort(key=lambda run: run["seed"])


@table(
    small=[run | {"seed": 0} for run in SMALL_RUNS],
    cpu=REDUCED_RUNS,
    gpu=REDUCED_RUNS,
    big_gpu=[run | {"seed": seed} for seed in SEEDS for run in FULL_RUNS],
    columns=COLUMNS,
    version=3,
    worth=Worth(
        40,
        "loss and accuracy in each precision, with and without scaling",
        cpu=20,
        gpu=8,
        big_gpu=14,
        headline={"seed": (0,), "task": ("segmentation",), "precision": ("fp32", "amp", "static", "dynamic")},
        on_gpu=7,
    ),
)
def quality(task: str, precision: str, size: str, seed: int) -> Row:
    """A whole training run: validation accuracy and loss after the last epoch, and what happened to its gradients.

    On a CPU the gradients are those of one micro-batch of a step of the full size, which are as small, and products of
    fp16 numbers are computed by fp32 kernels and rounded, as tensor cores do.
    `constant_accuracy` is that of the best constant guess on the validation split. `curve` has the step, loss and scale
    of every few steps of the first seed's.
    """
    setup = training_setup(task, precision, size, seed)
    shares: list[Tensor] = []
    seen: list[tuple[int, Tensor, Tensor]] = []

    def look(step: Step) -> None:
        if step.number % 10 == 0:
            shares.append(zero_share([p.grad for p in step.model.parameters() if p.grad is not None]))
        scale = getattr(step.scaler, "_scale", None)
        scale = step.loss.new_full((), float("nan")) if scale is None else scale.detach().float().clone()
        seen.append((step.number, step.loss.float(), scale))

    with fp16_by_fp32():
        outcome = training.train(setup, on_step=look, progress=False)
    built = training.build_task(setup, device())
    names = ("validation_accuracy", "validation_loss", "skipped_steps", "steps", "source")
    row = {name: outcome[name] for name in names} | {
        "training_s": outcome["seconds"],
        "constant_accuracy": constant_accuracy(built),
        "diverged": "yes" if outcome["diverged"] else "no",
        "zero_share": float(torch.stack(shares).mean()),
        "first_scale": float(seen[0][2]),
        "growth_interval": setup.growth_interval,
        "micro_batches": built.micro_batches,
    }
    every = max(len(seen) // 80, 1)
    points = [point for point in seen if point[0] % every == 0 or point is seen[-1]]
    curve = ";".join(f"{number}:{float(loss):.6g}:{float(scale):.6g}" for number, loss, scale in points)
    return row | ({"curve": curve} if seed == 0 else {})


def constant_accuracy(task: Task) -> float:
    """The validation accuracy of the constant guess that is right most often in training. Padding doesn't count."""

    def counts(batches: Iterable) -> Tensor:
        targets = torch.cat([batch.targets.flatten() for batch in batches]).long()
        by_class = torch.bincount(targets, minlength=2**16)
        by_class[getattr(task.validation_metric, "pad_id", -1)] = 0
        return by_class

    validation = counts(task.validation())
    return float(validation[counts(task.batches(0)).argmax()] / validation.sum())


# Numbers


@quality.numbers()
def _(rows: pd.DataFrame) -> SimpleNamespace:
    """How each precision trains each task, and the scales that the scalers start with."""
    scales = rows.groupby("precision")["first_scale"].max()
    return SimpleNamespace(
        **{name: _task(name, rows[rows["task"] == name]) for name in TASKS},
        static_scale=_count(scales.get("static")),
        dynamic_scale=_count(scales.get("dynamic")),
    )


def _task(name: str, rows: pd.DataFrame) -> SimpleNamespace:
    """A task's table; by precision the accuracy, its difference to fp32's in points, and the steps skipped."""
    trained = rows[rows["diverged"] != "yes"]
    accuracy = trained.pivot(index="seed", columns="precision", values="validation_accuracy").reindex(columns=RUNS)
    guess = rows.groupby("seed")["constant_accuracy"].first()
    first = rows.iloc[0] if len(rows) else pd.Series(index=rows.columns, dtype=object)
    by_run = trained.groupby("precision")
    zero_share, skipped = by_run["zero_share"].mean(), by_run["skipped_steps"].mean()
    seconds = by_run["training_s"].median()  # one of a few may have run beside others
    present = [run for run in RUNS if run in set(rows["precision"])]
    return SimpleNamespace(
        table=pd.DataFrame([_training(rows[rows["precision"] == run], accuracy) for run in present]),
        steps=_count(first["steps"]),
        growth_interval=_count(first["growth_interval"]),
        seeds=_count(rows["seed"].nunique()),
        micro_batches=_count(first["micro_batches"]),
        source=first["source"],
        guess=_mean(guess, TASKS[name]),
        scaled=replace(mean_of(accuracy[["static", "dynamic"]].mean(axis=1), "", "both scales"), decimals=4),
        lowest=Number(accuracy[["static", "dynamic"]].min().min(), decimals=4, missing="both scales"),
        seconds={run: Number(seconds.get(run, float("nan")), "s", decimals=0, missing=RUNS[run]) for run in RUNS},
        accuracy={run: _mean(accuracy[run], f"{TASKS[name]}, {RUNS[run]}") for run in RUNS},
        points={run: mean_of(100 * (accuracy[run] - accuracy["fp32"]), "points", RUNS[run]) for run in RUNS},
        scalers_apart=mean_of(100 * (accuracy["dynamic"] - accuracy["torch-scaler"]), "points", RUNS["torch-scaler"]),
        over_guess=mean_of(100 * (accuracy["amp"] - guess), "points", RUNS["amp"]),
        skipped={run: Number(skipped.get(run, float("nan")), decimals=0, missing=RUNS[run]) for run in RUNS},
        highest=_count(_highest(rows[rows["precision"] == "dynamic"])),
        lost=Number(zero_share.get("amp", float("nan")), PERCENT, decimals=1, missing=RUNS["amp"]),
    )


def _highest(rows: pd.DataFrame) -> float:
    """The largest scale of the trainings whose curves are recorded, as the power of two that it is."""
    curves = rows["curve"].dropna() if "curve" in rows else []
    scales = [float(point.split(":")[2]) for curve in curves for point in curve.split(";") if point]
    return round(math.log2(max(scales))) if scales else math.nan


def _training(rows: pd.DataFrame, accuracy: pd.DataFrame) -> dict:
    """A row of a task's table: means over the seeds, of the trainings that did not diverge."""
    run = rows["precision"].iloc[0]
    trained = rows[rows["diverged"] != "yes"]
    points = 100 * (accuracy[run] - accuracy["fp32"]).mean()  # of the seeds that both have
    return {
        "training": RUNS[run],
        "accuracy": _spread(trained["validation_accuracy"]),
        "points against fp32": f"{round(points, 2) + 0.0:+.2f}" if points == points else "–",
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


@numbers_of([quality])
def curves(rows: pd.DataFrame) -> SimpleNamespace:
    """Loss and scale by step: task → precision → rows, where the loss stays finite for half of the steps."""
    tasks: dict[str, dict[str, pd.DataFrame]] = {}
    for row in rows[rows["curve"].fillna("") != ""].to_dict("records"):
        points = [map(float, point.split(":")) for point in row["curve"].split(";")]
        line = pd.DataFrame(points, columns=["step", "loss", "scale"])
        if line["loss"].notna().mean() >= 0.5:
            tasks.setdefault(row["task"], {})[row["precision"]] = line
    return SimpleNamespace(tasks=tasks)
