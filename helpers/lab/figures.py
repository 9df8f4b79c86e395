"""Figures: one style sheet, vector output with a raster copy, the same bytes when drawn twice."""

import io
import os
import re
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from PIL import Image

from .machine import project_root

# These remain distinct under red-green colour blindness.
BLUE, ORANGE, GREEN, PURPLE, YELLOW, GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#777777"
STYLE = Path(__file__).with_name("house.mplstyle")
DPI = 100  # of a PNG: 630 pixels wide, 5 to 20 KB


def folder() -> Path:
    """Where figures go: `$HELPERS_FIGURES`, else the project's `figures/`."""
    return Path(os.environ.get("HELPERS_FIGURES") or project_root() / "figures")


def style():
    """The house style as a context manager: `with figures.style(): …`."""
    import matplotlib.style

    return matplotlib.style.context(STYLE)


def new(rows: int = 1, columns: int = 1, height: float = 3.2, **options) -> tuple[Figure, object]:
    """A figure as wide as a page of the report, and its axes. It isn't registered with pyplot and needs no closing."""
    with style():
        figure = Figure(figsize=(6.3, height))
        return figure, figure.subplots(rows, columns, **options)


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
    """Write `figures/<name>.svg`."""
    path = folder() / f"{name}.svg"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(svg(figure, name), encoding="utf-8")
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
