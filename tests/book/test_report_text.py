"""Text and pictures of the report: Markdown and its math, code, printed output, and what is left out."""

import subprocess

import nbformat.v4 as v4
import pytest

from helpers.book import BuildError

SVG = '<svg xmlns="http://www.w3.org/2000/svg" width="40" height="30"><rect width="40" height="30"/></svg>'
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


def test_characters_that_mean_something_to_typst_or_html_are_printed(shown, text):
    prose = r"Costs \$5 # @a \* \_ \< \> ~ \\ C:\\x a_b -- ... 'q' \"d\" // /\* x \*/ [y] {z} = + 1. it's"
    flat = text(shown(prose, "10<sup>9</sup>, results/<gpu>/x <!-- not this -->", "<div>block</div>")).flat
    assert r"""Costs$5#@a*_<>~\C:\xa_b--...'q'"d"///*x*/[y]{z}=+1.it's""" in flat
    assert "10<sup>9</sup>,results/<gpu>/x" in flat and "notthis" not in flat and "block" in flat


def test_markdown_of_jupyter_in_which_no_cell_reaches_into_the_next(shown, text):
    prose = "Text:\n- item *one*\n- item **two**\n\nПривет.[^1]\n\n[^1]: Footnote.\n\n| a |\n|---|\n| `x\\|y` $z$ |"
    apart = ("```\nnever closed", "# Heading *kept*", "A [link][1]", "[1]: https://a.b")
    pages = text(shown(prose, "---\n\nAfter the rule", "```sh\necho $$\n-a\n$$ 1\n```", *apart))
    for said in ("• item one", "• item two", "Привет", "Footnote.", "x|y 𝑧", "After the rule", "-a"):
        assert said in pages.text
    assert "Heading kept" in pages.text and "[link][1]" in pages.text


def test_displayed_math(shown, text):
    formulas = {
        r"\begin{aligned} y &= \mathrm{SiLU}(x) \odot \frac{a}{b} \\ z &= \sigma(x) \end{aligned}": "SiLU(𝑥)⊙",
        r"f = \begin{cases} 1 & x>0 \\ 0 & \text{otherwise} \end{cases}": "otherwise",
        "a\n- b\n= c\n+ d": "𝑎−𝑏=𝑐+𝑑",
    }
    flat = text(shown(*(f"Let\n$$\n{tex}\n$$\nbe so." for tex in formulas))).flat
    assert all(said in flat for said in formulas.values())


def test_tex_that_cannot_be_set_is_an_error_that_shows_it(shown, text):
    with pytest.raises(BuildError, match=r"Notebook\.ipynb.*\\nosuchmacro\{x\}"):
        text(shown(r"So $\nosuchmacro{x}$."))


def test_a_link_can_be_followed_to_a_page_or_a_chapter_and_another_relative_one_is_text(shown, typst):
    source = typst(shown("[out](https://example.org/a_b#c), [there](03_x.ipynb) and [in](x.csv)"))
    assert '#link("https://example.org/a_b#c")[out]' in source
    assert '#chapter-link("03_x")[there];' in source
    assert "x.csv" not in source and "and in" in source


def test_a_link_to_a_table_tells_its_number_and_page_and_one_to_a_section_the_headings(shown, data, text):
    above = '[table](Notebook.ipynb#B "table 2")'
    here = '[here](Notebook.ipynb#B) [none](Notebook.ipynb#A "table 1")'
    rows = data("text/html", "<table><tr><td>1</td></tr></table>", caption="Rows")
    filled = "\n\n".join("line" for _ in range(80))
    said = text(shown("# N", f"{above}. {here}.", "## A", "## B", rows, filled, rows, "## C", rows)).text
    assert "table 2, page 2. here, page 1 none, page 1." in said


def test_code_is_hidden_unless_its_cell_is_tagged(shown, data, text):
    assert "HIDDEN" not in text(shown(data("text/markdown", "Said **so**"))).text
    code = 'x = """`$y$` #z \\n ```"""'
    outputs = [data("text/markdown", "Said **so**"), data("text/markdown", "NOT THIS", report=False)]
    pages = text(shown(*outputs, tags=["show-code"], source=code))
    assert "".join(code.split()) in pages.flat and "Said so" in pages.text and "NOT" not in pages.text


def test_outputs_of_a_live_cell_are_left_out_and_its_code_may_be_shown(shown, data, text):
    pages = text(shown("Prose", data("text/markdown", "LIVE"), tags=["live", "show-code"]))
    assert "LIVE" not in pages.text and "HIDDEN" in pages.text


def test_printed_text_is_verbatim_and_cut_without_colour_progress_and_stderr(text, typst):
    outputs = [
        v4.new_output("stream", name="stdout", text="\x1b[31mred\x1b[0m  *two*\n 10%|#\r 50%|##\rdone $x$\n"),
        v4.new_output("stream", name="stderr", text="WARNING"),
        v4.new_output("execute_result", data={"text/plain": "array([1, 2])"}, execution_count=1),
        v4.new_output("stream", name="stdout", text="x" * 30_000),
    ]
    notebook = v4.new_notebook(cells=[v4.new_code_cell("x", outputs=outputs, execution_count=1)])
    pages = text(notebook)
    assert "red *two*\ndone $x$" in pages.text and "red  *two*" in typst(notebook)
    assert "%" not in pages.text and "WARNING" not in pages.text and "array([1, 2])" in pages.text
    assert "… and 20,000 characters more" in pages.text


def test_a_notebook_of_sixty_cells_takes_few_starts_of_pandoc(shown, data, typst, monkeypatch):
    run, starts = subprocess.run, []
    monkeypatch.setattr(subprocess, "run", lambda *args, **kw: starts.append(args) or run(*args, **kw))
    source = typst(shown(*(f"Cell *{i}*" for i in range(60)), data("text/html", "<table><tr><td>1</td></tr></table>")))
    assert all(f"Cell #emph[{i}]" in source for i in range(60))
    assert len(starts) == 2


def test_a_figure_is_drawn_once_and_takes_a_number_only_with_a_caption(shown, data, typst, tmp_path, text):
    notebook = shown(data("image/svg+xml", SVG, figure="speed", caption="Tokens per `s`, $x$"))
    assert typst(notebook).count("#picture(") == 1
    assert [path.read_text() for path in tmp_path.glob("*.svg")] == [SVG]
    assert "Figure 1. Tokens per s, 𝑥" in text(notebook).text
    assert "Figure" not in text(shown(data("image/png", PNG))).text
