"""The figures of chapter 3."""

import itertools

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from helpers.lab import figures
from helpers.lab.figures import BLUE, GREEN, GREY, ORANGE

from .story import NAMES

VARIANTS = ("slow", "fixed")


def parts(found: pd.DataFrame) -> Figure:
    """Forward and backward time of each part, slow and fixed, a panel for each pipeline."""
    pipelines = list(dict.fromkeys(found["pipeline"]))
    figure, axes = figures.new(1, len(pipelines), height=3.0, squeeze=False)
    with figures.style():
        for axis, pipeline in zip(axes[0], pipelines, strict=True):
            here = found[(found["pipeline"] == pipeline) & found["forward_ms"].notna() & (found["part"] != "model")]
            names = list(dict.fromkeys(here["part"]))
            for offset, variant, alpha in ((-0.2, "slow", 0.45), (0.2, "fixed", 1.0)):
                rows = here[here["variant"] == variant].drop_duplicates("part").set_index("part").reindex(names)
                places = np.arange(len(names)) + offset
                axis.barh(places, rows["forward_ms"], 0.36, color=BLUE, alpha=alpha, label=f"forward, {variant}")
                left = rows["forward_ms"].fillna(0)
                axis.barh(
                    places,
                    rows["backward_ms"],
                    0.36,
                    left=left,
                    color=ORANGE,
                    alpha=alpha,
                    label=f"backward, {variant}",
                )
            axis.set_yticks(range(len(names)), [name.strip() for name in names])
            axis.invert_yaxis()
            axis.set_title(NAMES[pipeline])
            axis.set_xlabel("ms in a step")
        figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


def waterfall(told: pd.DataFrame, title: str) -> Figure:
    """The time of an iteration after each fix, one more at a time, on a logarithmic scale."""
    rows = told.dropna(subset="cumulative_ms")
    figure, axis = figures.new(height=0.9 + 0.2 * (len(rows) + 1))
    with figures.style():
        slow = rows["cumulative_ms"].iloc[0] * rows["gain in all"].iloc[0]
        times = [slow, *rows["cumulative_ms"]]
        axis.barh(0, slow, color=GREY)
        for place, (before, after) in enumerate(itertools.pairwise(times), start=1):
            axis.barh(place, after, color=BLUE)
            axis.barh(place, max(before - after, 0), left=after, color=ORANGE, alpha=0.35)
        axis.set_yticks(range(len(times)), ["slow", *rows["fix"]])
        axis.invert_yaxis()
        axis.set_xscale("log")
        axis.set_xlim(min(times) / 2, slow * 1.5)
        for place, time in enumerate(times):
            axis.annotate(
                f"{time:.3g}",
                (min(times) / 2, place),
                (2, 0),
                textcoords="offset points",
                va="center",
                size=6,
                color="white",
            )
        axis.set_xlabel(f"{title}: ms an iteration, all fixes so far; pale: what the fix saves")
    return figure


def timelines(found: pd.DataFrame) -> Figure:
    """One step of each pipeline, slow above fixed, as its trace has it."""
    shown = list(found[["pipeline", "variant"]].drop_duplicates().itertuples(index=False))
    figure, axes = figures.new(len(shown), 1, height=1.35 * len(shown) + 0.4, squeeze=False)
    with figures.style():
        for axis, (pipeline, variant) in zip(axes[:, 0], shown, strict=True):
            rows = found[(found["pipeline"] == pipeline) & (found["variant"] == variant)]
            tracks = sorted(set(rows["track"]), key=lambda track: (track.startswith("stream"), track))
            for place, track in enumerate(tracks):
                spans = rows[rows["track"] == track]
                color = ORANGE if track.startswith("stream") else GREEN if track == "annotations" else BLUE
                bars = list(zip(spans["begin_ms"], spans["end_ms"] - spans["begin_ms"], strict=True))
                axis.broken_barh(bars, (place - 0.4, 0.8), facecolors=color, edgecolor="white", linewidth=0.2)
            axis.set_yticks(range(len(tracks)), tracks)
            axis.invert_yaxis()
            axis.set_xlim(left=0)
            axis.set_title(f"{NAMES[pipeline]}, {variant}")
        axes[-1, 0].set_xlabel("ms from the beginning of the step")
    return figure


def metrics(found: pd.DataFrame) -> Figure:
    """The time of a step over the steps of an epoch, for both metrics."""
    figure, axis = figures.new(height=2.6)
    with figures.style():
        for (variant, rows), color in zip(found.groupby("variant", sort=False), (ORANGE, BLUE), strict=False):
            rows = rows.sort_values("step")
            axis.plot(rows["step"], rows["ms"], color=color, label=variant)
        axis.set_xlabel("step of the epoch")
        axis.set_ylabel("ms a step")
        axis.set_ylim(bottom=0)
        axis.legend()
    return figure


def roofline(floors: pd.DataFrame) -> Figure:
    """Measured time of each type of layer against the least that its work must cost: on the line is perfect."""
    figure, axis = figures.new(height=3.2)
    with figures.style():
        for (variant, color), marker in zip((("slow", ORANGE), ("fixed", BLUE)), "os", strict=True):
            rows = floors[floors["variant"] == variant]
            axis.plot(rows["lower_bound_ms"], rows["total_ms"], marker, color=color, label=variant, alpha=0.8)
            for row in rows.to_dict("records"):
                axis.annotate(
                    row["type"], (row["lower_bound_ms"], row["total_ms"]), (4, 2), textcoords="offset points", size=6
                )
        ends = [floors["lower_bound_ms"].min(), floors["lower_bound_ms"].max()]
        axis.plot(ends, ends, color=GREY, label="the floor")
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_xlabel("least time for the operations and bytes, ms")
        axis.set_ylabel("measured, ms")
        axis.legend()
    return figure
