"""What a notebook uses to show what was measured: results, tables, figures and sentences that read the records.

`results` only reads, unless it is given a budget. What has no record yet says so in the notebook, in one line with the
command that measures it, and stays out of the PDF, whose last page lists it.
"""

import base64
import html
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass

import matplotlib.style
import numpy as np
import pandas as pd
from IPython.display import Markdown, display
from matplotlib.figure import Figure

from . import figures, records
from .experiment import Experiment
from .machine import device_class, device_name, slug
from .plan import minutes, plan
from .records import STATUS
from .runner import measure

matplotlib.style.use(figures.STYLE)  # in a notebook, all that is drawn is in the house style
os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # some builds of torch print a line whenever a profiler starts or stops

LIVE = "HELPERS_LIVE"  # "no" in the environment: `results` measures nothing
NOT_MEASURED = "not measured"
LEFT_OUT = {"helpers": {"report": False}}
UNITS = {"tflops": "TFLOP/s", "gb_per_s": "GB/s", "mb_per_s": "MB/s", "gib": "GiB", "mib": "MiB", "kib": "KiB"}
UNITS |= {"s": "s", "ms": "ms", "us": "µs"}
YES_NO = {"True": "yes", "False": "no"}
LONG = 12  # rows: a longer table is folded
A_SECOND, SPREAD = "_per_s", ("_p20", "_p80")


@dataclass(frozen=True)
class Results:
    """What one machine has recorded of an experiment, at the sizes of its class."""

    experiment: Experiment
    rows: pd.DataFrame

    @property
    def measured(self) -> pd.DataFrame:
        """The rows that hold figures."""
        return self.rows[self.rows[STATUS] == "ok"] if len(self.rows) else self.rows

    @property
    def preset(self) -> str:
        """The class of the machine that is shown; of a big GPU where none has measured."""
        return str(self.rows["preset"].iloc[0]) if len(self.rows) else "big-gpu"

    @property
    def with_missing(self) -> pd.DataFrame:
        """The rows, and for each configuration without any, one that says that it is not measured."""
        identity, configs = self.experiment.identity(self.preset), self.experiment.configurations(self.preset)
        there = [records.key(row, identity) for row in self.rows.to_dict("records")]
        absent = [config | {STATUS: NOT_MEASURED} for config in configs if records.key(config, identity) not in there]
        both = pd.concat([self.rows, pd.DataFrame(absent)], ignore_index=True) if absent else self.rows
        return _in_order(self.experiment, self.preset, both)

    @property
    def origin(self) -> str:
        """For a caption: the machine, where it is not the one that page 1 names, and rows of an older method."""
        if not len(self.rows):
            return ""
        said = []
        if (name := self.rows["gpu"].iloc[0]) != main_machine():
            said.append(f"Measured on {name}.")
        if old := int((self.rows["method"] != str(self.experiment.version)).sum()):
            said.append(f"{old} rows by an older method.")
        return " ".join(said)


def results(experiment: Experiment, preset: str | None = None, budget: float | None = None) -> Results:
    """What is recorded of an experiment; if nothing is, a line says how to measure it.

    Nothing is measured here but with a `budget` in seconds: then this machine first measures what it has no fresh
    record of, at the sizes of `preset` (default: of its class), and its records are shown. A line says before how much
    that is and how many minutes are expected, if records tell. `HELPERS_LIVE=no` in the environment forbids it.
    """
    here = budget is not None and os.environ.get(LIVE) != "no"
    if here:
        _measure(experiment, preset or device_class(), budget)
    found = recorded(experiment, preset, slug(device_name()) if here else None)
    if not len(found.measured):
        name = f"{experiment.chapter}/{experiment.table}"
        how = f"*Not measured yet. To measure it: `python -m helpers measure {name}`.*"
        display(Markdown(how), metadata={"helpers": {"report": False, "waiting": name, "about": experiment.about}})
    return found


def _measure(experiment: Experiment, preset: str, budget: float) -> None:
    planned = plan(experiment, preset)
    if planned.missing:
        some = f"{planned.missing} of {planned.missing + planned.fresh} configurations ({preset}) on {device_name()}"
        takes = f"expected minutes: {minutes(planned)}; stops after {budget / 60:.1f}"
        said = f"*Measuring {planned.name}: {some}; {takes}, when the last one begun is finished.*"
        display(Markdown(said), metadata=LEFT_OUT)
        measure([experiment], preset, budget=budget)


