"""Tables of the report: read from HTML and Markdown, set by Typst, never wider or shorter than they are."""

import html
import re

import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pdf_text import edges, widths

from helpers.book import ReportExporter

SVG = '<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>'
FRAME = pd.DataFrame({"variant": ["eager", "compiled"], "tokens_per_s": [1234.5, 9876.25], "n": [20, 21]})


def test_a_frame_is_a_table_with_its_text_and_without_its_style(shown, data, text):
    rendered = [FRAME._repr_html_(), FRAME.style.format(precision=2).to_html()]
    pages = text(shown(*(data("text/html", each) for each in rendered)))
    assert all(pages.flat.count(cell) == 2 for cell in ("eager", "compiled", "tokens_per_s", "1234.5", "9876.25"))
    assert not any(word in pages.text for word in ("PLAIN", "<", "scoped", "{"))


def test_numbers_stand_right_and_the_index_and_words_left(shown, data):
    cells = {
        "value": ["1.8 ms", "out of memory"],
        "status": ["ok", "needs CUDA"],
        "long": ["one word", "many words " * 3],
    }
    pdf = ReportExporter().from_notebook_node(shown(data("text/html", pd.DataFrame(cells).to_html(index=False))))[0]
    assert edges(pdf, "1.8 ms")[1] == pytest.approx(edges(pdf, "out of memory")[1], abs=1)
    assert edges(pdf, "ok")[0] == pytest.approx(edges(pdf, "needs CUDA")[0], abs=1)
    assert edges(pdf, "one word")[0] == pytest.approx(edges(pdf, "many words")[0], abs=1)


def test_captions_are_numbered_over_tables_and_figures_apart(shown, data, text):
    with_own = FRAME.style.set_caption("Plain $5 and a_b").to_html()
    pages = text(
        shown(
            data("text/html", FRAME.to_html(), caption="First, with `code` and $x^2$ | [0] #1"),
            data("text/html", FRAME.to_html()),
            data("image/svg+xml", SVG),
            data("image/svg+xml", SVG, figure="a", caption="Drawn"),
            data("text/html", with_own),
            data("text/html", with_own.replace("Plain", "Old"), caption="New"),
        )
    )
    for caption in ("Table1.First,withcodeand𝑥2|[0]#1", "Figure1.Drawn", "Table2.Plain$5anda_b", "Table3.New"):
        assert caption in pages.flat
    assert not any(none in pages.flat for none in ("Table4", "Figure2", "Old"))


def test_a_long_table_goes_on_over_pages_under_its_header(shown, data, text):
    frame = pd.DataFrame({"step": range(80), "seen_so_far": [f"row_{i}_end" for i in range(80)]})
    with pd.option_context("display.max_rows", None):
        pages = text(shown(data("text/html", frame._repr_html_(), caption="Long")))
    with_rows = [page for page in pages.pages if re.search(r"row_\d+_end", page)]
    assert len(with_rows) == 2
    assert all("seen_so_far" in page for page in with_rows)
    assert all(f"row_{i}_end" in pages.text for i in range(80))


def test_a_wide_table_stays_on_the_page_with_all_its_text(shown, data, pages):
    cells = [[f"r{i}c{j}".ljust(letters, "x") for j in range(12)] for i, letters in enumerate([6] * 8 + [40] * 2)]
    frame = pd.DataFrame(cells, columns=[f"measured column name {j} in gib" for j in range(12)])
    pdf = ReportExporter().from_notebook_node(shown(data("text/html", frame.to_html())))[0]
    assert pages(pdf).flat.count("x") == sum(cell.count("x") for row in cells for cell in row)
    places = widths(pdf)
    assert places and all(left > 0 and right < width - 50 for left, right, width in places)


SPECIAL = st.text(st.sampled_from("#$@*_<>~`'\"\\|[]{}()=+-/.,:;!?&%^1a Яé→"), min_size=1, max_size=12)


@settings(max_examples=2, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(SPECIAL, min_size=40, max_size=40))
def test_any_text_in_a_cell_is_printed_as_it_is(shown, data, text, cells):
    marked = [f"b{i}q{''.join(cell.split())}e" for i, cell in enumerate(cells)]
    starts = [cell for cell in map(str.strip, cells) if cell]
    rows = "".join(f"<tr><td>{html.escape(cell)}</td></tr>" for cell in marked + starts)
    flat = text(shown(data("text/html", f"<table>{rows}</table>"))).flat
    for cell in [*marked, *("".join(cell.split()) for cell in starts)]:
        assert cell in flat
