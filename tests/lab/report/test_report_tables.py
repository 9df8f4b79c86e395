"""Tables of the report: read from HTML and Markdown, set by Typst, never wider or shorter than they are."""

import html
import re

import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pdf_text import boxes

FRAME = pd.DataFrame({"way": ["eager", "compiled"], "tokens_per_s": [1234.5, 9876.25], "n": [20, 21]})


def rendered(table) -> str:
    return table._repr_html_() if isinstance(table, pd.DataFrame) else table.to_html()


@pytest.mark.parametrize("table", [FRAME, FRAME.style.format(precision=2)], ids=["DataFrame", "Styler"])
def test_a_frame_is_a_table_with_its_text(table, shown, data, text, typst):
    notebook = shown(data("text/html", rendered(table)))
    pages = text(notebook)
    for said in ("eager", "compiled", "tokens_per_s", "1234.5", "9876.25"):
        assert said in pages.flat
    assert "PLAIN" not in pages.text
    assert "<" not in pages.text
    assert "#data-table(" in typst(notebook)


def test_numbers_stand_right_and_the_index_and_words_left(shown, data, typst):
    frame = FRAME.assign(status=["1.8 ms", "out of memory"], comment=["2 words and more", "none of it"])
    source = typst(shown(data("text/html", rendered(frame))))
    assert "align: (left, left, right, right, right, left,)" in source


def test_an_alignment_that_the_author_wrote_is_kept(shown, typst):
    assert "align: (right, left, center,)" in typst(shown("|a|b|c|\n|--:|:--|:-:|\n|x|1|2|"))


def test_long_column_names_take_two_lines_and_a_unit_stays_with_its_slash(shown, data, typst, text):
    frame = pd.DataFrame({f"the rate of batch {n}, tokens/s": [1.5] for n in "abcdef"})
    notebook = shown(data("text/html", frame.to_html(index=False)))
    [halved] = re.findall(r"halved: \((.*)\)", typst(notebook))
    assert halved.count("#linebreak()") == 6
    assert all(half in text(notebook).text for half in ("batch a, tokens/s", "batch f, tokens/s"))


def test_the_size_of_a_frame_and_the_style_of_a_styler_are_not_text(shown, data, text):
    long = pd.DataFrame({"a": range(100)})
    said = text(shown(data("text/html", rendered(long)), data("text/html", rendered(FRAME.style.highlight_max()))))
    assert "99" in said.text
    assert "rows" not in said.text and "background" not in said.text


def test_several_index_and_header_levels_keep_their_cells(shown, data, text):
    index = pd.MultiIndex.from_product([["h200", "a100"], ["fp32", "bf16"]], names=["gpu", "dtype"])
    columns = pd.MultiIndex.from_tuples([("time", "forward"), ("time", "backward"), ("memory", "peak")])
    frame = pd.DataFrame([[i * 10 + j for j in range(3)] for i in range(4)], index=index, columns=columns)
    flat = text(shown(data("text/html", rendered(frame)))).flat
    for row in (
        "time",
        "memory",
        "forwardbackwardpeak",
        "gpudtype",
        "fp32012",
        "bf16101112",
        "bf16303132",
    ):
        assert row in flat


def test_captions_are_numbered_over_tables_and_figures_apart(shown, data, text):
    svg = '<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>'
    uncaptioned = data("text/html", rendered(FRAME))
    pages = text(
        shown(
            data("text/html", rendered(FRAME), caption="First, with `code` and $x^2$ | [0] #1"),
            uncaptioned,
            data("image/svg+xml", svg),
            data("image/svg+xml", svg, figure="a", caption="Drawn"),
            data("text/html", FRAME.style.set_caption("Plain $5 and a_b").to_html()),
        )
    )
    for said in ("Table1.First,withcodeand𝑥2|[0]#1", "Figure1.Drawn", "Table2.Plain$5anda_b"):
        assert said in pages.flat
    assert "Table3" not in pages.flat and "Figure2" not in pages.flat


