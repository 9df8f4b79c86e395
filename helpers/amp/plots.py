"""The figures of chapter 1. They draw what was measured; without records there is nothing to draw."""

import pandas as pd
from matplotlib.figure import Figure

from helpers.lab import figures

from .story import RUNS

COLORS = dict(zip(RUNS, ("#000000", "#999999", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00"), strict=True))
FP16_NORMAL, FP16_SMALLEST = -14, -24


def losses(curves: pd.DataFrame) -> Figure:
    """Training loss over the steps, a panel for each task, a line for each precision."""
    tasks = list(dict.fromkeys(curves["task"]))
    figure, axes = figures.new(1, len(tasks), height=3.2, squeeze=False)
    with figures.style():
        for axis, task in zip(axes[0], tasks, strict=True):
            for precision, run in curves[curves["task"] == task].groupby("precision", sort=False):
                axis.plot(run["step"], run["loss"], color=COLORS[precision], label=RUNS[precision])
            axis.set_title(task)
            axis.set_xlabel("step")
            axis.set_yscale("log")
        axes[0][0].set_ylabel("training loss")
        figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


def exponents(found: pd.DataFrame) -> Figure:
    """The share of gradients by exponent, against what fp16 can hold."""
    tasks = list(dict.fromkeys(found["task"]))
    figure, axes = figures.new(1, len(tasks), height=3.0, sharey=True, squeeze=False)
    with figures.style():
        for axis, task in zip(axes[0], tasks, strict=True):
            for kind, color in (("activations", "#0072B2"), ("weights", "#D55E00")):
                rows = found[(found["task"] == task) & (found["kind"] == kind)].dropna(subset="exponent")
                rows = rows.sort_values("exponent")
                axis.step(rows["exponent"], rows["share"], where="mid", color=color, label=f"gradients of {kind}")
            axis.axvspan(-62, FP16_SMALLEST, color="#D55E00", alpha=0.12, label="zero in fp16")
            axis.axvspan(FP16_SMALLEST, FP16_NORMAL, color="#E69F00", alpha=0.15, label="subnormal in fp16")
            axis.set_title(task)
            axis.set_xlabel("exponent of the gradient, base 2")
            axis.set_xlim(-50, 5)
        axes[0][0].set_ylabel("share of all values")
        figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


def scales(curves: pd.DataFrame) -> Figure:
    """The scale over the steps, and where steps were skipped."""
    tasks = list(dict.fromkeys(curves["task"]))
    figure, axes = figures.new(1, len(tasks), height=2.8, squeeze=False)
    with figures.style():
        for axis, task in zip(axes[0], tasks, strict=True):
            for precision in ("static", "dynamic", "torch-scaler"):
                run = curves[(curves["task"] == task) & (curves["precision"] == precision)]
                axis.plot(run["step"], run["scale"], color=COLORS[precision], label=RUNS[precision])
                skipped = run[run["skipped_steps"].diff() > 0]
                axis.plot(skipped["step"], skipped["scale"], "x", color=COLORS[precision])
            axis.set_yscale("log", base=2)
            axis.set_title(task)
            axis.set_xlabel("step (×: a step was skipped)")
        axes[0][0].set_ylabel("scale")
        figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure
