"""What the tests of the report share: executed notebooks made by hand, and the text of a PDF."""

import nbformat.v4 as v4
import pytest
from pdf_text import pages_of

from helpers.book import ReportExporter
from helpers.book.pages import chapter


class Pages:
    """A PDF's pages as text; `flat` is all of it without any space, where a line break cannot hide a word."""

    def __init__(self, pdf: bytes):
        assert pdf.startswith(b"%PDF")
        self.pages = pages_of(pdf)
        self.text = "\n".join(self.pages)
        self.flat = "".join(self.text.replace("\u200b", "").split())


@pytest.fixture
def pages():
    return Pages


@pytest.fixture
def shown():
    """An executed notebook with one cell for each thing given: Markdown as text, an output as its node."""

    def make(*things, tags=(), source="x = 'HIDDEN'"):
        cells = []
        for thing in things:
            if isinstance(thing, str):
                cells.append(v4.new_markdown_cell(thing))
            else:
                metadata = {"tags": list(tags)} if tags else {}
                cells.append(v4.new_code_cell(source, outputs=[thing], execution_count=1, metadata=metadata))
        return v4.new_notebook(cells=cells)

    return make


@pytest.fixture
def data():
    """An output with one form and the `helpers` metadata."""

    def make(kind, content, **helpers):
        metadata = {"helpers": helpers} if helpers else {}
        return v4.new_output("display_data", data={kind: content, "text/plain": "PLAIN"}, metadata=metadata)

    return make


@pytest.fixture
def typst(tmp_path):
    """The Typst source of a notebook."""

    def source(notebook):
        return ReportExporter().document([chapter(notebook, "Notebook", tmp_path)])

    return source


@pytest.fixture
def text(pages):
    """The pages of a notebook's PDF."""
    return lambda notebook: pages(ReportExporter().from_notebook_node(notebook)[0])
