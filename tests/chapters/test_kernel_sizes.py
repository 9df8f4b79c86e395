"""Tables about a GPU's kernels move four times what an H200's L2 holds, so that they are read from memory."""

import pytest
import torch

from helpers import chapters
from helpers.chapters.compilers.fusion import CASES
from helpers.compilers.kernels import nbytes
from helpers.kernels import swaps
from helpers.lab.timing import tensors
from helpers.rush import optimizers

L2 = 50e6
CLASSES = ("gpu", "big-gpu")


def fusion_bytes(case, size):
    """The least bytes of a case on a GPU, from two small jobs on a CPU, where all but AdamW has wider numbers."""
    moved = []
    for elements in (2**18, 2**19):
        with torch.no_grad():
            job = CASES[case](elements)
            moved.append(nbytes(job.reads) + nbytes(tensors(job.variants["eager"]())))
    per_number = (moved[1] - moved[0]) / 2**18
    return size * (per_number if case == "AdamW" else per_number / 2)


@pytest.mark.parametrize("case", CASES)
def test_fused_chains_exceed_the_cache(case):
    for preset in CLASSES:
        sizes = [
            config["size"] for config in chapters.compilers.fusion.configurations(preset) if config["case"] == case
        ]
        assert sizes and min(fusion_bytes(case, size) for size in sizes) >= 4 * L2


@pytest.mark.parametrize("preset", CLASSES)
def test_norms_and_adam_exceed_the_cache(preset):
    for config in chapters.rush.norms.configurations(preset):
        itemsize = getattr(torch, config["dtype"]).itemsize
        assert sum(swaps.least_bytes(config["rows"] * config["width"], itemsize)) >= 4 * L2
    for config in chapters.rush.adam.configurations(preset):
        assert optimizers.LEAST_BYTES * 1e6 * config["million_parameters"] >= 4 * L2


@pytest.mark.parametrize("preset", CLASSES)
def test_the_longest_attention_exceeds_the_cache(preset):
    longest = max(chapters.batching.attention.configurations(preset), key=lambda config: config["tokens"])
    array = 2 * longest["tokens"] * longest["heads"] * longest["head_dim"]
    assert 8 * array >= 4 * L2  # q, k, v and the output, and a gradient of each
