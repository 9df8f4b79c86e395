"""What a table's columns are called in the report."""

import pytest

from helpers.lab.notebook import heading


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
