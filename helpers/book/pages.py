"""What of notebooks is read in the report, as Typst, and the nbconvert exporter that makes a PDF of it.

A piece is a mapping: its `kind` (text, code, printed or figure), its `text`, the `reader` that turns the
text into Typst (none for what is shown as it is), its `caption` in Markdown, `where` it stands and the `tags` of its
cell: `live` shows nothing, `show-code` shows the code, `appendix` stands at the end, `new-page` begins a page.

Markdown and tables of HTML become Typst in one run of pandoc for all fragments of one format: it needs about 40 ms to
start and next to nothing for a cell. `--file-scope` makes it parse each fragment on its own: an unclosed code
fence, a footnote or a link of one cell cannot reach into the next.
"""

import base64
import hashlib
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import nbformat
from nbconvert.exporters.exporter import Exporter
from nbconvert.exporters.templateexporter import TemplateExporter
from nbconvert.filters import strip_ansi
from nbconvert.utils.exceptions import ConversionException
from traitlets import List, Unicode

TEMPLATES = Path(__file__).parent / "templates" / "report"

# The Markdown of Jupyter: CommonMark with GitHub's tables and TeX between dollars. Pandoc's own Markdown
# would want an empty line before a list; `smart` is left out because it turns `--` into a dash.
READERS = {
    "markdown": "commonmark+pipe_tables+strikeout+task_lists+footnotes+tex_math_dollars+autolink_bare_uris",
    "html": "html",
}
_DISPLAYED = re.compile(r"\$\$.*?\$\$", re.DOTALL)
_NOT_TEX = re.compile(r"Could not convert TeX math (.*?)(?:, rendering as TeX|$)", re.DOTALL)


class BuildError(ConversionException):
    """What stopped the report, in one message for the person who wrote the notebook.

    It is a `ConversionException` so that `jupyter nbconvert` knows it and exits with an error.
    """


def convert(fragments: Sequence[tuple[str, str]]) -> list[str]:
    """Typst of each `(format, text)`, in their order; a format is a key of `READERS`."""
    converted = [""] * len(fragments)
    for reader in READERS:
        chosen = [i for i, (form, text) in enumerate(fragments) if form == reader and text.strip()]
        texts = [fragments[i][1] for i in chosen]
        if reader == "markdown":  # on one line: a line of math that begins with `+` or `-` would start a list
            texts = [_DISPLAYED.sub(lambda math: math[0].replace("\n", " "), text) for text in texts]
        for i, typst in zip(chosen, _run(reader, texts), strict=True):
            converted[i] = typst
    return converted


def _run(reader: str, texts: list[str]) -> list[str]:
    if not texts:
        return []
    import pypandoc

    # A paragraph that no text holds marks where one fragment ends and the next begins.
    mark = "cut" + hashlib.sha256("\0".join(texts).encode()).hexdigest()
    with TemporaryDirectory() as folder:
        for i, text in enumerate(texts):
            Path(folder, f"{i}").write_text(text, encoding="utf-8")
        Path(folder, "mark").write_text(mark, encoding="utf-8")
        files = [name for i in range(len(texts)) for name in (f"{i}", "mark")]
        options = ["--file-scope", "--wrap=none", "--from", READERS[reader], "--to", "typst"]
        command = [pypandoc.get_pandoc_path(), *options, f"--lua-filter={TEMPLATES / 'typst.lua'}", *files]
        done = subprocess.run(command, cwd=folder, capture_output=True, encoding="utf-8")
    if done.returncode:
        raise BuildError(f"pandoc failed: {done.stderr.strip()}")
    if unknown := _NOT_TEX.search(done.stderr):
        raise BuildError(f"this TeX cannot be set: {unknown[1].strip()}")
    return [part.strip("\n") for part in re.split(rf"(?m)^{mark}\n?", done.stdout)[:-1]]


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


TITLE = "Fast deep-learning training, and how to know that it is"


class ReportExporter(TemplateExporter):
    """Exports a notebook as a PDF, set by Typst from the template in `templates/report`."""

    output_mimetype = "application/pdf"

    file_extension = Unicode(".pdf")
    template_extension = Unicode(".typ.j2")
    template_name = Unicode(TEMPLATES.name)
    extra_template_basedirs = List([str(TEMPLATES.parent)])

    def default_filters(self):
        """nbconvert's filters, and the one that quotes a text for Typst."""
        return [*super().default_filters(), ("typst_string", typst_string)]

    def from_notebook_node(
        self, nb: nbformat.NotebookNode, resources: dict | None = None, **kw: Any
    ) -> tuple[Any, dict]:
        """The PDF of one notebook, in bytes. It costs about half a second; nothing is executed."""
        # TemplateExporter would render its template here; the step before it is what is wanted.
        nb, resources = Exporter.from_notebook_node(self, nb, resources, **kw)
        with TemporaryDirectory() as folder:
            name = resources["metadata"].get("name") or "notebook"
            only = chapter(nb, name, Path(folder))
            return compile_pdf(self.document([only], title=name), Path(folder)), resources

    def document(self, chapters: Sequence[Chapter], title: str = TITLE, contents: bool = False) -> str:
        """Typst source of the chapters, with the table of `contents` after the first."""
        appendix = any("appendix" in piece["tags"] for chapter in chapters for piece in chapter.pieces)
        return self.template.render(chapters=chapters, title=title, contents=contents, appendix=appendix)


def compiled(exporter: ReportExporter, chapters: Sequence[Chapter], folder: Path) -> bytes:
    """The PDF of all chapters. Typst names a line of the whole document, so what is wrong is found in each alone."""
    try:
        return compile_pdf(exporter.document(chapters, contents=True), folder)
    except BuildError as whole:
        for each in chapters:
            try:
                compile_pdf(exporter.document([each]), folder)
            except BuildError as error:
                raise BuildError(f"{each.file}: {error}") from None
        raise whole


def typst_string(text: object) -> str:
    """A text as a string literal of Typst."""
    return '"' + str(text).replace("\\", "\\\\").replace('"', '\\"') + '"'


def compile_pdf(source: str, folder: Path) -> bytes:
    """The PDF of Typst source whose pictures lie in `folder`, without fonts of the system and without dates.

    A layout that doesn't settle is an error: its pages and tables would have wrong numbers.
    """
    import typst

    shutil.copy(TEMPLATES / "style.typ", folder)
    main = folder / "main.typ"
    main.write_text(source, encoding="utf-8")
    try:
        pdf, warned = typst.compile_with_warnings(str(main), root=str(folder), ignore_system_fonts=True)
    except typst.TypstError as error:
        raise BuildError(f"Typst cannot compile it: {error}") from None
    if unsettled := [warning.message for warning in warned if "converge" in warning.message]:
        raise BuildError(f"Typst: {unsettled[0]}")
    return packed(pdf)


def packed(pdf: bytes) -> bytes:
    """The same PDF in less than half the bytes; 0.1 s for 50 pages.

    Typst compresses what a page draws, but writes the rest as text: thousands of small dictionaries, most of them the
    tags that a screen reader follows. Here these are compressed together. The ID is a hash of the contents.
    """
    import pikepdf

    smaller = BytesIO()
    with pikepdf.open(BytesIO(pdf)) as document:
        document.save(smaller, object_stream_mode=pikepdf.ObjectStreamMode.generate, deterministic_id=True)
    return smaller.getvalue()
