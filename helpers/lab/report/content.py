"""What of a notebook is read in the report: its cells as pieces of Typst, and the pictures that they show.

A piece is a mapping: its `kind` (text, code, printed or figure), its `text`, the `reader` that turns the
text into Typst (none for what is shown as it is), its `caption` in Markdown, `where` it stands and the `tags` of its
cell: `live` shows nothing, `show-code` shows the code, `appendix` stands at the end, `new-page` begins a page.
"""

import base64
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import nbformat
from nbconvert.filters import strip_ansi

from .convert import BuildError, convert

_MARKED = re.compile("\ue000(.*?)\ue000", re.DOTALL)
_TYPST_PICTURES = {".svg", ".png", ".jpg", ".jpeg", ".gif", ".webp", ".pdf"}


Piece = dict[str, Any]

_PICTURES = {"image/svg+xml": ".svg", "image/png": ".png", "image/jpeg": ".jpg"}
# Each ends at the end of the text at the latest: else many that are never closed take the square of its length.
_PARTS_OF_STYLE = re.compile(r"(?is)<(style|script)\b.*?(?:</\1\s*>|\Z)")
_DIMENSIONS = re.compile(r"<p>\d+ rows × \d+ columns</p>")
_CAPTION = re.compile(r"(?is)<(caption|summary)\b.{0,5000}?</\1\s*>")
_ALIGNED = re.compile(r' style="text-align: \w+"')  # style.typ aligns columns by what is in them
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
_FIGURE = re.compile(r"[A-Za-z0-9_.-]+")
PRINTED = 10_000  # characters that are shown of what a cell prints, two pages


@dataclass(frozen=True)
class Chapter:
    """What the template sets of one notebook, and the figures that the notebook names."""

    file: str
    number: int
    unnumbered: bool
    pieces: list[Piece]
    figures: dict[str, bytes] = field(default_factory=dict)


def chapter(notebook: nbformat.NotebookNode, name: str, source: Path, folder: Path, position: int = 1) -> Chapter:
    """Convert a notebook that lies in `source`, and write its pictures into `folder`.

    The chapter has the number that the file name begins with, so chapter 4 is `04_….ipynb`; `00_…` has none.
    """
    file = f"{name}.ipynb"
    parts = pieces(notebook)
    figures = _named_figures(parts, file)
    for piece in parts:
        if piece["kind"] == "figure":
            piece["text"] = _put(piece["content"], piece["suffix"], folder)
    _convert(parts, file)
    for piece in parts:
        if "reader" in piece:
            piece["text"] = _with_pictures(piece, f"{file}: {piece['where']}", source, folder)
    if not any(re.search(r"(?m)^= ", piece["text"]) for piece in parts if "reader" in piece):
        parts.insert(0, {"kind": "text", "text": '= #"' + name + '"', "tags": []})
    number = re.match(r"\d+", name)
    wanted = int(number[0]) if number else position
    return Chapter(file, wanted, wanted == 0, parts, figures)


def _named_figures(parts: list[Piece], file: str) -> dict[str, bytes]:
    figures: dict[str, bytes] = {}
    for piece in parts:
        if "name" in piece and not _FIGURE.fullmatch(str(piece["name"])):  # it becomes the name of a file
            allowed = "letters, digits, '_', '.' and '-'"
            raise BuildError(f"{file}: {piece['where']}: a figure is called {piece['name']!r}; allowed: {allowed}")
        if "name" in piece and figures.setdefault(piece["name"], piece["content"]) != piece["content"]:
            raise BuildError(f"{file}: {piece['where']}: another figure is called {piece['name']} too")
    return figures


def _convert(parts: list[Piece], file: str) -> None:
    texts = [(piece, "text", piece["reader"]) for piece in parts if "reader" in piece]
    texts += [(piece, "caption", "markdown") for piece in parts if "caption" in piece]
    try:
        converted = convert([(reader, piece[key]) for piece, key, reader in texts])
    except BuildError as error:
        raise BuildError(f"{file}: {error}") from None
    for (piece, key, _), typst in zip(texts, converted, strict=True):
        piece[key] = typst


def _with_pictures(piece: Piece, where: str, source: Path, folder: Path) -> str:
    def placed(found: re.Match) -> str:
        return _put(*_picture(found[1], piece, where, source), folder)

    return _MARKED.sub(placed, piece["text"])


def _picture(target: str, piece: Piece, where: str, source: Path) -> tuple[bytes, str]:
    """The bytes and the suffix of a picture in a text: a file, an attachment of its cell, or a data URL."""
    if embedded := re.match(r"data:image/(\w+)(?:\+xml)?;base64,(.*)", target, re.DOTALL):
        return base64.b64decode(embedded[2]), f".{embedded[1]}"
    if target.startswith("attachment:"):
        for kind, encoded in piece.get("attachments", {}).get(unquote(target[11:]), {}).items():
            suffix = "." + kind.partition("/")[2].removesuffix("+xml")
            return (encoded.encode() if suffix == ".svg" else base64.b64decode(encoded)), suffix
        raise BuildError(f"{where}: the attached image {target[11:]} is missing")
    if re.match(r"\w+://", target):
        raise BuildError(f"{where}: the image {target} lies on the network: keep a copy beside the notebook")
    path = source / unquote(target)
    if not path.is_file():
        raise BuildError(f"{where}: the image {target} does not exist")
    if path.suffix.lower() not in _TYPST_PICTURES:
        raise BuildError(f"{where}: the image {target} is not one of {', '.join(sorted(_TYPST_PICTURES))}")
    return path.read_bytes(), path.suffix.lower()


def _put(content: bytes, suffix: str, folder: Path) -> str:
    """Write a picture under a name made of its content, so that the name is the same in every build."""
    name = f"{hashlib.sha256(content).hexdigest()[:20]}{suffix}"
    (folder / name).write_bytes(content)
    return name


def pieces(notebook: nbformat.NotebookNode) -> list[Piece]:
    """The pieces of a notebook in their order, before anything is converted."""
    return [
        {**piece, "where": where, "tags": cell.metadata.get("tags", [])}
        for cell, where in places(notebook)
        for piece in _of_cell(cell)
    ]


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
    lines = text.replace("\r\n", "\n").split("\n")
    text = "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in lines)
    return _CONTROL.sub("", strip_ansi(text)).rstrip()


def note(output: nbformat.NotebookNode) -> dict[str, Any]:
    """The `helpers` metadata of an output: its `figure`, its `caption`, whether it is for the `report`."""
    said = output.get("metadata", {})
    for kind in output.get("data", {}):
        said = said.get(kind, {}) | said if isinstance(said.get(kind), dict) else said
    return dict(said.get("helpers", {}))


def _of_cell(cell: nbformat.NotebookNode) -> Iterator[Piece]:
    tags = cell.metadata.get("tags", [])
    if cell.cell_type == "markdown" and "live" not in tags:
        files = cell.get("attachments", {})
        yield {"kind": "text", "reader": "markdown", "text": cell.source, "attachments": files}
    if cell.cell_type != "code":
        return
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
        more = f"\n… and {len(text) - PRINTED:,} characters more" if len(text) > PRINTED else ""
        yield {"kind": "printed", "text": text[:PRINTED] + more}


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
    html = _ALIGNED.sub("", _DIMENSIONS.sub("", _PARTS_OF_STYLE.sub("", html)))
    return _CAPTION.sub("", html) if other_caption else html
