"""What a notebook uses to show what was measured: results, tables, figures and sentences that read the records.

On a GPU `results` measures what has no fresh record and records it. Without one it runs the small preset live, so
that every line of code is seen to work; what that prints is marked and stays out of the PDF, whose tables and figures
read the records only.
"""

import html
import inspect
import os
import re
import textwrap
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import pandas as pd
from IPython.display import Markdown, display
from matplotlib.figure import Figure

from . import figures, records
from .experiment import Experiment
from .machine import device, slug
from .records import STATUS, Row
from .runner import measure
from .tables import number

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # some builds of torch print a line whenever a profiler starts or stops

NOT_MEASURED = "not measured"
NOT_THE_RECORD = "**Small preset.** The code runs; tables and figures read the records of the full one."
NOT_A_RESULT = "**CPU, small preset: not a GPU result.** The code runs; tables and figures read the records."
LIVE = "HELPERS_LIVE"  # "no" in the environment: nothing is run live, tables come from the records alone
LEFT_OUT = {"helpers": {"report": False}}
UNITS = {"tflops": "TFLOP/s", "gb_per_s": "GB/s", "mb_per_s": "MB/s", "gib": "GiB", "mib": "MiB", "kib": "KiB"}
UNITS |= {unit: unit for unit in ("s", "ms", "us")}
A_SECOND, SPREAD = "_per_s", ("_p20", "_p80")


@dataclass(frozen=True)
class Results:
    """What is recorded of an experiment's full preset, on every recorded GPU.

    Of the host's work, where no GPU's machine has a record, those of CPUs; of what is `beside`, those of both.
    """

    experiment: Experiment
    rows: pd.DataFrame

    @property
    def measured(self) -> pd.DataFrame:
        """The rows that hold figures."""
        return self.rows[self.rows[STATUS] == "ok"] if len(self.rows) else self.rows

    @property
    def plan(self) -> pd.DataFrame:
        """The rows, and for each configuration that a GPU has none of, one that says that it is not measured."""
        identity = self.experiment.identity("full")
        configs = self.experiment.configurations("full")
        there = {(row["gpu"], records.key(row, identity)) for row in self.rows.to_dict("records")}
        gpus = list(dict.fromkeys(self.rows["gpu"])) if len(self.rows) else [None]
        absent = [
            ({"gpu": gpu} if gpu else {}) | config | {STATUS: NOT_MEASURED}
            for gpu in gpus
            for config in configs
            if (gpu, records.key(config, identity)) not in there
        ]
        lacking = pd.DataFrame(absent)
        order = {records.key(config, identity): number for number, config in enumerate(configs)}
        both = pd.concat([self.rows, lacking], ignore_index=True) if len(self.rows) else lacking
        position = [order.get(records.key(row, identity), len(order)) for row in both.to_dict("records")]
        return both.iloc[np.argsort(position, kind="stable")].reset_index(drop=True)

    @property
    def origin(self) -> str:
        """Where the rows come from, for a caption."""
        if not len(self.rows):
            return "Not measured yet." if self.experiment.host else "Not measured on a GPU yet."
        said = []
        for gpu, rows in self.rows.groupby("gpu", sort=False):
            versions = ", ".join(_version(*pair) for pair in _pairs(rows, "torch", "cuda", "driver"))
            dates = sorted(set(rows["date"]))
            when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
            old = int((rows["method"] != str(self.experiment.version)).sum())
            stale = f"; {old} rows by an older method" if old else ""
            said.append(f"{gpu}, {versions}, {when}{stale}")
        return "; ".join(said) + "."


def results(experiment: Experiment, *, refresh: bool = False) -> Results:
    """Measure what is missing on this GPU (or run the small preset live), and read the records.

    `refresh=True` measures again what is there.
    """
    if device().type == "cuda":
        measure([experiment], "full", refresh=refresh)
    elif os.environ.get(LIVE) != "no":
        display(Markdown(NOT_THE_RECORD if experiment.host else NOT_A_RESULT), metadata=LEFT_OUT)
        display(experiment("small"), metadata=LEFT_OUT)
    return recorded(experiment)


