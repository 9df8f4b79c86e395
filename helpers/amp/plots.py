"""The figures of chapter 1. They draw what was measured; without records there is nothing to draw."""

import pandas as pd
from matplotlib.figure import Figure

from helpers.lab import figures

from .story import RUNS

COLORS = dict(zip(RUNS, ("#000000", "#999999", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00"), strict=True))


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
