"""The figures of chapter 5."""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from helpers.lab import figures
from helpers.lab.figures import BLUE, GREEN, GREY, ORANGE, PURPLE

WAYS = {"none": GREY, "selective": BLUE, "full": ORANGE, "memory budget": GREEN}
STRATEGIES = {"ddp": GREY, "zero2": BLUE, "zero3": ORANGE, "tp": PURPLE}


def ladder(told: pd.DataFrame) -> Figure:
    """Tokens a second of each rung, and its peak memory beside it."""
    rows = told.dropna(subset="tokens_per_s")
    figure, axes = figures.new(1, 2, height=0.9 + 0.19 * len(rows), sharey=True, width_ratios=(2, 1))
    with figures.style():
        places = np.arange(len(rows))
        bars = axes[0].barh(places, rows["tokens_per_s"] / 1e3, color=BLUE)
        axes[0].bar_label(bars, [f"{rate / 1e3:.3g}" for rate in rows["tokens_per_s"]], size=6, padding=2)
        axes[1].barh(places, rows["peak_gib"], color=ORANGE)
        axes[0].set_yticks(places, rows["step"])
        axes[0].invert_yaxis()
        axes[0].set_xlabel("thousand tokens a second")
        axes[1].set_xlabel("peak memory, GiB")
    return figure


def batches(measured: pd.DataFrame) -> Figure:
    """Tokens a second and memory against the batch."""
    measured = measured.dropna(subset="tokens_per_s")
    figure, axes = figures.new(1, 2, height=2.6)
    with figures.style():
        for axis, column, label in (
            (axes[0], "tokens_per_s", "tokens a second"),
            (axes[1], "peak_gib", "peak memory, GiB"),
        ):
            axis.plot(measured["batch"], measured[column], "o-", color=BLUE)
            axis.set_xscale("log", base=2)
            axis.set_ylim(bottom=0)
            axis.set_xlabel("sequences in a batch")
            axis.set_ylabel(label)
    return figure


def checkpointing(measured: pd.DataFrame) -> Figure:
    """Speed against the length of the sequence for each way; a line ends where memory does."""
    figure, axis = figures.new(height=2.8)
    with figures.style():
        for way, color in WAYS.items():
            rows = measured[(measured["checkpointing"] == way) & (measured["status"] == "ok")].sort_values("sequence")
            axis.plot(rows["sequence"], rows["tokens_per_s"], "o-", color=color, label=way)
        axis.set_xscale("log", base=2)
        axis.set_ylim(bottom=0)
        axis.set_xlabel("tokens in the sequence")
        axis.set_ylabel("tokens a second")
        axis.legend(title="recomputed")
    return figure


def memory(planned: pd.DataFrame, column: str = "peak_gib") -> Figure:
    """SIMULATED memory of one rank against how many there are."""
    figure, axis = figures.new(height=2.8)
    with figures.style():
        for strategy, color in STRATEGIES.items():
            rows = planned[planned["strategy"] == strategy].sort_values("ranks")
            if len(rows):
                axis.plot(rows["ranks"], rows[column], "o-", color=color, label=strategy)
        axis.axhline(80, color=GREY, linewidth=0.8)
        axis.annotate("80 GiB", (2, 80), (2, 3), textcoords="offset points", size=7)
        axis.set_xscale("log", base=2)
        axis.set_ylim(bottom=0)
        axis.set_xlabel("GPUs (simulated)")
        axis.set_ylabel("peak memory of one, GiB")
        axis.legend()
    return figure


def scaling(predicted: pd.DataFrame) -> Figure:
    """PREDICTED efficiency against the number of GPUs, a panel for each kind of link."""
    clusters = list(dict.fromkeys(predicted["cluster"]))
    figure, axes = figures.new(1, len(clusters), height=2.6, sharey=True, squeeze=False)
    with figures.style():
        for axis, cluster in zip(axes[0], clusters, strict=True):
            for strategy, color in STRATEGIES.items():
                rows = predicted[(predicted["cluster"] == cluster) & (predicted["strategy"] == strategy)]
                if len(rows):
                    rows = rows.sort_values("ranks")
                    axis.plot(rows["ranks"], rows["efficiency"], "o-", color=color, label=strategy, markersize=3)
            axis.set_xscale("log", base=2)
            axis.set_ylim(0, 1.05)
            axis.set_title(cluster)
            axis.set_xlabel("GPUs")
        axes[0][0].set_ylabel("share of the time that computes")
        figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure
