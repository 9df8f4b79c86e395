"""Attention by blocks of queries computes what torch's does, and keeps less."""

import pytest
import torch
import torch.nn.functional as F

from helpers.kernels.blocked_attention import blocked_attention
from helpers.lab import saved_bytes


def inputs(batch, heads, kv_heads, length, size, dtype):
    generator = torch.Generator().manual_seed(0)
    shapes = [(batch, length, n, size) for n in (heads, kv_heads, kv_heads)]  # transposed, as a model gives them
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [x.to(dtype).transpose(1, 2).requires_grad_() for x in drawn]


def gradients(attend, parts):
    out = attend(*parts)
    return [out, *torch.autograd.grad(out, parts, out.detach().cos())]


def torchs(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


@pytest.mark.parametrize("shape", [(2, 6, 2, 150, 32), (1, 4, 4, 64, 16), (3, 4, 1, 7, 8)], ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_output_and_gradients_are_torchs(shape, dtype, tolerance):
    parts = inputs(*shape, dtype)
    for actual, expected in zip(gradients(blocked_attention, parts), gradients(torchs, parts), strict=True):
        assert actual.shape == expected.shape and actual.dtype == dtype
        assert (actual - expected).norm() <= tolerance * expected.norm()


def test_only_q_k_and_v_are_saved():
    parts = inputs(1, 4, 2, 256, 16, torch.float32)
    assert saved_bytes(lambda: blocked_attention(*parts)) == sum(part.nbytes for part in parts)


@pytest.mark.parametrize("batch", [1, 2])
def test_the_compiler_is_told_the_right_layout(batch):
    torch.library.opcheck(blocked_attention, inputs(batch, 4, 2, 70, 16, torch.float32))
