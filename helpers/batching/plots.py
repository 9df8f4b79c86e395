"""The figures of chapter 2: batches as they are, and what was measured of them."""

import numpy as np
import pandas as pd
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from helpers.lab import figures
from helpers.lab.figures import BLUE, GREEN, ORANGE

from .packing import pack
from .sampler import BalancedBatchSampler

STRATEGIES = {"greedy": ORANGE, "first-fit": BLUE, "best-fit": GREEN}
ROWS, WIDTH = 16, 640


def lengths(found: np.ndarray) -> Figure:
    """How many samples have which length, and which share of the tokens stands in samples up to it."""
    figure, axes = figures.new(1, 2, height=2.5)
    with figures.style():
        axes[0].hist(found, bins=np.arange(0, found.max() + 8, 8), color=BLUE)
        axes[0].set_xlabel("tokens in a sample")
        axes[0].set_ylabel("samples")
        ordered = np.sort(found)
        axes[1].plot(ordered, np.linspace(0, 1, len(ordered)), color=BLUE, label="of the samples")
        axes[1].plot(ordered, np.cumsum(ordered) / ordered.sum(), color=ORANGE, label="of the tokens")
        axes[1].set_xlabel("length")
        axes[1].set_ylabel("share up to this length")
        axes[1].legend()
    return figure


