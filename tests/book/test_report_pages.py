"""The committed report's pages: their size in bytes, and how they are filled. Faults set on purpose are found."""

import re
from pathlib import Path

import pypdfium2
import pytest
import typst
from pdf_layout import beyond_margins, parted_headings, short_pages
from pdf_text import pages_of

from helpers.book.pages import BuildError, compile_pdf, packed

REPORT = Path(__file__).parents[2] / "report.pdf"
STYLE = '#set page(paper: "a4", margin: (x: 20mm, top: 18mm, bottom: 20mm), footer: [7])\n'


def pdf(body: str) -> bytes:
    return typst.compile((STYLE + body).encode(), ignore_system_fonts=True)


def test_the_report_has_at_most_32_pages_50_tables_and_a_megabyte_and_a_half():
    assert REPORT.stat().st_size <= 1_500_000
    report = pypdfium2.PdfDocument(REPORT)
    assert len(report) <= 32
    assert "\nTable 51." not in "\n".join(page.get_textpage().get_text_bounded() for page in report)


def test_pages_tables_and_figures_are_numbered_in_order():
    pages = [page.get_textpage().get_text_bounded() for page in pypdfium2.PdfDocument(REPORT)]
    assert [page.strip().splitlines()[-1] for page in pages] == [str(number) for number in range(1, len(pages) + 1)]
    for kind in ("Table", "Figure"):
        numbers = [int(number) for page in pages for number in re.findall(rf"^{kind} (\d+)\. ", page, re.MULTILINE)]
        assert sorted(numbers) == list(range(1, len(numbers) + 1)) and len(numbers) > 10


def test_a_layout_that_does_not_settle_is_an_error(tmp_path):
    source = '#import "style.typ": *\n#context for _ in range(query(heading).len() + 1) [= One more]'
    with pytest.raises(BuildError, match="converge"):
        compile_pdf(source, tmp_path)


def test_nothing_in_the_report_stands_out_of_the_margins():
    assert beyond_margins(REPORT) == []


def test_no_heading_of_the_report_is_parted_from_its_text():
    assert parted_headings(REPORT) == []


def test_a_page_of_the_report_is_a_quarter_full_unless_it_ends_a_chapter():
    assert short_pages(REPORT) == []


def test_faults_set_on_purpose_are_found():
    too_wide = "#table(columns: (180mm,), stroke: (bottom: 0.3pt), [wide])"
    assert {page for page, _ in beyond_margins(pdf(f"#box(width: 200mm, lorem(60))\n#pagebreak()\n{too_wide}"))} == {
        1,
        2,
    }
    assert parted_headings(pdf("= One\n== Two\n#pagebreak()\ntext")) == [(1, "One"), (1, "Two")]
    body = "= One\n a line\n#pagebreak()\n#lorem(400)\n#pagebreak()\na line #pagebreak()\n= Two\n a line"
    assert [page for page, _ in short_pages(pdf(body))] == [1]


def test_packing_keeps_text_and_bookmarks_and_gives_the_same_bytes_twice():
    body = "= One <one>\n" + "@two leads there. #lorem(900)\n" * 3 + "= Two <two>\n#link(<one>)[back] #lorem(300)"
    whole = pdf('#set heading(numbering: "1")\n' + body)
    small = packed(whole)
    assert len(small) < 0.8 * len(whole)
    assert packed(whole) == small
    assert pages_of(small) == pages_of(whole)
    assert [mark.get_title() for mark in pypdfium2.PdfDocument(small).get_toc()] == ["1 One", "2 Two"]
