"""A notebook's pieces as Typst, with the pictures that they show in the folder where Typst compiles."""

import base64
import hashlib
import re
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote

import nbformat

from .errors import BuildError
from .pandoc import convert
from .pieces import Piece, pieces

_MARKED = re.compile("\ue000(.*?)\ue000", re.DOTALL)
_TYPST_PICTURES = {".svg", ".png", ".jpg", ".jpeg", ".gif", ".webp", ".pdf"}


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
        parts.insert(0, {"kind": "text", "text": '= #"' + name + '"'})
    number = re.match(r"\d+", name)
    wanted = int(number[0]) if number else position
    return Chapter(file, wanted, wanted == 0, parts, figures)


def _named_figures(parts: list[Piece], file: str) -> dict[str, bytes]:
    figures: dict[str, bytes] = {}
    for piece in parts:
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