def test_a_caption_in_the_metadata_replaces_that_of_the_table(shown, data, text):
    styler = FRAME.style.set_caption("Old")
    pages = text(shown(data("text/html", styler.to_html(), caption="New")))
    assert "Table1.New" in pages.flat and "Old" not in pages.text


def test_a_long_table_goes_on_over_pages_under_its_header(shown, data, text):
    frame = pd.DataFrame({"step": range(80), "seen_so_far": [f"row_{i}_end" for i in range(80)]})
    pages = text(shown(data("text/html", rendered(frame.style.set_caption("Long")))))
    with_rows = [page for page in pages.pages if re.search(r"row_\d+_end", page)]
    assert len(with_rows) == 2
    assert all("seen_so_far" in page for page in with_rows)
    assert all(f"row_{i}_end" in pages.text for i in range(80))


@pytest.mark.parametrize("letters", [6, 14, 40])
def test_a_wide_table_stays_on_the_page_with_all_its_text(letters, shown, data, text):
    from helpers.lab.report import ReportExporter

    cells = [[f"r{i}c{j}".ljust(letters, "x") for j in range(12)] for i in range(25 if letters < 40 else 5)]
    frame = pd.DataFrame(cells, columns=[f"measured_column_name_{j}_in_gib" for j in range(12)])
    notebook = shown(data("text/html", rendered(frame)))
    flat = text(notebook).flat
    if letters < 14:  # one line a row, so the text of the page is the cells in their order
        assert all(cell in flat for row in cells for cell in row)
    assert flat.count("x") == sum(cell.count("x") for row in cells for cell in row)
    places = boxes(ReportExporter().from_notebook_node(notebook)[0])
    assert places and all(0 < x < width - 50 for x, width in places)


def test_a_sentence_wraps_beside_numbers_of_readable_size(shown, data, typst, text):
    sentence = "Each operation is a kernel of its own and takes its own trip to memory and back again. " * 3
    frame = pd.DataFrame({"way": ["eager"], "tokens_per_s": [1], "what it means": [sentence.strip()]})
    with pd.option_context("display.max_colwidth", None):
        notebook = shown(data("text/html", rendered(frame)))
    assert "weights: (0, 0, 0, 90,)" in typst(notebook)
    assert "".join(sentence.split()) in text(notebook).flat


SPECIAL = st.text(st.sampled_from("#$@*_<>~`'\"\\|[]{}()=+-/.,:;!?&%^1a Яé→"), min_size=1, max_size=12)


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(SPECIAL, min_size=40, max_size=40))
def test_any_text_in_a_cell_is_printed_as_it_is(shown, data, text, cells):
    marked = [f"b{i}q{''.join(cell.split())}e" for i, cell in enumerate(cells)]
    starts = [cell for cell in map(str.strip, cells) if cell]
    rows = "".join(f"<tr><td>{html.escape(cell)}</td></tr>" for cell in marked + starts)
    flat = text(shown(data("text/html", f"<table>{rows}</table>"))).flat
    for cell in [*marked, *("".join(cell.split()) for cell in starts)]:
        assert cell in flat


def test_pipes_breaks_and_code_in_a_markdown_table(shown, text):
    flat = text(shown("| a | b |\n|---|---|\n| `x\\|y` | one<br>two \\| $z$ |\n| = 1. | 1. = |")).flat
    assert "x|yone" in flat and "two|𝑧" in flat and "=1.1.=" in flat


def test_a_table_written_as_html_in_markdown_is_a_table(shown, typst, text):
    notebook = shown("Before\n\n<table><tr><th>h</th></tr><tr><td>7<sup>2</sup></td></tr></table>\n\nAfter")
    assert "#data-table(" in typst(notebook)
    assert "#super[2]" in typst(notebook)
    assert "72" in text(notebook).flat
