"""A diagnosis as an HTML page, without scripts or network; what a profile names is escaped.

The sentence; the wall time as one bar of kinds of iterations; each iteration as a point over time; the account of a
recorded step; the findings with their source lines in context; then the last recorded step as a timeline.
"""

import linecache
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from math import log10

from ..script.iterations import EPOCHS, KINDS, NO_CORE, ORDINARY, PHASE, SLOW
from ..script.stacks import DRAWING, EVALUATING, SAVING, place
from .step_picture import COLOURS, picture
from .summary import LEAST, Diagnosis, Finding, Kind, Point, Wall, idle_reasons, milliseconds, recorded
from .trace import Trace

# Okabe and Ito's colours, as in the picture of the step
KIND_COLOURS = {
    ORDINARY: "#0072B2",
    SLOW: "#D55E00",
    EPOCHS: "#009E73",
    PHASE: "#56B4E9",
    KINDS[EVALUATING]: "#CC79A7",
    KINDS[SAVING]: "#E69F00",
    KINDS[DRAWING]: "#F0E442",
    NO_CORE: "#888888",
}
PROFILED, FAINT = "while recorded", "#B0B0B0"  # points that count for nothing, as the profiler slowed them
AROUND = 3  # source lines before and after a finding's
TICKS = [digit * 10.0**power for power in range(-3, 7) for digit in (1, 2, 5)]  # ms
_CONTROLS = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
_PLACE = re.compile(r"([^\s:]+):(\d+)\b")
# The policy forbids every script and every request, should markup ever get past the escaping.
_HEAD = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<style>
:root { color-scheme: light dark; --line: color-mix(in srgb, currentColor 18%, transparent); }
body { font: 15px/1.45 system-ui, sans-serif; max-width: 76em; margin: 1.5em auto; padding: 0 1em; }
h2 { font-size: 1.05em; margin: 1.8em 0 .4em; }
h3 { font-size: 1em; margin: 0 0 .3em; }
p { margin: .3em 0; overflow-wrap: anywhere; }
table { border-collapse: collapse; width: 100%; }
td, th { padding: .2em .6em .2em 0; text-align: left; vertical-align: top; overflow-wrap: anywhere; }
th { opacity: .75; font-weight: normal; }
td:first-child { min-width: 5.5em; }
td:last-child { min-width: 6.5em; }
td.number:first-child { min-width: 0; }
tr + tr > td { border-top: 1px solid var(--line); }
.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
.faint { opacity: .75; }
.lead { font-size: 1.15em; }
.bar { display: flex; height: 1.6em; border-radius: 3px; overflow: hidden; }
.dot { display: inline-block; width: .75em; height: .75em; border-radius: 50%; margin-right: .4em; }
.part { height: .8em; margin-top: .35em; }
.plot { position: relative; height: 15em; margin: 0 0 1.6em 4.2em; border-left: 1px solid var(--line); }
.plot svg { position: absolute; width: 100%; height: 100%; overflow: visible; }
.plot span { position: absolute; font-size: .8em; opacity: .75; white-space: nowrap; }
.y { right: 100%; margin: -.7em .5em 0 0; }
.x { top: 100%; }
.finding { border-left: 3px solid #CC3377; padding-left: .8em; margin: 1.2em 0; }
.code { overflow-x: auto; padding: .4em .6em; background: color-mix(in srgb, currentColor 6%, transparent); }
pre { margin: .4em 0; font-size: 13px; }
mark { background: #CC337740; color: inherit; display: block; }
.wide { overflow-x: auto; }
.step { min-width: 50em; }
.name { fill: #000; stroke: #fff; stroke-width: 2px; paint-order: stroke; pointer-events: none; }
</style>
"""


def page(diagnosis: Diagnosis, trace: Trace) -> str:
    """One HTML file, readable from 400 pixels of width on, light or dark as the reader's system is."""
    names = [str(device.get("name", "")) for device in trace.about.get("deviceProperties", [])]
    about = "; ".join(filter(None, [str(diagnosis.source or ""), *dict.fromkeys(names)]))
    verdict, change, first = diagnosis.verdict.partition(" Change first: ")
    sections = [
        f'<p class="faint">{escape(about)}</p>',
        f'<p class="lead">{escape(verdict)}{f" <strong>{escape(change + first)}</strong>" if change else ""}</p>',
        *(f"<p>⚠ {escape(warning.text)}</p>" for warning in diagnosis.warnings),
        *(_wall(diagnosis.wall) if diagnosis.wall else ()),
        *_account(diagnosis),
        *_findings(diagnosis),
        *_lines(diagnosis),
        *(f'<p class="faint">{escape(note.text)}</p>' for note in diagnosis.notes),
        picture(diagnosis, trace),
    ]
    title = f"<title>{escape(diagnosis.verdict)}</title>\n</head>\n<body>\n"
    html = "\n".join([_HEAD + title, *sections, "</body>\n</html>\n"])
    # Names in a trace may hold control characters, and halves of others.
    return html.translate(_CONTROLS).encode("utf-8", "replace").decode()


def _table(heads: Sequence[str], rows: Iterator[Sequence[str]], numbers: Sequence[int]) -> str:
    """Cells are HTML; `numbers` are the columns that are aligned to the right."""
    names = [' class="number"' if column in numbers else "" for column in range(len(heads))]
    head = "".join(f"<th{name}>{text}</th>" for name, text in zip(names, heads, strict=True))
    body = ("".join(f"<td{name}>{text}</td>" for name, text in zip(names, row, strict=True)) for row in rows)
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{cells}</tr>' for cells in body)}</table>"


def _wall(wall: Wall) -> Iterator[str]:
    """The bar of kinds with its table, and each iteration as a point."""
    first, *others = wall.kinds
    kinds = [first, *(kind for kind in others if kind.share >= LEAST)]
    yield f"<h2>Wall time: {wall.seconds:.1f} s of {first.count:,} iterations</h2>"
    parts = (
        f'<div style="width:{kind.share:.2%};background:{KIND_COLOURS[kind.name]}" title="{kind.name}"></div>'
        for kind in kinds
    )
    yield f'<div class="bar">{"".join(parts)}</div>'
    yield _table(["", "share", "count", "each", "explained by"], map(_kind, kinds), (1, 2, 3))
    if wall.points:
        yield "<h2>Each iteration</h2>"
        yield _plot(wall.points)


def _kind(kind: Kind) -> list[str]:
    parts = [f"{escape(name)} {share:.0%}" for name, share in kind.findings]
    parts += [escape(place(*kind.where[:2]))] if kind.where and kind.name == PHASE else []
    parts += [f"no finding {kind.unexplained:.0%}"] if kind.unexplained >= LEAST else []
    took = milliseconds(kind.took_ms)
    return [_dot(kind.name), f"{kind.share:.0%}", f"{kind.count:,}", took, ", ".join(parts)]


def _dot(kind: str) -> str:
    return f'<span class="dot" style="background:{KIND_COLOURS.get(kind, FAINT)}"></span>{kind or PROFILED}'


def _plot(points: Sequence[Point]) -> str:
    """Milliseconds, on a scale of logarithms, over seconds: as wide as the page, whose labels keep their size."""
    took = [1e3 * max(seconds, 1e-6) for _, seconds, _ in points]
    low = max((tick for tick in TICKS if tick <= min(took)), default=TICKS[0])
    high = min((tick for tick in TICKS if tick >= max(took)), default=TICKS[-1])
    last, decades = max(points[-1][0], 1e-9), log10(high / low) or 1.0

    def height(ms: float) -> float:
        """In percent from the top."""
        return 100 * (1 - log10(ms / low) / decades)

    drawn: dict[str, list[str]] = defaultdict(list)
    for (at, _, kind), ms in zip(points, took, strict=True):
        drawn[kind].append(f"M{100 * at / last:.2f} {height(ms):.2f}h0")
    style = 'fill="none" stroke-width="5" stroke-linecap="round" vector-effect="non-scaling-stroke"'
    dots = (f'<path d="{"".join(d)}" stroke="{KIND_COLOURS.get(kind, FAINT)}" {style}/>' for kind, d in drawn.items())
    labels = [tick for tick in TICKS if low <= tick <= high]
    labels = labels[:: len(labels) // 8 + 1]
    heights = (f'<span class="y" style="top:{height(tick):.2f}%">{milliseconds(tick)}</span>' for tick in labels)
    sides = ("left:0", 0.0), ("left:50%", last / 2), ("right:0", last)
    times = (f'<span class="x" style="{side}">{seconds:.3g} s</span>' for side, seconds in sides)
    svg = f'<svg viewBox="0 0 100 100" preserveAspectRatio="none">{"".join(dots)}</svg>'
    legend = "&emsp;".join(_dot(kind) for kind in drawn)
    return f'<p>{legend}</p><div class="plot">{svg}{"".join(heights)}{"".join(times)}</div>'


def _account(diagnosis: Diagnosis) -> Iterator[str]:
    yield f"<h2>Account: {recorded(diagnosis)}</h2>"

    def rows() -> Iterator[list[str]]:
        for name, share in diagnosis.parts.items():
            yield _part(name, share, COLOURS.get(name, FAINT))
            for reason, inside in idle_reasons(diagnosis).items() if name == "idle" else ():
                yield _part(f"– {reason}", inside, COLOURS.get(reason, FAINT))

    yield _table(["", "share", ""], rows(), (1,))


def _part(name: str, share: float, colour: str) -> list[str]:
    bar = f'<div class="part" style="width:{min(share, 1):.1%};background:{colour}"></div>'
    return [escape(name), f"{share:.1%}", f'<div style="min-width:8em">{bar}</div>']


def _findings(diagnosis: Diagnosis) -> Iterator[str]:
    options = sum(finding.option for finding in diagnosis.findings)
    yield "<h2>Findings</h2>" if options < len(diagnosis.findings) or not options else ""
    for number, finding in enumerate(diagnosis.findings, 1):
        if number == len(diagnosis.findings) - options + 1:
            yield "<h2>What could be faster still</h2>"
        yield _finding(number, finding, diagnosis.files)
    if not diagnosis.findings:
        yield f"<p>No finding could bring {LEAST:.0%} or more.</p>"


def _finding(number: int, finding: Finding, files: Mapping[str, str]) -> str:
    source = "".join(_in_context(finding.where, files))
    where = f'<pre class="code">{source}</pre>' if source else ""
    return (
        f'<div class="finding"><h3>{number}. {escape(finding.finding)}: {escape(finding.gain)}</h3>'
        f"<p><code>{escape(finding.where)}</code></p>{where}"
        f"<p>{escape(finding.evidence)}</p><p>→ {escape(finding.advice)}</p></div>"
    )


def _in_context(where: str, files: Mapping[str, str]) -> Iterator[str]:
    """The source around the line that a place begins with, where its file is known and can still be read."""
    place = _PLACE.match(where)
    lines = linecache.getlines(files.get(place[1], "")) if place else []
    if not place or not 0 < int(place[2]) <= len(lines):
        return
    chosen = int(place[2])
    for number in range(max(chosen - AROUND, 1), min(chosen + AROUND, len(lines)) + 1):
        line = escape(f"{number:5}  {lines[number - 1].rstrip()}")
        yield f"<mark>{line}</mark>" if number == chosen else f"{line}\n"


def _lines(diagnosis: Diagnosis) -> Iterator[str]:
    if diagnosis.lines:
        yield "<h2>Most expensive lines of the loop as it runs unrecorded</h2>"
        rows = (
            [f"{line.share:.0%}", f"<code>{escape(f'{line.where}  {line.source}')}</code>", escape(line.activity)]
            for line in diagnosis.lines
        )
        yield _table(["share", "line", ""], rows, (0,))
