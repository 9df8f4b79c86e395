"""The figures of chapter 0."""

from itertools import pairwise

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from helpers.lab import figures
from helpers.lab.figures import BLUE, GREEN, GREY, ORANGE
from helpers.lab.tables import number


def waterfall(told: pd.DataFrame) -> Figure:
    """What each stage takes off the time of the whole training, and what is left; beside it the stage on its own."""
    rows = told.dropna(subset="train_s").reset_index(drop=True)
    figure, axes = figures.new(1, 2, height=0.9 + 0.28 * len(rows), sharey=True, width_ratios=(2, 1))
    with figures.style():
        places, times = np.arange(len(rows)), rows["train_s"].to_numpy()
        before = np.concatenate([[0.0], times[:-1]])
        left, width = np.minimum(before, times), np.abs(times - before)
        left[0], width[0] = 0.0, times[0]
        colors = [GREY] + [GREEN if now <= was else ORANGE for was, now in pairwise(times)]
        axes[0].barh(places, times, color=GREY, alpha=0.35)
        axes[0].barh(places, width, left=left, color=colors)
        for place, row in zip(places, rows.to_dict("records"), strict=True):
            gain = row.get("gain beside")
            label = f"{number(row['train_s'])} s" + (f" ({gain:.2f}×)" if gain == gain and gain is not None else "")
            axes[0].annotate(
                label,
                (max(row["train_s"], left[place] + width[place]), place),
                (3, 0),
                textcoords="offset points",
                va="center",
                size=6,
            )
        axes[0].set_xlim(right=float(np.max(times)) * 1.25)
        alone = rows["gain alone"] if "gain alone" in rows else pd.Series(np.nan, rows.index)
        axes[1].barh(places, alone.fillna(0), color=BLUE)
        axes[1].axvline(1, color=GREY, linewidth=0.8)
        axes[0].set_yticks(places, rows["stage"])
        axes[0].invert_yaxis()
        axes[0].set_xlabel("whole training, s")
        axes[1].set_xlabel("gain of the stage alone")
    return figure
