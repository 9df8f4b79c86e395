"""What a table's columns are called in the report, and what stands in its cells."""

import math

import numpy as np
import pandas as pd
import pytest

from helpers.book import notebook
from helpers.book.notebook import heading, number


@pytest.mark.parametrize(
    ("column", "said"),
    [
        ("checkpoint_level", "checkpoint level"),
        ("backward_ms", "backward, ms"),
        ("tflops", "TFLOP/s"),
        ("mb_per_s", "MB/s"),
        ("real_tokens_per_s", "real tokens/s"),
        ("samples_per_s_p20", "samples/s, p20"),
        ("slope_us_per_step", "slope us per step"),
        ("torch.fx.symbolic_trace", "torch.fx.symbolic_trace"),
    ],
)
def test_a_name_becomes_words_and_a_unit(column, said):
    assert heading(column) == said


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0.123456, "0.123"),
        (1.0, "1.00"),
        (1234567.0, "1,234,567"),
        (9999, "9999"),
        (1234.5, "1234"),
        (10_000, "10,000"),
        (np.int64(3), "3"),
        (True, "yes"),
        (np.bool_(False), "no"),
        ("False", "no"),
        ("fp32", "fp32"),
        (None, "–"),
        ("", "–"),
        (math.nan, "–"),
    ],
)
def test_a_cell_holds_three_digits_a_word_or_a_dash(value, said):
    assert number(value) == said


def test_findings_link_to_the_notebooks_from_the_readme(monkeypatch):
    displays = []
    monkeypatch.setattr(notebook, "display", lambda made, metadata: displays.append(made.data))
    sentences = ["**[Padding](02_batching.ipynb).** Pack.", "See <https://pytorch.org>."]
    notebook.readme(pd.DataFrame({"change": ["packs"], "gain": ["2×"]}), sentences)
    table = "| change | gain |\n| --- | --- |\n| packs | 2× |\n\n"
    assert displays == [f"{table}**[Padding](notebooks/02_batching.ipynb).** Pack. See <https://pytorch.org>."]


def test_a_caption_that_names_a_machine_stays_text(monkeypatch, tmp_path):
    displays = []
    monkeypatch.setenv("HELPERS_FIGURES", str(tmp_path))
    monkeypatch.setattr(notebook, "display", lambda made, metadata, raw=False: displays.append(made))
    drawn, axis = notebook.figures.new(height=1)
    axis.plot([1])
    notebook.figure(drawn, "line", "Measured on CPU_1 *<b>*.")
    assert displays[-1].data == r"*Measured on CPU\_1 \*\<b\>\*.*"
