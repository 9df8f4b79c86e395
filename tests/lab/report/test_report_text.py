"""Text of the report: Markdown and its math, code, printed output, and what is left out."""

import nbformat.v4 as v4
import pytest

from helpers.lab.report import BuildError
from helpers.lab.report.exporter import compile_pdf, typst_string


def test_characters_that_mean_something_to_typst_are_printed(shown, text):
    prose = r"Costs \$5 # @a \* \_ \< \> ~ \\ C:\\x a_b -- ... 'q' \"d\" // /\* x \*/ [y] {z} = + 1. it's"
    flat = text(shown(prose)).flat
    assert r"""Costs$5#@a*_<>~\C:\xa_b--...'q'"d"///*x*/[y]{z}=+1.it's""" in flat


def test_a_word_in_angle_brackets_that_is_no_tag_is_text(shown, text):
    assert "results/<gpu>/x" in text(shown("In `a` and results/<gpu>/x <!-- not this -->")).flat


def test_markdown_of_jupyter(shown, text):
    prose = "Text:\n- item *one*\n- item **two**\n\nПривет, 10<sup>9</sup> and H<sub>2</sub>O.[^1]\n\n[^1]: Footnote."
    pages = text(shown(prose, "---\n\nAfter the rule"))
    assert "• item one" in pages.text and "• item two" in pages.text
    assert "Привет" in pages.text and "Footnote." in pages.text and "After the rule" in pages.text


@pytest.mark.parametrize(
    ("tex", "said"),
    [
        (
            r"\begin{aligned} y &= \mathrm{SiLU}(x) \odot \frac{a}{b} \\ z &= \sigma(x)\,\tfrac12 \end{aligned}",
            "SiLU(𝑥)⊙",
        ),
        (r"\operatorname{softmax}(z)", "softmax(𝑧)"),
        (r"f = \begin{cases} 1 & x>0 \\ 0 & \text{otherwise} \end{cases}", "otherwise"),
        ("a\n- b\n= c\n+ d", "𝑎−𝑏=𝑐+𝑑"),
    ],
)
def test_displayed_math(tex, said, shown, text):
    assert said in text(shown(f"Let\n$$\n{tex}\n$$\nbe so.")).flat


def test_an_environment_without_dollars_is_math(shown, text):
    assert "𝑎=𝑏" in text(shown("\\begin{align}\na &= b \\\\\nc &= d\n\\end{align}")).flat


def test_dollars_in_a_code_block_are_left_alone(shown, text):
    assert "echo$$\n-a\n$$" in text(shown("```sh\necho$$\n-a\n$$\n```")).text


def test_tex_that_cannot_be_set_is_an_error_that_shows_it(shown, text):
    with pytest.raises(BuildError, match=r"Notebook\.ipynb.*\\nosuchmacro\{x\}"):
        text(shown(r"So $\nosuchmacro{x}$."))


def test_one_cell_cannot_reach_into_the_next(shown, text):
    pages = text(shown("```\nnever closed", "# Heading *kept*", "<div>open", "A [link][1]", "[1]: https://a.b"))
    assert "Heading kept" in pages.text
    assert "[link][1]" in pages.text


def test_a_link_can_be_followed_to_a_page_or_a_chapter_and_another_relative_one_is_text(shown, typst):
    source = typst(shown("[out](https://example.org/a_b#c), [there](03_x.ipynb) and [in](x.csv)"))
    assert '#link("https://example.org/a_b#c")[out]' in source
    assert '#chapter-link("03_x")[there];' in source
    assert "x.csv" not in source and "and in" in source


def test_headings_are_numbered_once(shown, typst):
    source = typst(shown("# 3. Profiling\n\n## 3.1. First\n\n## 2 GPUs"))
    assert "= Profiling" in source and "== First" in source and "== 2 GPUs" in source


