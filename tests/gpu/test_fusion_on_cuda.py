"""Fusion where it pays: kernels by the GPU's own events, and code in Triton."""

import pytest

from helpers.chapters.compilers import fusion
from helpers.chapters.compilers.fusion import CASES, COMPILED, EAGER, FOREACH, FUSED, MANY

SIZE = 2**22


def measured(case):
    """The rows of a case, by variant."""
    rows = fusion.measure(case, SIZE)
    assert not any("status" in row for row in rows), rows
    return {row["variant"]: row | {"share_of_least": row["bytes_least"] / row["bytes_moved"]} for row in rows}


@pytest.mark.parametrize("case", CASES)
def test_every_variant_agrees_and_moves_no_less_than_it_must(case):
    for row in measured(case).values():
        assert row["kernels"] >= 1
        assert row["share_of_least"] <= 1.01, row["variant"]


@pytest.mark.parametrize("case", ["pointwise chain", "softmax", "LayerNorm"])
def test_a_chain_becomes_one_triton_kernel_that_moves_the_least(case):
    rows = measured(case)
    eager, compiled = rows[EAGER], rows[COMPILED]
    assert eager["kernels"] > compiled["kernels"] == 1
    assert compiled["kernel_names"].startswith("triton_")
    assert compiled["share_of_least"] > 0.95 > eager["share_of_least"]


def test_lists_share_kernels_on_a_gpu():
    rows = measured("many pointwise")
    loop, lists = rows[EAGER], rows[FOREACH]
    assert loop["kernels"] == 2 * MANY
    assert lists["kernels"] < MANY


def test_an_optimizer_in_one_kernel_moves_the_least():
    rows = measured("AdamW")
    assert rows[FUSED]["kernels"] < rows[FOREACH]["kernels"] < rows[EAGER]["kernels"] / 4
    assert rows[COMPILED]["share_of_least"] > 0.98 and rows[FUSED]["share_of_least"] > 0.98
