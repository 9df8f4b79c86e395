"""The figures of chapter 6."""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from helpers.lab import figures
from helpers.lab.figures import BLUE, GREEN, GREY, ORANGE, PURPLE, YELLOW

FORMATS = {
    "files": GREY,
    "webdataset": ORANGE,
    "webdataset by index": YELLOW,
    "tfrecord": GREEN,
    "mapped": BLUE,
    "ffcv": PURPLE,
}
SELECTIONS = {"least forgotten": BLUE, "random": GREY, "most forgotten": ORANGE}
PALETTE = (GREY, ORANGE, BLUE, GREEN, PURPLE, YELLOW)


def formats(measured: pd.DataFrame) -> Figure:
    """Samples a second against workers: a row of panels for each kind of data, one for each order and cache."""
    kinds = list(dict.fromkeys(measured["kind"]))
    cases = [("sequential", "cold"), ("random", "warm")]
    figure, axes = figures.new(len(kinds), len(cases), height=0.4 + 2.1 * len(kinds), sharex=True, squeeze=False)
    with figures.style():
        for line, kind in zip(axes, kinds, strict=True):
            for axis, (order, cache) in zip(line, cases, strict=True):
                _format_panel(axis, measured[(measured["kind"] == kind) & (measured["order"] == order)], cache)
                axis.set_title(f"{kind.removesuffix('s')}s, {order}, {cache}")
            line[0].set_ylabel("samples a second")
        for axis in axes[-1]:
            axis.set_xlabel("workers")
        figure.legend(*axes[0][-1].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def _format_panel(axis, rows: pd.DataFrame, cache: str) -> None:
    for format, color in FORMATS.items():
        found = rows[(rows["format"] == format) & (rows["cached"] == cache)].sort_values("workers")
        if len(found):
            speed = found["samples_per_s"]
            low, high = speed - found["samples_per_s_p20"], found["samples_per_s_p80"] - speed
            axis.errorbar(range(len(found)), speed, [low, high], fmt="o-", color=color, label=format, markersize=3)
            axis.set_xticks(range(len(found)), [f"{workers:.0f}" for workers in found["workers"]])
    axis.set_yscale("log")


def loader(measured: pd.DataFrame) -> Figure:
    """The share of time in which the device idles against the number of workers: measured, and predicted."""
    steps = sorted(measured["step_ms"].unique())
    figure, axis = figures.new(height=2.8)
    with figures.style():
        for color, step_ms in zip((BLUE, ORANGE, GREEN), steps, strict=False):
            rows = measured[measured["step_ms"] == step_ms].sort_values("workers")
            places = range(len(rows))
            axis.plot(places, rows["idle_share"], "o-", color=color, label=f"a step of {step_ms:g} ms")
            axis.plot(places, rows["predicted_idle_share"], "--", color=color, label="predicted")
            axis.set_xticks(places, [f"{workers:.0f}" for workers in rows["workers"]])
        axis.set_ylim(0, 1)
        axis.set_xlabel("workers")
        axis.set_ylabel("the device is idle")
        axis.legend()
    return figure


def metrics(measured: pd.DataFrame) -> Figure:
    """Milliseconds of a metric at each step of an epoch."""
    figure, axis = figures.new(height=2.8)
    with figures.style():
        for color, (variant, rows) in zip(PALETTE, measured.groupby("variant", sort=False), strict=False):
            axis.plot(rows["step"], rows["ms"], color=color, label=variant)
        axis.set_yscale("log")
        axis.set_xlabel("step of the epoch")
        axis.set_ylabel("the metric, ms")
        axis.legend(ncols=2, fontsize=6)
    return figure


def choice(told: pd.DataFrame) -> Figure:
    """Points of accuracy lost against the share of samples left out, mean and standard error over the seeds."""
    told = told[told["budget"] == "epochs"]
    names = list(dict.fromkeys(told["data"]))
    figure, axes = figures.new(1, len(names), height=2.7, squeeze=False)
    with figures.style():
        for axis, name in zip(axes[0], names, strict=True):
            for variant, color in SELECTIONS.items():
                rows = told[(told["data"] == name) & (told["variant"] == variant)].sort_values("share")
                if len(rows):
                    axis.errorbar(
                        rows["share"],
                        -rows["lost_points"],
                        rows["standard_error"],
                        fmt="o-",
                        color=color,
                        label=variant,
                    )
            axis.axhline(0, color=GREY, linewidth=0.8)
            axis.set_title(name)
            axis.set_xlabel("share of the samples left out")
        axes[0][0].set_ylabel("accuracy, points against all")
        axes[0][0].legend(title="left out: the")
    return figure


def jit(measured: pd.DataFrame) -> Figure:
    """Time of a call against the size of the loop, a panel for each program."""
    programs = list(dict.fromkeys(measured["program"]))
    figure, axes = figures.new(1, len(programs), height=2.7, sharey=True, squeeze=False)
    variants = list(dict.fromkeys(measured["variant"]))
    with figures.style():
        for axis, program in zip(axes[0], programs, strict=True):
            for color, variant in zip(PALETTE, variants, strict=False):
                rows = measured[(measured["program"] == program) & (measured["variant"] == variant)].sort_values("size")
                if len(rows):
                    axis.plot(rows["size"], rows["median_ms"], "o-", color=color, label=variant, markersize=3)
            axis.set_xscale("log")
            axis.set_yscale("log")
            axis.set_title(program)
            axis.set_xlabel("turns")
        axes[0][0].set_ylabel("a call, ms")
        figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


def forgetting(distribution: pd.DataFrame) -> Figure:
    """How many samples were forgotten how often."""
    figure, axis = figures.new(height=2.4)
    with figures.style():
        names = list(dict.fromkeys(distribution["data"]))
        width = 0.8 / len(names)
        for place, (name, color) in enumerate(zip(names, (BLUE, ORANGE, GREEN), strict=False)):
            rows = distribution[distribution["data"] == name]
            axis.bar(np.asarray(rows["forgotten"]) + place * width, rows["share"], width, color=color, label=name)
        axis.set_xlabel("times forgotten")
        axis.set_ylabel("share of the samples")
        axis.legend()
    return figure
