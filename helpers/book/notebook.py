"""What a notebook uses to show what was measured: results, tables, figures, sentences and claims.

    ladder = chapters.rush.ladder.on(GPU)

    @when(ladder)                        # runs if the table is measured, else leaves one line with what to run
    def _(ladder):
        table(ladder.rungs, "Each rung against the one before it.")
        say(f"From the plain loop to the last rung: {ladder.total}.")
        claim("The last rung is twice as fast", ladder.total.at_least(2))  # a prediction: holds or does not hold
        say(reading("All changes together pay.", ladder.total.at_least(2)))  # what its author read in these records

Nothing is measured here. What has no record yet is left out of the PDF, whose last page lists it.
"""

import base64
import html
import os
import re
from collections.abc import Callable, Iterable

import matplotlib.style
import pandas as pd
from IPython.display import Markdown, display
from matplotlib.figure import Figure

from ..lab import STATUS, markdown
from ..lab.device_share import DEVICE_SHARE, HOST_BOUND, host_bound
from ..lab.files import project_root
from . import figures, store
from .table import OnMachine
from .values import FAILS, HOLDS, NOT_MEASURED, Verdict, number

__all__ = ["claim", "figure", "reading", "readme", "say", "show_list", "table", "when"]

matplotlib.style.use(figures.STYLE)  # in a notebook, all that is drawn is in the house style
os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # some builds of torch print a line whenever a profiler starts or stops

LEFT_OUT = {"helpers": {"report": False}}
UNITS = {"tflops": "TFLOP/s", "gb_per_s": "GB/s", "mb_per_s": "MB/s", "gib": "GiB", "mib": "MiB", "kib": "KiB"}
UNITS |= {"s": "s", "ms": "ms", "us": "µs"}
LONG = 12  # rows: a longer table is folded
OF_TIME = (", s", ", ms", ", µs", "ms (p20–p80)")  # ends of headings of times
A_SECOND, SPREAD = "_per_s", ("_p20", "_p80")


def when(*needed: OnMachine) -> Callable[[Callable], None]:
    """Run the function that it decorates, with these tables, if all are measured; else show what to run."""

    def run(cell: Callable) -> None:
        tables = [table for numbers in needed for table in numbers.sources]
        missing = [table.experiment for table in tables if not len(table.measured)]
        for experiment in missing:
            line = f"*Not measured yet. To measure it: `dlspeed measure {experiment.name}`.*"
            display(Markdown(line), metadata=LEFT_OUT)
        if not missing:
            cell(*needed)

    return run


def table(frame: pd.DataFrame, caption: str) -> None:
    """Show a table with plain headings and a caption; cells without a value hold a dash, text is left-aligned.

    One of more than `LONG` rows is folded under its caption. A table of which nothing is measured isn't shown.
    Host-bound rows, by their column `device_share`, have a mark in place of that column.
    """
    if not len(frame) or (STATUS in frame and (frame[STATUS] == NOT_MEASURED).all()):
        return
    texts = _as_texts(frame)
    forms = {"text/html": _html(texts, caption), "text/plain": f"{caption}\n{texts.to_string(index=False)}"}
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
    display(Markdown(f"*{markdown.escaped(caption.strip())}*"), metadata=LEFT_OUT)


def show_list(sentences: Iterable[str], ordered: bool = False) -> None:
    """Show sentences as a list; each is checked as `say` does."""
    if complete := _complete(sentences):
        display(Markdown("\n".join(f"{'1.' if ordered else '-'} {sentence}" for sentence in complete)))


def say(*sentences: str) -> None:
    """Show sentences as one paragraph of the report, their numbers formatted from `Number`s.

    A sentence whose number isn't measured is left out of the report. No number is typed: a test reads the cells.
    """
    if complete := _complete(sentences):
        display(Markdown(" ".join(complete)))


def _complete(sentences: Iterable[str]) -> list[str]:
    """The sentences whose numbers are all measured. The others are shown in the notebook alone."""
    complete = []
    for sentence in sentences:
        if f"[{NOT_MEASURED}: " in sentence:
            display(Markdown(f"*{markdown.escaped(sentence)}*"), metadata=LEFT_OUT)
        else:
            complete.append(" ".join(sentence.split()))
    return complete


