"""The last step of a profile as SVG: its tracks, what the device does, and over them when each finding happened.

What is narrower than a pixel is merged, so 20,000 events take at most 2 MB; pointing at a span names it.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

import pandas as pd

from .account import Spans, intersect, names_collective, states, timeline
from .summary import MOST_FINDINGS, Diagnosis, milliseconds
from .trace import Trace

# Okabe and Ito's colours, which remain distinct under colour blindness, and greys.
COLOURS = {
    "compute": "#0072B2",
    "operators": "#0072B2",
    "communication": "#D55E00",
    "copies": "#E69F00",
    "idle": "#A6A6A6",
    "loader": "#CC79A7",
    "optimizer": "#009E73",
    "Python": "#F0E442",
    "inside an op": "#56B4E9",
    "wait for the device": "#555555",
    "before the first kernel": "#CFCFCF",
    "start-up": "#222222",
    "between queued kernels": "#E6E6E6",
    "annotations": "#CC79A7",
    "host": "#56B4E9",
    "backward thread": "#009E73",
}
MARK = "#CC3377"  # of findings
LEFT, WIDTH, ROW, GAP, CHARACTER = 170, 980, 18, 4, 6.2  # in SVG units; a unit is about a pixel
MOST_NAME = 56


@dataclass
class Row:
    """One line of the picture: (begin, end, name) in ms since the step began, disjoint and in order."""

    label: str
    spans: list[tuple[float, float, str]]
    about: str = ""
    colour: str = ""  # else each span's own


def picture(diagnosis: Diagnosis, trace: Trace) -> str:
    """The timeline with its heading, as HTML; a sentence where the step holds no events."""
    table = timeline(trace)
    title = f"<h2>{escape(trace.steps[-1].name)}, recorded</h2>"
    if table.empty:
        return f"{title}<p>This step holds no events to draw.</p>"
    start = trace.steps[-1].begin
    begin, end = min(0.0, float(table.begin_ms.min())), float(table.end_ms.max())
    marks = list(_marks(diagnosis, start, begin, end))
    track, parts = states(trace)
    account = sorted((*span, part) for part, spans in parts.items() for span in _clipped(spans, start, begin, end))
    rows = [*marks, Row(f"{track}: account", account), *_tracks(table)]
    ends = (trace.steps[-1].end - start) / 1e3
    caption = f"{milliseconds(end - begin)}."
    if marks:
        caption += " Rows with numbers are the findings."
    if ends < end:
        caption += " Device work belongs to the step that launched it: it goes on after the step's end, dashed."
    return f'{title}<p class="faint">{caption}</p><div class="wide">{_svg(rows, begin, end, ends)}</div>'


def _clipped(spans: Spans, start: float, begin: float, end: float) -> Spans:
    """Spans in µs on the profile's clock as ms since the step's start, as far as they are within [begin, end]."""
    seen = intersect(spans, [(start + 1e3 * begin, start + 1e3 * end)])
    return [((first - start) / 1e3, (last - start) / 1e3) for first, last in seen]


def _marks(diagnosis: Diagnosis, start: float, begin: float, end: float) -> Iterator[Row]:
    for number, finding in enumerate(diagnosis.findings[:MOST_FINDINGS], 1):
        name = f"{number}. {finding.finding}"
        spans = [(*span, name) for span in _clipped(finding.spans, start, begin, end)]
        if spans:
            yield Row(name, spans, f"{name}: {finding.gain}", MARK)


def _tracks(table: pd.DataFrame) -> Iterator[Row]:
    """A row for each track, and for spans inside another one below it."""
    order = {"annotations": 0, "host": 1, "backward thread": 2}
    for track, events in sorted(table.groupby("track", sort=False), key=lambda group: order.get(group[0], 3)):
        rows: list[Row] = []
        label = str(track)
        for event in events.sort_values("begin_ms", kind="stable").itertuples():
            depth = next((i for i, row in enumerate(rows) if row.spans[-1][1] <= event.begin_ms), len(rows))
            if depth == len(rows) < 3:
                rows.append(Row("" if rows else label, [], label, COLOURS.get(label, "")))
            rows[min(depth, 2)].spans.append((event.begin_ms, event.end_ms, event.name))
        yield from rows


def _svg(rows: list[Row], begin: float, end: float, step_end: float) -> str:
    scale, height = WIDTH / (end - begin or 1.0), len(rows) * (ROW + GAP) + 24
    drawn = []
    for number, row in enumerate(rows):
        top = 20 + number * (ROW + GAP)
        label = row.label if len(row.label) <= 26 else f"{row.label[:25]}…"
        text = f'<text x="0" y="{top + 13}">{escape(label)}<title>{escape(row.about)}</title></text>'
        drawn.append(f'{text}<g transform="translate(0 {top})">{_spans(row, begin, scale)}</g>')
    x = LEFT + (step_end - begin) * scale
    ends = f'<path d="M{x:.1f} 16V{height}" stroke="currentColor" stroke-dasharray="4 3"/>'
    return (
        f'<svg class="step" viewBox="0 0 {LEFT + WIDTH + 20} {height}" width="100%" fill="currentColor" font-size="11">'
        f"{_axis(begin, end, scale, height)}{''.join(drawn)}{ends if begin < step_end < end else ''}</svg>"
    )


def _axis(begin: float, end: float, scale: float, height: int) -> str:
    unit = 10 ** floor(log10((end - begin) or 1.0)) / 2  # from 2 to 20 ticks
    ticks = []
    for index in range(ceil(begin / unit), floor(end / unit) + 1):
        x = LEFT + (index * unit - begin) * scale
        ticks.append(f'<path d="M{x:.1f} 16V{height}" stroke="currentColor" opacity=".15"/>')
        ticks.append(f'<text x="{x:.1f}" y="11" text-anchor="middle" opacity=".75">{index * unit:.6g} ms</text>')
    return "".join(ticks)


def _spans(row: Row, begin: float, scale: float) -> str:
    """Spans of a pixel or more, each with its name; narrower ones within a pixel as one of their length together."""
    drawn, names = [], []
    narrow: dict[tuple[int, str], list[tuple[float, str]]] = defaultdict(list)
    for first, last, name in row.spans:
        x, width = LEFT + (first - begin) * scale, (last - first) * scale
        colour = row.colour or COLOURS[_part(name)]
        if width < 1:
            narrow[int(x), colour].append((last - first, name))
            continue
        drawn.append(_rect(x, width, colour, f"{_cut(name)}: {milliseconds(last - first)}"))
        if row.colour != MARK and width > 5 * CHARACTER:
            label = escape(name[: int((width - 3) / CHARACTER)])
            names.append(f'<text class="name" x="{x + 2:.1f}" y="13">{label}</text>')
    for (x, colour), events in narrow.items():
        total, (_, longest) = sum(ms for ms, _ in events), max(events)
        others = f", {len(events) - 1} shorter spans with it" if len(events) > 1 else ""
        title = f"{_cut(longest)}{others}: {milliseconds(total)}"
        drawn.append(_rect(x, min(max(total * scale, 0.1), 1), colour, title))
    return "".join(drawn + names)


def _rect(x: float, width: float, colour: str, title: str) -> str:
    place = f'x="{x:.1f}" width="{width:.1f}" height="{ROW}" fill="{colour}"'
    return f"<rect {place}><title>{escape(title, quote=False)}</title></rect>"


def _part(name: str) -> str:
    """The part of the account that a span of the device's belongs to."""
    if (part := name.removeprefix("idle: ")) in COLOURS:
        return part
    if name.startswith(("Memcpy", "Memset")):
        return "copies"
    return "communication" if names_collective(name) else "compute"


def _cut(name: str) -> str:
    return name if len(name) <= MOST_NAME else f"{name[: MOST_NAME - 1]}…"
