"""What of a notebook is read in the report: its cells as pieces of Typst, and the pictures that they show.

A piece is a mapping: its `kind` (text, code, printed or figure), its `text`, the `reader` that turns the
text into Typst (none for what is shown as it is), its `caption` in Markdown, `where` it stands and the `tags` of its
cell: `live` shows nothing, `show-code` shows the code, `appendix` stands at the end, `new-page` begins a page.
"""

import base64
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
from nbconvert.filters import strip_ansi

from .convert import BuildError, convert

Piece = dict[str, Any]

_TABLE = re.compile(r"<table.*</table>", re.DOTALL)
_CAPTION = re.compile(r"<caption.*?</caption>", re.DOTALL)
_ALIGNED = re.compile(r' style="text-align: \w+"')  # style.typ aligns columns by what is in them
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
PRINTED = 10_000  # characters that are shown of what a cell prints, two pages


@dataclass(frozen=True)
class Chapter:
    """What the template sets of one notebook; the pictures lie in the folder that Typst compiles in."""

    file: str
    number: int  # 0: the chapter has none
    pieces: list[Piece]


def chapter(notebook: nbformat.NotebookNode, name: str, folder: Path) -> Chapter:
    """Convert a notebook, and write its figures into `folder`.

    The chapter has the number that the file name begins with, so chapter 4 is `04_….ipynb`; `00_…` has none.
    """
    file = f"{name}.ipynb"
    pieces = [
        {**piece, "where": where, "tags": cell.metadata.get("tags", [])}
        for cell, where in places(notebook)
        for piece in _of_cell(cell)
    ]
    for piece in pieces:
        if piece["kind"] == "figure":
            piece["text"] = _put(piece["content"], piece["suffix"], folder)
    _convert(pieces, file)
    return Chapter(file, int(re.match(r"\d*", name)[0] or 0), pieces)


def _convert(pieces: list[Piece], file: str) -> None:
    texts = [(piece, "text", piece["reader"]) for piece in pieces if "reader" in piece]
    texts += [(piece, "caption", "markdown") for piece in pieces if "caption" in piece]
    try:
        converted = convert([(reader, piece[key]) for piece, key, reader in texts])
    except BuildError as error:
        raise BuildError(f"{file}: {error}") from None
    for (piece, key, _), typst in zip(texts, converted, strict=True):
        piece[key] = typst


def _put(content: bytes, suffix: str, folder: Path) -> str:
    """Write a picture under a name made of its content, so that the name is the same in every build."""
    name = f"{hashlib.sha256(content).hexdigest()[:20]}{suffix}"
    (folder / name).write_bytes(content)
    return name


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


def note(output: nbformat.NotebookNode) -> dict[str, Any]:
    """The `helpers` metadata of an output: its `figure`, its `caption`, whether it is for the `report`."""
    return output.get("metadata", {}).get("helpers", {})


def _of_cell(cell: nbformat.NotebookNode) -> Iterator[Piece]:
    tags = cell.metadata.get("tags", [])
    if cell.cell_type == "markdown" and "live" not in tags:
        yield {"kind": "text", "reader": "markdown", "text": cell.source}
    if cell.cell_type != "code":
        return
    if "show-code" in tags:
        yield {"kind": "code", "text": cell.source.strip("\n")}
    for output in cell.outputs if "live" not in tags else []:
        if note(output).get("report", True) and output.get("name") != "stderr":
            yield from _of_output(output)


def _of_output(output: nbformat.NotebookNode) -> Iterator[Piece]:
    """The richest form that can be set: picture, table, Markdown, plain text."""
    if output.output_type in ("stream", "error"):
        text = output.text if output.output_type == "stream" else f"{output.ename}: {output.evalue}"
        yield from _printed(text)
        return
    data, about = output.data, note(output)
    caption = {"caption": about["caption"]} if "caption" in about else {}
    if "image/svg+xml" in data:
        name = {"name": about["figure"]} if "figure" in about else {}
        yield {"kind": "figure", "content": data["image/svg+xml"].encode(), "suffix": ".svg", **name, **caption}
    elif "image/png" in data:
        yield {"kind": "figure", "content": base64.b64decode(data["image/png"]), "suffix": ".png", **caption}
    elif html := _TABLE.search(data.get("text/html", "")):
        bare = _ALIGNED.sub("", _CAPTION.sub("", html[0]) if caption else html[0])
        yield {"kind": "text", "reader": "html", "text": bare, **caption}
    elif "text/markdown" in data:
        yield {"kind": "text", "reader": "markdown", "text": data["text/markdown"]}
    else:
        yield from _printed(data.get("text/plain", ""))


def _printed(text: str) -> Iterator[Piece]:
    """Printed text without colours, and without the states that a progress bar wrote over."""
    lines = (line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))
    if text := _CONTROL.sub("", strip_ansi("\n".join(lines))).rstrip():
        more = f"\n… and {len(text) - PRINTED:,} characters more" if len(text) > PRINTED else ""
        yield {"kind": "printed", "text": text[:PRINTED] + more}
