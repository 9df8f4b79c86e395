"""fp16 products by fp32 kernels give what torch's own fp16 kernels give, forward and backward."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from helpers.lab.precision import fp16_by_fp32
from helpers.lab.timing import relative_error


def attention(x):
    q = x.view(2, 4, 8, 8)
    return F.scaled_dot_product_attention(q, q, q, is_causal=True)


LAYERS = {
    "linear": (nn.Linear(16, 16), (2, 16, 16)),
    "linear of a matrix": (nn.Linear(16, 16), (8, 16)),
    "convolution": (nn.Conv2d(4, 6, 3, padding=1), (2, 4, 8, 8)),
    "transposed convolution": (nn.ConvTranspose2d(4, 6, 2, stride=2), (2, 4, 8, 8)),
    "batched product": (lambda x: x @ x.transpose(1, 2), (3, 8, 16)),
    "attention": (attention, (2, 4, 8, 8)),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("inference", [False, True])
def test_fp16_products_are_the_same_by_fp32_kernels(name, inference):
    layer, shape = LAYERS[name]
    x = torch.randn(shape)

    def run():
        leaf = x.clone().requires_grad_(not inference)
        with torch.autocast("cpu", dtype=torch.float16), torch.inference_mode(inference):
            output = layer(leaf.half() * 1.0)
        if not inference:
            output.float().square().sum().backward()
        return output, leaf.grad

    expected = run()
    with fp16_by_fp32():
        result = run()
    for ours, theirs in zip(result, expected, strict=True):
        if theirs is not None:
            assert ours.dtype == theirs.dtype
            assert relative_error(ours, theirs) < 2e-3


def test_what_is_too_small_for_fp16_is_zero():
    small = torch.full((4, 4), 2.0**-13).half()
    with fp16_by_fp32():
        assert (small @ small == 0).all() == ((small.float() @ small.float()) < 2.0**-25).all()
        assert ((small / 2**6) @ small == 0).all()
        assert (torch.full((4, 4), 300.0).half() @ torch.full((4, 4), 300.0).half()).isinf().all()


def test_attention_rounds_its_result_and_leaves_its_log_sum_exp_in_fp32():
    fused, q = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu, torch.randn(2, 4, 8, 8).half()
    with fp16_by_fp32():
        output, log_sums = fused(q, q, q)
    expected, wide_log_sums = fused(*[q.float()] * 3)
    assert torch.equal(output, expected.half()) and torch.equal(log_sums, wide_log_sums)
