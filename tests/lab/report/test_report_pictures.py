"""Pictures of the report: figures of outputs, images of Markdown, and images that are not there."""

import base64

import nbformat
import nbformat.v4 as v4
import pytest

from helpers.lab.report import BuildError, ReportExporter

SVG = '<svg xmlns="http://www.w3.org/2000/svg" width="40" height="30"><rect width="40" height="30"/></svg>'
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


def exported(tmp_path, *cells):
    nbformat.write(v4.new_notebook(cells=list(cells)), tmp_path / "01_here.ipynb")
    return ReportExporter().from_filename(str(tmp_path / "01_here.ipynb"))[0]


@pytest.mark.parametrize(
    ("target", "name"),
    [("drawn/a b.svg", "drawn/a%20b.svg"), ("dot.png", "dot.png"), (None, "attachment:dot.png")],
)
def test_an_image_of_a_text_is_found_beside_the_notebook(target, name, tmp_path, pages):
    cell = v4.new_markdown_cell(f'Look:\n\n![what it is]({name} "The caption")')
    if target is None:
        cell.attachments = {"dot.png": {"image/png": PNG}}
    else:
        (tmp_path / "drawn").mkdir()
        (tmp_path / target).write_bytes(SVG.encode() if target.endswith("svg") else base64.b64decode(PNG))
    assert "Figure 1. The caption" in pages(exported(tmp_path, cell)).text


@pytest.mark.parametrize(
    ("image", "why"),
    [
        ("figures/none.svg", "figures/none.svg does not exist"),
        ("https://example.org/x.png", "network"),
        ("attachment:lost.png", "lost.png is missing"),
    ],
)
def test_an_image_that_cannot_be_had_is_an_error_that_says_where(image, why, tmp_path):
    with pytest.raises(BuildError, match=rf"01_here\.ipynb: Markdown cell 2: .*{why}"):
        exported(tmp_path, v4.new_markdown_cell("# T"), v4.new_markdown_cell(f"See ![x]({image}) here"))


def test_code_that_speaks_of_an_image_is_not_one(tmp_path, pages):
    cell = v4.new_markdown_cell('`![x](none.png)`\n\n```typst\n#image("none.svg")\n```')
    assert '#image("none.svg")' in pages(exported(tmp_path, cell)).text


def test_a_figure_is_drawn_once_with_its_caption(shown, data, typst, tmp_path, text):
    notebook = shown(data("image/svg+xml", SVG, figure="speed", caption="Tokens per `s`, $x$"))
    assert typst(notebook).count("#picture(") == 1
    assert [path.read_text() for path in tmp_path.glob("*.svg")] == [SVG]
    assert "Figure 1. Tokens per s, 𝑥" in text(notebook).text


def test_a_png_without_caption_takes_no_number(shown, data, typst, text):
    notebook = shown(data("image/png", PNG))
    assert ".png" in typst(notebook)
    assert "Figure" not in text(notebook).text


def test_two_different_figures_with_one_name_are_an_error(shown, data, typst):
    other = SVG.replace("40", "50")
    with pytest.raises(BuildError, match="another figure is called speed"):
        typst(shown(data("image/svg+xml", SVG, figure="speed"), data("image/svg+xml", other, figure="speed")))


@pytest.mark.parametrize("name", ["../../x", "/tmp/x", "a b", "x\n", ["x"]])
def test_a_figures_name_is_that_of_a_file_in_its_folder(name, shown, data, typst):
    with pytest.raises(BuildError, match=r"In \[1\]: a figure is called .*; allowed: letters, digits"):
        typst(shown(data("image/svg+xml", SVG, figure=name)))
    typst(shown(data("image/svg+xml", SVG, figure="Speed_2.b-w")))
