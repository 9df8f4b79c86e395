"""What a table and a figure put into a notebook: forms that a viewer shows that doesn't trust it, too."""

import base64
import re

import nbformat.v4 as v4
import pandas as pd
import pytest

from helpers.book import figures, notebook

FRAME = pd.DataFrame({"variant": ["eager", "<b>"], "time_ms": [1.5, 20.0]})


@pytest.fixture
def outputs(monkeypatch):
    """The outputs that a cell would have."""
    made = []

    def display(data, metadata, raw=False):
        data = data if raw else {"text/markdown": data.data}
        made.append(v4.new_output("display_data", data=data, metadata=metadata))

    monkeypatch.setattr(notebook, "display", display)
    return made


def test_a_tables_cells_carry_their_alignment(outputs):
    notebook.table(FRAME, "Times < 30 ms")
    html = outputs[0]["data"]["text/html"]
    assert "<style" not in html
    assert re.findall(r'text-align: (\w+)">(.*?)</t[hd]>', html) == [
        ("left", "variant"),
        ("right", "time, ms"),
        ("left", "eager"),
        ("right", "1.50"),
        ("left", "&lt;b&gt;"),
        ("right", "20.0"),
    ]
    assert "<caption>Times &lt; 30 ms</caption>" in html


def test_a_host_bound_row_is_marked_at_its_time_and_the_share_is_no_column(outputs):
    notebook.table(FRAME.assign(device_share=[0.5, 0.95]), "Times")
    html = outputs[0]["data"]["text/html"]
    assert re.findall(r'text-align: (\w+)">(.*?)</t[hd]>', html)[1:] == [
        ("right", "time, ms"),
        ("left", "eager"),
        ("right", "1.50‡"),
        ("left", "&lt;b&gt;"),
        ("right", "20.0"),
    ]


def test_a_long_table_is_folded_in_the_notebook_and_open_in_the_report(outputs, shown, text):
    long = pd.DataFrame({"variant": [f"name{n}" for n in range(20)], "time_ms": 1.5})
    for rows in (12, 20):
        notebook.table(long.head(rows), f"The first {rows}")
    assert ["<details>" in output["data"]["text/html"] for output in outputs] == [False, True]
    pages = text(shown(*outputs))
    assert pages.text.count("The first 20") == 1
    assert "name19" in pages.text


def test_a_figure_is_svg_for_the_report_and_an_image_with_alternative_text(outputs, tmp_path, monkeypatch):
    monkeypatch.setenv("HELPERS_FIGURES", str(tmp_path))
    drawn, axis = figures.new(height=2)
    axis.plot([1, 2, 3])
    notebook.figure(drawn, "line", 'A "line" & more')
    output, _ = outputs
    assert output["data"]["image/svg+xml"] == (tmp_path / "line.svg").read_text()
    assert base64.b64decode(output["data"]["image/png"]).startswith(b"\x89PNG")
    assert 'alt="A &quot;line&quot; &amp; more"' in output["data"]["text/html"]
    assert output["data"]["image/png"] in output["data"]["text/html"]
    assert output["metadata"]["image/png"]["alt"] == 'A "line" & more'


def test_a_figures_caption_is_emphasised_in_the_notebook_though_its_origin_is_empty(outputs, tmp_path, monkeypatch):
    monkeypatch.setenv("HELPERS_FIGURES", str(tmp_path))
    notebook.figure(figures.new(height=2)[0], "line", "Times in a_loop. ")
    assert outputs[1]["data"]["text/markdown"] == r"*Times in a\_loop.*"
