"""Figures: one style sheet, vector output with a raster copy, the same bytes when drawn twice."""

import errno
import io
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from ..lab import files
from ..lab.estimate import EFFECT, UNDECIDED
from ..lab.files import project_root
from .values import Number, judged

# These remain distinct under red-green colour blindness.
BLUE, ORANGE, GREEN, PURPLE, YELLOW, GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#777777"
STYLE = Path(__file__).with_name("house.mplstyle")
DPI = 100  # of a PNG: 630 pixels wide, 5 to 20 KB


def folder() -> Path:
    """Where figures go: `$HELPERS_FIGURES`, else the project's `figures/`."""
    return Path(os.environ.get("HELPERS_FIGURES") or project_root() / "figures")


def style():
    """The house style as a context manager: `with figures.style(): …`."""
    return matplotlib.style.context(STYLE)


def new(rows: int = 1, columns: int = 1, height: float = 3.2, **options) -> tuple[Figure, Any]:
    """A figure as wide as a page of the report, and its axes. It isn't registered with pyplot and needs no closing."""
    with style():
        figure = Figure(figsize=(6.3, height))
        return figure, figure.subplots(max(rows, 1), columns, **options)


def forest(numbers: Mapping[str, Number], height: float = 0.19) -> tuple[Figure, Axes]:
    """Ratios with their intervals, one below the other: a blue dot is an effect, a ring none above 5 %, and a cross is
    undecided. An interval that is much wider than the numbers lie apart is cut off.
    """
    drawn, axis = new(height=0.5 + height * len(numbers))
    measured = [float(ratio) for ratio in numbers.values() if ratio.measured] or [1.0]
    least, most = min(1.0, *measured) / 1.4, max(1.0, *measured) * 1.4
    for place, ratio in enumerate(numbers.values()):
        value, low, high = (float("nan") if x is None else float(x) for x in (ratio, ratio.low, ratio.high))
        kind = judged(ratio)[0] if ratio.measured else UNDECIDED
        colour, marker = BLUE if kind == EFFECT else GREY, "x" if kind == UNDECIDED else "o"
        axis.plot([low, high], [place, place], color=colour, linewidth=2, solid_capstyle="butt")
        axis.plot(value, place, marker, color=colour, markersize=4, fillstyle="full" if kind == EFFECT else "none")
        reach = value if ratio.high is None else min(high, most)
        offset = {"xytext": (4, 1), "textcoords": "offset points", "va": "center", "size": 7}
        axis.annotate(f"{ratio:brief 2}" if ratio.measured else "", (reach, place), **offset)
    axis.axvline(1, color=GREY, linewidth=0.8)
    axis.set_yticks(range(len(numbers)), list(numbers))
    axis.invert_yaxis()
    axis.set(xscale="log", xlabel="speedup with its 95 % interval (log scale)")
    first, last = axis.get_xlim()
    first, last = max(first, least), min(last, most * 1.15)
    axis.set_xlim(first, last)
    axis.set_xticks([tick for tick in (0.2, 0.5, 0.7, 1, 1.5, 2, 3, 5, 10, 20) if first < tick < last])
    axis.set_xticks([], minor=True)
    axis.xaxis.set_major_formatter("{x:g}×")
    return drawn, axis


def svg(figure: Figure, name: str) -> str:
    """The figure as SVG, with the same bytes for the same drawing on any machine. No date is written.

    Processors differ in the last bits of a layout. So coordinates are rounded to a thousandth of a point, and the ids
    that matplotlib derives from them are numbered. The first call fixes the layout: laid out again, it would drift.
    """
    text = io.StringIO()
    with style(), matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    figure.set_layout_engine("none")
    return _canonical(text.getvalue(), name)


def png(figure: Figure) -> bytes:
    """The figure as PNG in 128 colours, laid out as its SVG: call `svg` first. The same bytes when drawn twice.

    For where SVG isn't shown: JupyterLab drops it from a notebook that isn't trusted.
    """
    drawn, small = io.BytesIO(), io.BytesIO()
    with style():
        figure.savefig(drawn, format="png", dpi=DPI)
    # A quarter of matplotlib's bytes; neither its version nor a date is in it.
    Image.open(drawn).convert("RGB").quantize(128).save(small, "PNG", optimize=True)
    return small.getvalue()


def save(figure: Figure, name: str) -> Path:
    """Write `figures/<name>.svg`; nothing where that can't be written, as in a project that is mounted read-only."""
    path = folder() / f"{name}.svg"
    try:
        return files.write(path, svg(figure, name))
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
    return path


def _canonical(text: str, figure: str) -> str:
    """Round coordinates, and replace matplotlib's ids by numbered ones."""
    text = re.sub(r"-?\d+\.\d{4,}", _rounded, text)
    names = dict.fromkeys(re.findall(r'\bid="([a-zA-Z]+[0-9a-f]{10})"', text))
    numbered = {name: f"{figure}-{number}" for number, name in enumerate(names)}
    return re.sub(r"\b[a-zA-Z]+[0-9a-f]{10}\b", lambda match: numbered.get(match[0], match[0]), text)


def _rounded(number: re.Match) -> str:
    text = f"{float(number[0]):.3f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text