def recorded(experiment: Experiment, preset: str | None = None, machine: str | None = None) -> Results:
    """The records of the machine that knows most: a GPU's before a CPU's, the main machine before others.

    Rows of the small preset are no results. `preset` chooses rows, and `machine`, the name of its folder, whose.
    """
    tables = []
    for device in [machine] if machine else [*records.devices(), *records.devices(cpu=True)]:
        rows = records.read(device, experiment.chapter, experiment.table)
        if len(rows):
            rows = rows[rows["preset"] == preset if preset else rows["preset"] != "small"]
        if len(rows):
            tables.append(rows)
    on_gpu = [rows for rows in tables if rows["preset"].iloc[0] != "cpu"] or tables
    on_gpu.sort(key=lambda rows: (rows["gpu"].iloc[0] != main_machine(), -len(rows)))
    rows = on_gpu[0] if on_gpu else pd.DataFrame()
    return Results(experiment, _in_order(experiment, rows["preset"].iloc[0], rows) if len(rows) else rows)


def _in_order(experiment: Experiment, preset: str, rows: pd.DataFrame) -> pd.DataFrame:
    """Rows in the order of their configurations: in a file, one that was measured again stands at the end."""
    identity, configs = experiment.identity(preset), experiment.configurations(preset)
    position = {records.key(config, identity): place for place, config in enumerate(configs)}
    order = [position.get(records.key(row, identity), len(configs)) for row in rows.to_dict("records")]
    return rows.iloc[np.argsort(order, kind="stable")].reset_index(drop=True)


def main_machine() -> str:
    """The machine that the report names first: of the GPUs, else of the CPUs, the one with the most tables."""
    for cpu in (False, True):
        if names := records.devices(cpu=cpu):
            folder = max(names, key=lambda name: len(list((records.folder() / name).rglob("*.csv"))))
            files = sorted((records.folder() / folder).rglob("*.csv"))
            return next((row["gpu"] for file in files for row in records.whole_rows(file)), "")
    return ""


def table(frame: pd.DataFrame, caption: str) -> None:
    """Show a table with plain headings and a caption; cells without a value hold a dash, text is left-aligned.

    One of more than `LONG` rows is folded under its caption. A table of which nothing is measured isn't shown:
    `results` has said so.
    """
    if not len(frame) or (STATUS in frame and (frame[STATUS] == NOT_MEASURED).all()):
        return
    shown = _shown(frame)
    forms = {"text/html": _html(shown, caption), "text/plain": f"{caption}\n{shown.to_string(index=False)}"}
    display(forms, raw=True, metadata={"helpers": {"caption": caption}})


def figure(drawn: Figure, name: str, caption: str) -> None:
    """Save a figure as `figures/<name>.svg` and show it with its caption, which is its alternative text, too.

    The report takes the SVG. JupyterLab shows the image in the HTML, since it drops SVG from notebooks that aren't
    trusted and gives an image of its own no alternative text; other viewers take the PNG.
    """
    figures.save(drawn, name)
    svg, png = figures.svg(drawn, name), base64.b64encode(figures.png(drawn)).decode()
    image = f'<img src="data:image/png;base64,{png}" alt="{html.escape(caption)}">'
    forms = {"image/svg+xml": svg, "image/png": png, "text/html": image, "text/plain": caption}
    alternative = {"image/svg+xml": {"alt": caption}, "image/png": {"alt": caption}}  # nbconvert's HTML reads it here
    display(forms, raw=True, metadata={"helpers": {"figure": name, "caption": caption}} | alternative)
    display(Markdown(f"*{as_markdown(caption)}*"), metadata=LEFT_OUT)


def show_text(*sentences: str) -> None:
    """Show sentences as text of the report. Write the figures in them with f-strings that read the records."""
    display(Markdown(" ".join(sentences)))


def show_list(sentences: Iterable[str]) -> None:
    """Show sentences as a list."""
    display(Markdown("\n".join(f"- {sentence}" for sentence in sentences)))