def test_code_is_hidden_unless_its_cell_is_tagged(shown, data, text):
    output = data("text/markdown", "Said **so**")
    assert "HIDDEN" not in text(shown(output)).text
    code = 'x = """`$y$` #z \\n ```"""'
    pages = text(shown(output, tags=["show-code"], source=code))
    assert "".join(code.split()) in pages.flat and "Said so" in pages.text


def test_outputs_of_a_live_cell_are_left_out_and_its_code_may_be_shown(shown, data, text):
    pages = text(shown("Prose", data("text/markdown", "LIVE"), tags=["live", "show-code"]))
    assert "LIVE" not in pages.text and "HIDDEN" in pages.text


def test_an_output_can_be_kept_out_of_the_report(shown, data, text):
    pages = text(shown(data("text/markdown", "NOT THIS", report=False), data("text/markdown", "this")))
    assert "NOT" not in pages.text and "this" in pages.text


def test_latex_and_plain_outputs(shown, data, text):
    result = v4.new_output("execute_result", data={"text/plain": "array([1, 2])"}, execution_count=1)
    pages = text(shown(data("text/latex", r"$\displaystyle \frac{a}{b}$"), result))
    assert "𝑎" in pages.text and "array([1, 2])" in pages.text and "frac" not in pages.text


def test_printed_text_is_verbatim_without_colour_progress_and_stderr(text, typst):
    outputs = [
        v4.new_output("stream", name="stdout", text="\x1b[31mred\x1b[0m  *two*\n 10%|#\r 5"),
        v4.new_output("stream", name="stdout", text="0%|##\rdone $x$\n"),
        v4.new_output("stream", name="stderr", text="WARNING"),
    ]
    notebook = v4.new_notebook(cells=[v4.new_code_cell("x", outputs=outputs, execution_count=1)])
    pages = text(notebook)
    assert "red *two*\ndone $x$" in pages.text and "red  *two*" in typst(notebook)
    assert "%" not in pages.text and "WARNING" not in pages.text


def test_a_notebook_of_sixty_cells_takes_few_starts_of_pandoc(shown, data, typst, monkeypatch):
    import subprocess

    run, starts = subprocess.run, []
    monkeypatch.setattr(subprocess, "run", lambda *args, **kw: starts.append(args) or run(*args, **kw))
    source = typst(shown(*(f"Cell *{i}*" for i in range(60)), data("text/html", "<table><tr><td>1</td></tr></table>")))
    assert all(f"Cell #emph[{i}]" in source for i in range(60))
    assert len(starts) == 2


def test_a_long_printed_line_is_read_in_time_and_cut(typst):
    text = "abc\rdef\r\r\n" + "x" * 3_000_000
    output = v4.new_output("stream", name="stdout", text=text)
    notebook = v4.new_notebook(cells=[v4.new_code_cell("x", outputs=[output], execution_count=1)])
    source = typst(notebook)
    assert "def\\nxxx" in source.replace("\n", "\\n") and "abc" not in source
    assert "x" * 9_000 in source and len(source) < 20_000
    assert "… and 2,990,004 characters more" in source


def test_styles_that_are_never_closed_are_read_in_time(shown, data, text):
    html = "<table><tr><td>kept</td></tr></table>" + "<style>" * 100_000
    assert "kept" in text(shown(data("text/html", html))).text


@pytest.mark.parametrize("space", range(237, 260, 5))
def test_a_page_ends_at_an_empty_line_of_the_code(space, pages, tmp_path):
    lines = "def one():\n    a = 1\n    return a\n\n\ndef two():\n    b = 2\n    return b"
    source = '#import "style.typ": *\n#show: pages.with("t")\n'
    source += f'#v({space}mm)\n#raw(lang: "python", block: true, {typst_string(lines)})'
    for said in pages(compile_pdf(source, tmp_path)).pages:
        for name, value in (("one", "a"), ("two", "b")):
            flat = "".join(said.split())
            assert (f"def{name}" in flat) == (f"return{value}" in flat)
