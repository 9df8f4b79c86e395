"""The figures of chapter 4. What was measured is drawn filled, what is derived hollow or as a line."""

import pandas as pd
from matplotlib.figure import Figure

from helpers.lab import figures

from . import costs, peers
from .levels import LEVELS

COLOR = {0: "#0072B2", 1: "#D55E00", 2: "#009E73", 3: "#CC79A7"}
OTHERS = {
    peers.PLAIN: ("#000000", "s"),
    peers.CHECKPOINT: ("#000000", "X"),
    peers.COMPILED: ("#777777", "s"),
    peers.BUDGET: ("#777777", "X"),
    peers.LIGER: ("#E69F00", "D"),
}
STYLES = {f"{peers.OURS}{level}": (COLOR[level], "o") for level in LEVELS} | OTHERS
SHAPE = ["batch", "seq_len", "hidden_dim", "intermediate_size", "dtype"]


def pareto(plan: pd.DataFrame) -> Figure:
    """Time against kept bytes for every level and peer, a panel for each shape: to the lower left is better.

    While nothing is measured one panel is enough: what is derived hardly depends on the shape.
    """
    shapes = plan[SHAPE].drop_duplicates().to_dict("records")
    if not (plan["status"] == "ok").any():
        shapes = [shape for shape in shapes if shape["hidden_dim"] == 2048]
    figure, axes = figures.new(1, len(shapes), height=3.6, sharey=True, squeeze=False)
    with figures.style():
        for axis, shape in zip(axes[0], shapes, strict=True):
            _pareto_panel(axis, plan[(plan[SHAPE] == pd.Series(shape)).all(axis=1)], shape)
        axes[0][0].set_ylabel("forward + backward,\nrelative to torch.compile")
        axes[0][0].margins(y=0.15)
        handles, labels = axes[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3)
    return figure


def saving(stacks: pd.DataFrame) -> Figure:
    """Peak memory that level 1 saves over level 0: the task's formula, the replayed allocations, what was measured."""
    figure, axis = figures.new(height=2.9)
    with figures.style():
        places = range(len(stacks))
        for offset, column, label, hatch in (
            (-0.2, "task_formula_gib", "3 (L−1) B S I · bytes, the task's two levels", None),
            (0.2, "predicted_gib", "predicted for these kernels", "////"),
        ):
            style = {"width": 0.38, "label": label, "hatch": hatch, "edgecolor": "#0072B2", "facecolor": "white"}
            axis.bar([place + offset for place in places], stacks[column], **style)
        if stacks["measured_gib"].notna().any():
            style = {"marker": "o", "linestyle": "", "color": "#D55E00", "label": "measured", "zorder": 3}
            axis.plot([place + 0.2 for place in places], stacks["measured_gib"], **style)
        axis.set_yscale("log")
        axis.set_ylabel("peak memory saved, GiB")
        axis.set_xticks(list(places), stacks["shape"])
        axis.grid(visible=False, axis="x")
        axis.legend(loc="upper left")
    return figure


def growth(panels: dict[str, pd.DataFrame], columns: dict[str, str]) -> Figure:
    """Peak memory as one dimension grows, a line a level as predicted, points as measured."""
    figure, axes = figures.new(1, len(panels), height=2.8, sharey=True)
    with figures.style():
        for axis, (title, rows) in zip(axes, panels.items(), strict=True):
            for level, at_level in rows.groupby("checkpoint_level"):
                at_level = at_level.sort_values(columns[title])
                x = at_level[columns[title]]
                axis.plot(x, at_level["predicted_peak_gib"], color=COLOR[level], label=f"level {level}, predicted")
                if at_level["peak_gib"].notna().any():
                    style = {"marker": "o", "linestyle": "", "color": COLOR[level], "label": f"level {level}, measured"}
                    axis.plot(x, at_level["peak_gib"], **style)
            axis.set_xscale("log", base=2)
            axis.set_yscale("log", base=2)
            axis.set_xlabel(title)
            ticks = sorted(set(rows[columns[title]]))
            axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            axis.yaxis.set_major_formatter("{x:g}")
        axes[0].set_ylabel("peak memory, GiB")
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


def _pareto_panel(axis, rows: pd.DataFrame, shape: dict) -> None:
    for way, (color, marker) in STYLES.items():
        style = {"marker": marker, "linestyle": "", "color": color, "markersize": 6}
        derived = costs.derived(way, shape["hidden_dim"], shape["intermediate_size"], costs.ITEMSIZE[shape["dtype"]])
        if derived is not None:
            hollow = style | {"markerfacecolor": "white", "alpha": 0.55}
            axis.plot([derived.kept_ratio], [derived.products / 9], **hollow, label=f"{way}, derived")
        found = rows[(rows["way"] == way) & (rows["status"] == "ok")] if "way" in rows else rows[:0]
        if len(found):
            spread = [
                (found["ratio_to_compiled"] - found["ratio_to_compiled_p20"]).clip(lower=0),
                (found["ratio_to_compiled_p80"] - found["ratio_to_compiled"]).clip(lower=0),
            ]
            axis.errorbar(
                found["saved_ratio"], found["ratio_to_compiled"], yerr=spread, **style, label=f"{way}, measured"
            )
    axis.set_title(f"d = {shape['hidden_dim']}, I = {shape['intermediate_size']}")
    axis.set_xlabel("kept for backward,\nrelative to the plain module")
    axis.set_xlim(left=0)
