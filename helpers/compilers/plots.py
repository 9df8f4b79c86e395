"""The figures of chapter 7."""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from helpers.lab import figures
from helpers.lab.figures import BLUE, GREEN, GREY, ORANGE, PURPLE, YELLOW

from .semantics import BREAKS, OUTCOMES, RECOMPILES, REFUSES, RIGHT, SILENT, WARNED
from .story import ranks

COLORS = {RIGHT: GREEN, RECOMPILES: BLUE, BREAKS: PURPLE, REFUSES: GREY, WARNED: YELLOW, SILENT: ORANGE}


def outcomes(counts: pd.DataFrame) -> Figure:
    """How often each way came to each outcome, as stacked bars."""
    figure, axis = figures.new(height=0.9 + 0.24 * len(counts))
    with figures.style():
        places, left = np.arange(len(counts)), np.zeros(len(counts))
        for outcome in OUTCOMES:
            width = counts[outcome].to_numpy(dtype=float)
            axis.barh(places, width, left=left, color=COLORS[outcome], label=outcome)
            left += width
        axis.set_yticks(places, counts["variant"])
        axis.invert_yaxis()
        axis.set_xlabel("functions")
        axis.xaxis.get_major_locator().set_params(integer=True)
        figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def latency(measured: pd.DataFrame) -> Figure:
    """Speed-up over eager with its spread, of one device, in the least precision.

    A panel for each model and batch that has several ways; for each there is, if none has.
    """
    measured = measured[measured["precision"] == ("fp16" if "fp16" in set(measured["precision"]) else "fp32")]
    found = list(measured.groupby(["model", "batch"], sort=False))
    panels = [(key, rows) for key, rows in found if len(rows) > 1] or found
    models = list(dict.fromkeys(model for (model, _), _ in panels))
    wide = max(sum(name == model for (name, _), _ in panels) for model in models)
    figure, axes = figures.new(len(models), wide, height=0.4 + 2.3 * len(models), squeeze=False, sharex="row")
    with figures.style():
        for line, model in zip(axes, models, strict=True):
            of_model = sorted(
                ((batch, rows) for (name, batch), rows in panels if name == model), key=lambda panel: panel[0]
            )
            ways = list(dict.fromkeys(way for _, rows in of_model for way in rows["backend"]))
            ways = [ways[place] for place in np.argsort(ranks(ways), kind="stable")]
            for place, axis in enumerate(line):
                if place >= len(of_model):
                    axis.set_axis_off()
                    continue
                batch, rows = of_model[place]
                _bars(axis, rows.set_index("backend").reindex(ways), ways if place == 0 else [""] * len(ways))
                axis.set_title(f"{model}, batch {batch}")
                axis.set_xlabel("times as fast as eager")
    return figure


def _bars(axis, rows: pd.DataFrame, names: list[str]) -> None:
    places, speed = np.arange(len(rows)), rows["speedup"].fillna(0)
    spread = [
        (speed - rows["speedup_p20"]).clip(lower=0).fillna(0),
        (rows["speedup_p80"] - speed).clip(lower=0).fillna(0),
    ]
    axis.barh(places, speed, xerr=spread, color=BLUE, error_kw={"linewidth": 0.8})
    axis.axvline(1, color=GREY, linewidth=0.8)
    axis.set_yticks(places, names)
    axis.invert_yaxis()


def fusion(measured: pd.DataFrame) -> Figure:
    """Kernels, and bytes moved as times the least, of each case by each way."""
    rows = measured[measured["size"] == measured["size"].max()]
    cases, ways = list(dict.fromkeys(rows["case"])), list(dict.fromkeys(rows["variant"]))
    figure, axes = figures.new(1, 2, height=0.9 + 0.42 * len(cases), sharey=True)
    with figures.style():
        height, places = 0.8 / len(ways), np.arange(len(cases))
        for number, (way, color) in enumerate(zip(ways, (GREY, BLUE, ORANGE, GREEN, PURPLE, YELLOW), strict=False)):
            found = rows[rows["variant"] == way].set_index("case").reindex(cases)
            at = places + (number - (len(ways) - 1) / 2) * height
            axes[0].barh(at, found["kernels"].fillna(0), height, color=color, label=way)
            axes[1].barh(at, (found["bytes_moved"] / found["bytes_least"]).fillna(0), height, color=color)
        axes[0].set_xscale("symlog", linthresh=1)
        axes[0].set_yticks(places, cases)
        axes[0].invert_yaxis()
        axes[0].set_xlabel("kernels")
        axes[1].axvline(1, color=GREY, linewidth=0.8)
        axes[1].set_xlabel("bytes moved, times the least")
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure
