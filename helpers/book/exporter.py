"""The nbconvert exporter: one notebook, or several as chapters, as a PDF."""

import shutil
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import nbformat
from nbconvert.exporters.exporter import Exporter
from nbconvert.exporters.templateexporter import TemplateExporter
from traitlets import List, Unicode

from .content import Chapter, chapter
from .convert import TEMPLATES, BuildError

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