def recorded(experiment: Experiment) -> Results:
    """What the records hold of an experiment; nothing is measured."""
    tables = _recorded(experiment, records.devices())
    if experiment.beside or (experiment.host and not tables):
        tables += _recorded(experiment, records.devices(cpu=True))
    return Results(experiment, pd.concat(tables, ignore_index=True) if tables else pd.DataFrame())


def _recorded(experiment: Experiment, devices: Iterable[str]) -> list[pd.DataFrame]:
    """The rows of the full preset, of each device that has any."""
    tables = [records.read(device, experiment.chapter, experiment.table) for device in devices]
    full = [table[table["preset"] == "full"] for table in tables if len(table)]
    return [table for table in full if len(table)]


def table(frame: pd.DataFrame, caption: str) -> None:
    """Show a table with plain headings and a caption; cells without a value hold a dash, columns of text are left."""
    shown = _shown(frame)
    styler = shown.style.format(escape="html").hide(axis="index").set_caption(html.escape(caption))
    texts = [place for place, name in enumerate(shown.columns) if shown[name].map(_is_text).any()]
    left = [{"selector": f"{cell}.col{place}", "props": "text-align: left"} for place in texts for cell in ("th", "td")]
    own = f"{zlib.crc32(caption.encode()):08x}"  # else a table's style would be that of all in the notebook
    display(styler.set_table_styles(left).set_uuid(own), metadata={"helpers": {"caption": caption}})


def figure(drawn: Figure, name: str, caption: str) -> None:
    """Save a figure as `figures/<name>.svg` and show it with its caption."""
    figures.save(drawn, name)
    told = {"helpers": {"figure": name, "caption": caption}}
    display({"image/svg+xml": figures.svg(drawn, name), "text/plain": caption}, raw=True, metadata=told)
    display(Markdown(f"*{caption}*"), metadata=LEFT_OUT)


def figures_of(draw: Callable[[pd.DataFrame], Figure], rows: pd.DataFrame, name: str, caption: str) -> None:
    """A figure for each device that has rows: the first is called `name`, the others by their device, too."""
    for place, (gpu, found) in enumerate(rows.groupby("gpu", sort=False) if len(rows) else []):
        own = f"{name}-{slug(str(gpu))}" if place else name
        figure(draw(found), own, f"{caption} {gpu}." if rows["gpu"].nunique() > 1 else caption)


def source(*functions: object) -> None:
    """Show the code of functions, as it is."""
    text = "\n\n\n".join(textwrap.dedent(inspect.getsource(function)).rstrip() for function in functions)
    display(Markdown(f"```python\n{text}\n```"))


def say(*sentences: str) -> None:
    """Show sentences as text of the report. Write the figures in them with f-strings that read the records."""
    display(Markdown(" ".join(sentences)))


def items(sentences: Iterable[str]) -> None:
    """Show sentences as a list."""
    display(Markdown("\n".join(f"- {sentence}" for sentence in sentences)))


def readme(frame: pd.DataFrame, caption: str) -> None:
    """Show a table that the report also copies into README.md, as Markdown."""
    shown = _shown(frame)
    rows = [list(shown.columns), ["---"] * len(shown.columns), *shown.to_numpy().tolist()]
    lines = ["| " + " | ".join(cells) + " |" for cells in rows]
    text = "\n".join(lines) + f"\n\n{caption}"
    display(Markdown(text), metadata={"helpers": {"readme": True, "report": False}})


def columns(frame: pd.DataFrame, names: Iterable[str]) -> pd.DataFrame:
    """These columns in this order; those that nothing was measured for are empty."""
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


def _texts(column: pd.Series) -> list[str]:
    """A column's cells; it holds whole numbers only if all of them are, and then at least one is above 9."""
    numbers = pd.to_numeric(column, errors="coerce").dropna()
    whole = bool(len(numbers)) and bool((numbers % 1 == 0).all()) and numbers.abs().max() > 9
    return [number(value, whole) for value in column]


def _is_text(shown: str) -> bool:
    return re.search(r"[^\d\s.,+\-–±%×e]", shown) is not None


def _version(torch: str, cuda: str, driver: str) -> str:
    return f"torch {torch}" + ("" if cuda == "none" else f", CUDA {cuda}, driver {driver}")


def _pairs(rows: pd.DataFrame, *names: str) -> Iterable[Row]:
    return rows[list(names)].drop_duplicates().itertuples(index=False)
