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


MARKERS = ("o", "^", "s", "D", "v")  # one a GPU


def pareto(plan: pd.DataFrame) -> Figure:
    """Time against kept bytes for every level and peer, a panel for each shape: to the lower left is better.

    A row of panels for each GPU. While nothing is measured one panel is enough: what is derived hardly depends on
    the shape.
    """
    shapes = plan[SHAPE].drop_duplicates().to_dict("records")
    gpus = _gpus(plan, "ratio_to_compiled")
    if not gpus:
        shapes = [shape for shape in shapes if shape["hidden_dim"] == 2048]
    rows = max(len(gpus), 1)
    figure, axes = figures.new(rows, len(shapes), height=1.6 + 2 * rows, sharex=True, sharey="row", squeeze=False)
    with figures.style():
        for line, gpu in zip(axes, gpus or [None], strict=True):
            for axis, shape in zip(line, shapes, strict=True):
                here = (plan[SHAPE] == pd.Series(shape)).all(axis=1)
                _pareto_panel(axis, plan[here & (plan["gpu"] == gpu)] if gpu else plan[:0], shape)
            line[0].set_ylabel("\n".join(filter(None, [gpu, "forward + backward,", "relative to torch.compile"])))
            line[0].margins(y=0.15)
        drawn = [axis.get_legend_handles_labels() for axis in axes.flat]
        named = {label: handle for found in drawn for handle, label in zip(*found, strict=True)}
        figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=3)
    return figure


def saving(savings: pd.DataFrame) -> Figure:
    """Peak memory that level 1 saves over level 0: the task's formula, the replayed allocations, what was measured."""
    figure, axis = figures.new(height=2.9)
    with figures.style():
        shapes = savings.drop_duplicates("shape")
        for offset, column, label, hatch in (
            (-0.2, "task_formula_gib", "3 (L−1) B S I · bytes, the task's two levels", None),
            (0.2, "predicted_gib", "predicted for these kernels", "////"),
        ):
            style = {"width": 0.38, "label": label, "hatch": hatch, "edgecolor": "#0072B2", "facecolor": "white"}
            axis.bar([place + offset for place in range(len(shapes))], shapes[column], **style)
        for gpu, marker in zip(_gpus(savings, "measured_gib"), MARKERS, strict=False):
            measured = savings[savings["gpu"] == gpu]["measured_gib"]
            style = {"marker": marker, "linestyle": "", "color": "#D55E00", "zorder": 3, "label": f"measured, {gpu}"}
            axis.plot([place + 0.2 for place in range(len(shapes))], measured, **style)
        axis.set_yscale("log")
        axis.set_ylabel("peak memory saved, GiB")
        axis.set_xticks(range(len(shapes)), shapes["shape"])
        axis.grid(visible=False, axis="x")
        axis.legend(loc="upper left")
    return figure


def growth(panels: dict[str, pd.DataFrame], columns: dict[str, str]) -> Figure:
    """Peak memory as one dimension grows: a line for each level as predicted, points as measured."""
    figure, axes = figures.new(1, len(panels), height=2.8, sharey=True)
    with figures.style():
        for axis, (title, rows) in zip(axes, panels.items(), strict=True):
            column = columns[title]
            for level, found in rows.groupby("checkpoint_level"):
                line = found.drop_duplicates(column).sort_values(column)
                label = f"level {level}, predicted"
                axis.plot(line[column], line["predicted_peak_gib"], color=COLOR[level], label=label)
                for gpu, marker in zip(_gpus(rows, "peak_gib"), MARKERS, strict=False):
                    points = found[found["gpu"] == gpu]
                    style = {"marker": marker, "linestyle": "", "color": COLOR[level]}
                    axis.plot(points[column], points["peak_gib"], **style, label=f"level {level}, {gpu}")
            axis.set_xscale("log", base=2)
            axis.set_yscale("log", base=2)
            axis.set_xlabel(title)
            ticks = sorted(set(rows[column]))
            axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            axis.yaxis.set_major_formatter("{x:g}")
        axes[0].set_ylabel("peak memory, GiB")
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


def _draw_front(axis, rows: pd.DataFrame) -> None:
    """A staircase through the ways that no other beats in both time and bytes."""
    points = rows[["saved_ratio", "ratio_to_compiled"]].dropna().sort_values(["saved_ratio", "ratio_to_compiled"])
    front = points[points["ratio_to_compiled"] < points["ratio_to_compiled"].cummin().shift(fill_value=float("inf"))]
    if len(front) > 1:
        style = {"where": "post", "color": "#bbbbbb", "linewidth": 1.0, "zorder": 0, "label": "Pareto front"}
        axis.step(front["saved_ratio"], front["ratio_to_compiled"], **style)


def _gpus(rows: pd.DataFrame, column: str) -> list[str]:
    """The GPUs that this column was measured on, in their order."""
    if column not in rows or "gpu" not in rows:
        return []
    return list(dict.fromkeys(rows.loc[rows[column].notna(), "gpu"]))


def _pareto_panel(axis, rows: pd.DataFrame, shape: dict) -> None:
    for way, (color, marker) in STYLES.items():
        style = {"marker": marker, "linestyle": "", "color": color, "markersize": 6}
        found = rows[(rows["way"] == way) & (rows["status"] == "ok")] if len(rows) else rows
        if len(found) and found["ratio_to_compiled"].notna().all():
            x, y, low, high = found.iloc[0][
                ["saved_ratio", "ratio_to_compiled", "ratio_to_compiled_p20", "ratio_to_compiled_p80"]
            ]
            axis.errorbar([x], [y], yerr=[[max(y - low, 0)], [max(high - y, 0)]], **style, label=way)
            continue
        derived = costs.derived(way, shape["hidden_dim"], shape["intermediate_size"], costs.ITEMSIZE[shape["dtype"]])
        if derived is not None:
            hollow = style | {"markerfacecolor": "white"}
            axis.plot([derived.kept_ratio], [derived.products / 9], **hollow, label=f"{way}, derived")
    _draw_front(axis, rows)
    axis.set_title(f"d = {shape['hidden_dim']}, I = {shape['intermediate_size']}")
    axis.set_xlabel("kept for backward,\nrelative to the plain module")
    axis.set_xlim(left=0)
