"""What of a notebook is read in the report: each cell becomes none, one or several pieces.

A piece is a mapping: its `kind` (text, code, printed or figure), its `text`, the `reader` that turns the
text into Typst (none for what is shown as it is), its `caption` in Markdown, and `where` it stands.
"""

import base64
import re
from collections.abc import Iterator
from typing import Any

import nbformat
from nbconvert.filters import strip_ansi

Piece = dict[str, Any]

_PICTURES = {"image/svg+xml": ".svg", "image/png": ".png", "image/jpeg": ".jpg"}
_PARTS_OF_STYLE = re.compile(r"(?is)<(style|script)\b.*?</\1\s*>")
_DIMENSIONS = re.compile(r"<p>\d+ rows × \d+ columns</p>")
_CAPTION = re.compile(r"(?is)<caption\b.*?</caption\s*>")
_OVERWRITTEN = re.compile(r"[^\n]*\r(?!\n)")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


def pieces(notebook: nbformat.NotebookNode) -> list[Piece]:
    """The pieces of a notebook in their order, before anything is converted."""
    return [{**piece, "where": where} for cell, where in places(notebook) for piece in _of_cell(cell)]


def places(notebook: nbformat.NotebookNode) -> Iterator[tuple[nbformat.NotebookNode, str]]:
    """Each cell with the name a reader finds it by: `In [3]`, or `Markdown cell 7` counting all cells.

    A code cell without code is not run, so it takes no number.
    """
    ran = 0
    for position, cell in enumerate(notebook.cells, 1):
        if cell.cell_type == "code" and cell.source.strip():
            ran += 1
            yield cell, f"In [{ran}]"
        else:
            yield cell, f"{cell.cell_type.capitalize()} cell {position}"


def plain(text: str) -> str:
    """Printed text without colours, and without the states that a progress bar wrote over."""
    text = _OVERWRITTEN.sub("", text.replace("\r\n", "\n"))
    return _CONTROL.sub("", strip_ansi(text)).rstrip()


def note(output: nbformat.NotebookNode) -> dict[str, Any]:
    """The `helpers` metadata of an output: its `figure`, its `caption`, whether it is for the `report`."""
    said = output.get("metadata", {})
    for kind in output.get("data", {}):
        said = said.get(kind, {}) | said if isinstance(said.get(kind), dict) else said
    return dict(said.get("helpers", {}))


def _of_cell(cell: nbformat.NotebookNode) -> Iterator[Piece]:
    if cell.cell_type == "markdown":
        files = cell.get("attachments", {})
        yield {"kind": "text", "reader": "markdown", "text": cell.source, "attachments": files}
    if cell.cell_type != "code":
        return
    tags = cell.metadata.get("tags", [])
    if "show-code" in tags and cell.source.strip():
        yield {"kind": "code", "text": cell.source.strip("\n")}
    if "live" in tags:
        return
    printed = ""
    for output in cell.outputs:
        if output.output_type == "stream":
            # One print may arrive in several parts; a progress bar's do.
            printed += output.text if output.name == "stdout" else ""
            continue
        yield from _printed(printed)
        printed = ""
        if note(output).get("report", True):
            yield from _of_output(output)
    yield from _printed(printed)


def _printed(text: str) -> Iterator[Piece]:
    if text := plain(text):
        yield {"kind": "printed", "text": text}


def _of_output(output: nbformat.NotebookNode) -> Iterator[Piece]:
    """The richest form that can be set: picture, table, Markdown, LaTeX, plain text."""
    if output.output_type == "error":
        yield from _printed(f"{output.ename}: {output.evalue}")
        return
    data, said = output.data, note(output)
    caption = {"caption": said["caption"]} if said.get("caption") else {}
    picture = next((kind for kind in _PICTURES if kind in data), None)
    html = data.get("text/html", "")
    if picture:
        encoded = data[picture]
        is_svg = picture == "image/svg+xml"
        content = encoded.encode() if is_svg else base64.b64decode(encoded)
        name = {"name": said["figure"]} if said.get("figure") and is_svg else {}
        yield {"kind": "figure", "content": content, "suffix": _PICTURES[picture], **name, **caption}
    elif "<table" in html:
        yield {"kind": "text", "reader": "html", "text": _bare_html(html, bool(caption)), **caption}
    elif "text/markdown" in data:
        yield {"kind": "text", "reader": "markdown", "text": data["text/markdown"]}
    elif "text/latex" in data:
        yield {"kind": "text", "reader": "latex", "text": data["text/latex"]}
    elif html and data.get("text/plain", "<").startswith("<"):  # the plain text is only an object's name
        yield {"kind": "text", "reader": "html", "text": _bare_html(html, False)}
    elif "application/vnd.jupyter.widget-view+json" not in data:
        yield from _printed(data.get("text/plain", ""))


def _bare_html(html: str, other_caption: bool) -> str:
    html = _DIMENSIONS.sub("", _PARTS_OF_STYLE.sub("", html))
    return _CAPTION.sub("", html) if other_caption else html