def claim(statement: str, verdict: Verdict, holds: bool | None = None) -> None:
    """Show whether a goal or a prediction holds on the machine that is shown, with the number and the limit.

    With `holds` it is a sentence of its own that interprets: see `reading`.
    """
    if holds is not None:
        say(reading(statement, verdict, holds=holds))
        return
    number = verdict.number
    reason = _told(verdict) if number.measured else f"needs {number.missing}"
    display(Markdown(f"*{verdict.outcome.capitalize()}:* {statement}: {reason}."))


def _told(verdict: Verdict) -> str:
    return f"{verdict.number}; limit: {verdict.bound}"


def reading(sentence: str, *verdicts: Verdict, holds: bool = True) -> str:
    """A sentence that interprets the project's records, for `say`, while its verdicts are what its author read.

    It belongs to these records: where they change so that one of the verdicts isn't `holds` any more, and where others
    are shown, the bare outcomes take its place. The build lists the sentences that no longer hold.
    """
    as_read = all(verdict.outcome == (HOLDS if holds else FAILS) for verdict in verdicts)
    own = store.folder().resolve() == project_root() / "data" / "results"
    if own and as_read:
        return sentence
    if own:
        line = f"*No longer so: {markdown.escaped(sentence)}*"
        display(Markdown(line), metadata={"helpers": {"report": False, "outdated": sentence}})
    return " ".join(f"*{verdict.outcome.capitalize()}:* {_told(verdict)}." for verdict in verdicts)


def readme(frame: pd.DataFrame, sentences: Iterable[str]) -> None:
    """A table and sentences that the report copies into README.md, where links to notebooks name their folder."""
    rows = markdown.table(frame.columns, frame.itertuples(index=False)) if len(frame) else ""
    text = rows + "\n\n" + " ".join(_complete(sentences))
    if text := re.sub(r"\]\((\w+\.ipynb[^)]*)\)", r"](notebooks/\1)", text).strip():
        display(Markdown(text), metadata={"helpers": {"readme": True, "report": False}})


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
    for unit, symbol in UNITS.items():
        if name.endswith("_" + unit):
            return f"{name.removesuffix('_' + unit).replace('_', ' ')}, {symbol}"
    return name.replace("_", " ")


def _as_texts(frame: pd.DataFrame) -> pd.DataFrame:
    """As text, with plain headings, without empty columns, host-bound rows marked at their first time, and the GPU's
    column only if there are several."""
    several = "gpu" in frame and frame["gpu"].nunique() > 1
    visible = frame.drop(columns=[DEVICE_SHARE] if several else ["gpu", DEVICE_SHARE], errors="ignore")
    texts = pd.DataFrame({heading(str(name)): _texts(visible[name]) for name in visible.columns})
    texts = texts.loc[:, (texts != "–").any()]
    marked = next((place for place, name in enumerate(texts) if name.endswith(OF_TIME)), 0)
    for row, cells in enumerate(frame.to_dict("records")):
        if host_bound(cells):
            texts.iloc[row, marked] += HOST_BOUND
    return texts


def _html(texts: pd.DataFrame, caption: str) -> str:
    """A table of texts. Cells carry their alignment: a notebook that isn't trusted loses its style sheets."""
    left = [bool(texts[name].str.contains(r"[^\d\s.,+\-–±%×†‡e]").any()) for name in texts.columns]

    def row(cells: Iterable[object], tag: str) -> str:
        styles = (f' style="text-align: {"left" if is_left else "right"}"' for is_left in left)
        return "".join(f"<{tag}{s}>{html.escape(str(c))}</{tag}>" for s, c in zip(styles, cells, strict=True))

    body = "\n".join(f"<tr>{row(cells, 'td')}</tr>" for cells in texts.itertuples(index=False))
    head, title = f"<thead><tr>{row(texts.columns, 'th')}</tr></thead>", html.escape(caption)
    if len(texts) > LONG:
        return f"<details><summary>{title}</summary><table>{head}<tbody>\n{body}\n</tbody></table></details>"
    return f"<table><caption>{title}</caption>{head}<tbody>\n{body}\n</tbody></table>"


def _texts(column: pd.Series) -> list[str]:
    """A column's cells; it holds whole numbers only if all of them are, and then at least one is above 9."""
    numbers = pd.to_numeric(column, errors="coerce").dropna()
    whole = bool(len(numbers)) and bool((numbers % 1 == 0).all()) and numbers.abs().max() > 9
    return [number(value, whole) for value in column]