def readme(sentences: Iterable[str]) -> None:
    """A list that the report copies into README.md, at the project's root; links name notebooks of this folder."""
    text = re.sub(r"\]\((\w+\.ipynb)\)", r"](notebooks/\1)", "\n".join(f"- {sentence}" for sentence in sentences))
    if text:
        display(Markdown(text), metadata={"helpers": {"readme": True, "report": False}})


def as_markdown(text: str) -> str:
    """Text, say of a record, that Markdown shows as it is: no links, tags, emphasis or further cells."""
    return re.sub(r"([\\`*_\[\]<>|$])", r"\\\1", text)


def columns(frame: pd.DataFrame, names: Iterable[str]) -> pd.DataFrame:
    """Select columns; missing ones become NaN."""
    return frame.reindex(columns=list(names))


def heading(name: str) -> str:
    """`backward_ms` -> `backward, ms`; `real_tokens_per_s_p20` -> `real tokens/s, p20`; a name with dots is code's."""
    if "." in name:
        return name
    if name.endswith(SPREAD):
        return f"{heading(name[:-4])}, {name[-3:]}"
    if name in UNITS:
        return UNITS[name]
    if name.endswith(A_SECOND):
        return f"{name.removesuffix(A_SECOND).replace('_', ' ')}/s"
    for unit, said in UNITS.items():
        if name.endswith("_" + unit):
            return f"{name.removesuffix('_' + unit).replace('_', ' ')}, {said}"
    return name.replace("_", " ")


def _shown(frame: pd.DataFrame) -> pd.DataFrame:
    """As text, with plain headings, and the GPU's column only if there are several."""
    several = "gpu" in frame and frame["gpu"].nunique() > 1
    shown = frame if several else frame.drop(columns="gpu", errors="ignore")
    return pd.DataFrame({heading(str(name)): _texts(shown[name]) for name in shown.columns})


def _html(shown: pd.DataFrame, caption: str) -> str:
    """A table of texts. Cells carry their alignment: a notebook that isn't trusted loses its style sheets."""
    left = [bool(shown[name].map(_is_text).any()) for name in shown.columns]

    def row(cells: Iterable[object], tag: str) -> str:
        styles = (f' style="text-align: {"left" if is_left else "right"}"' for is_left in left)
        return "".join(f"<{tag}{s}>{html.escape(str(c))}</{tag}>" for s, c in zip(styles, cells, strict=True))

    body = "\n".join(f"<tr>{row(cells, 'td')}</tr>" for cells in shown.itertuples(index=False))
    head, said = f"<thead><tr>{row(shown.columns, 'th')}</tr></thead>", html.escape(caption)
    if len(shown) > LONG:
        return f"<details><summary>{said}</summary><table>{head}<tbody>\n{body}\n</tbody></table></details>"
    return f"<table><caption>{said}</caption>{head}<tbody>\n{body}\n</tbody></table>"


def _texts(column: pd.Series) -> list[str]:
    """A column's cells; it holds whole numbers only if all of them are, and then at least one is above 9."""
    numbers = pd.to_numeric(column, errors="coerce").dropna()
    whole = bool(len(numbers)) and bool((numbers % 1 == 0).all()) and numbers.abs().max() > 9
    return [number(value, whole) for value in column]


def number(value: object, whole: bool = False) -> str:
    """Three significant digits (or an integer), yes or no for a bool, a dash for an empty cell.

    Thousands are separated from 10,000 on.
    """
    if value is None or value == "" or (isinstance(value, float) and value != value):
        return "–"
    if answer := YES_NO.get(str(value)):  # a bool, or its text in a record
        return answer
    if not isinstance(value, (int, float, np.integer, np.floating)):
        return str(value)
    if whole or isinstance(value, (int, np.integer)):
        return f"{int(value):d}" if abs(value) < 10_000 else f"{int(value):,d}"
    if abs(value) >= 999.5:
        return f"{value:.0f}" if abs(value) < 9999.5 else f"{value:,.0f}"
    return f"{value:#.3g}".rstrip(".")


def _is_text(shown: str) -> bool:
    return re.search(r"[^\d\s.,+\-–±%×e]", shown) is not None