def pictures(found: np.ndarray) -> Figure:
    """A batch of 16 samples in each way, drawn to one scale: documents in colour, padding in grey."""
    random = np.random.default_rng(3).permutation(len(found))[:ROWS]
    balanced = max(BalancedBatchSampler(found, ROWS, 10), key=lambda batch: int(found[batch].sum()) % 2003)
    packs = pack(found[np.random.default_rng(3).permutation(len(found))[:400]], 2048, "best-fit")
    some = packs[len(packs) // 2]
    chosen = found[np.random.default_rng(3).permutation(len(found))[:400]][some]
    ways = {
        "BRAIN": (found[random], WIDTH),
        "BIG BRAIN": (found[random], int(found[random].max())),
        "k = 10": (found[balanced], int(found[balanced].max())),
    }
    figure, axes = figures.new(2, 2, height=3.6)
    with figures.style():
        for axis, (name, (sizes, width)) in zip(axes.flat, ways.items(), strict=False):
            cells = np.full((len(sizes), width), 9)
            for line, size in zip(cells, sizes, strict=True):
                line[:size] = 0
            _cells(axis, cells + (np.arange(len(sizes)) % 8)[:, None] * (cells == 0))
            axis.set_title(f"{name}: {1 - sizes.sum() / cells.size:.0%} padding")
        documents = np.repeat(np.arange(len(chosen)) % 8, chosen)
        line = np.full(2048, 9)
        line[: len(documents)] = documents
        _cells(axes[1][1], line.reshape(4, 512))
        axes[1][1].set_title(f"packed: one sequence of 2048, {1 - chosen.sum() / 2048:.0%} padding")
    return figure


def _cells(axis, cells: np.ndarray) -> None:
    colors = [
        "#0072B2",
        "#56B4E9",
        "#009E73",
        "#F0E442",
        "#E69F00",
        "#D55E00",
        "#CC79A7",
        "#882255",
        "#000000",
        "#DDDDDD",
    ]
    axis.imshow(cells, cmap=ListedColormap(colors), vmin=0, vmax=9, aspect="auto", interpolation="nearest")
    axis.set_xlim(0, WIDTH)
    axis.set_yticks([])
    axis.grid(False)
    axis.set_xlabel("token")


def batch_times(measured: pd.DataFrame) -> Figure:
    """The time of a batch, for each way: from the 5th to the 95th percentile, the middle half thick, the median."""
    shapes = measured[["gpu", "batch_size"]].drop_duplicates().to_dict("records")
    figure, axes = figures.new(1, len(shapes), height=2.9, squeeze=False)
    with figures.style():
        for axis, shape in zip(axes[0], shapes, strict=True):
            rows = measured[(measured["gpu"] == shape["gpu"]) & (measured["batch_size"] == shape["batch_size"])]
            for place, row in enumerate(rows.to_dict("records")):
                axis.plot([row["p5_ms"], row["p95_ms"]], [place, place], color=BLUE, linewidth=1)
                axis.plot([row["p25_ms"], row["p75_ms"]], [place, place], color=BLUE, linewidth=5, alpha=0.5)
                axis.plot(row["median_ms"], place, "o", color=ORANGE, markersize=4)
            axis.set_yticks(range(len(rows)), rows["variant"])
            axis.invert_yaxis()
            axis.set_xlim(left=0)
            axis.set_title(f"{shape['gpu']}, {shape['batch_size']} samples")
            axis.set_xlabel("forward of a batch, ms")
    return figure


def padding(measured: pd.DataFrame) -> Figure:
    """The share of padding against how many of the other samples a sample can meet."""
    figure, axis = figures.new(height=2.9)
    with figures.style():
        for (size, rows), color in zip(measured.groupby("batch_size", sort=False), (BLUE, ORANGE, GREEN), strict=False):
            ks = rows[rows["variant"] != "BRAIN"]
            axis.plot(ks["candidate_share"], ks["padding_share"], "o", color=color, label=f"batches of {size}")
        for row in measured.drop_duplicates("variant").to_dict("records"):
            if row["variant"].startswith("k = ") and row["variant"] != "k = 640":
                axis.annotate(
                    row["variant"],
                    (row["candidate_share"], row["padding_share"]),
                    (5, -7),
                    textcoords="offset points",
                    size=7,
                )
        axis.set_xlabel("share of all samples that a sample can meet in a batch")
        axis.set_ylabel("share of padding")
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.legend()
    return figure


def sampler(scaling: pd.DataFrame) -> Figure:
    """What indices cost as the data set grows: before the first batch, and a batch over a whole epoch."""
    figure, axes = figures.new(1, 2, height=2.8)
    with figures.style():
        for (way, rows), color in zip(scaling.groupby("variant", sort=False), (BLUE, ORANGE), strict=False):
            rows = rows.sort_values("samples")
            axes[0].plot(rows["samples"], rows["init_s"] + rows["first_batch_ms"] / 1e3, "o-", color=color, label=way)
            axes[1].plot(rows["samples"], rows["batch_us"], "o-", color=color, label=way)
        axes[0].set_ylabel("until the first batch, s")
        axes[0].set_yscale("log")
        axes[1].set_ylabel("a batch of 32, µs")
        axes[1].set_ylim(bottom=0)
        for axis in axes:
            axis.set_xscale("log")
            axis.set_xlabel("samples")
        figure.legend(*axes[1].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure


def fill(measured: pd.DataFrame) -> Figure:
    """How full the sequences of each strategy are; what is missing to 1 is padding."""
    largest = measured[measured["samples"] == measured["samples"].max()]
    capacities = list(dict.fromkeys(largest["capacity"]))
    figure, axis = figures.new(height=2.6)
    with figures.style():
        for offset, (strategy, color) in zip((-0.25, 0, 0.25), STRATEGIES.items(), strict=True):
            rows = largest[largest["strategy"] == strategy].drop_duplicates("capacity").set_index("capacity")
            shares = [rows.loc[capacity, "fill"] for capacity in capacities]
            bars = axis.bar(np.arange(len(capacities)) + offset, shares, 0.23, color=color, label=strategy)
            axis.bar_label(bars, [f"{share:.1%}" for share in shares], size=6, padding=1)
        axis.set_xticks(range(len(capacities)), [f"{capacity} tokens" for capacity in capacities])
        axis.set_ylim(0.8, 1.02)
        axis.set_ylabel("share of the capacity used")
        figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure
