"""The variants of the norms compute the same, and models have theirs swapped and swapped back."""

import subprocess
import sys
from functools import partial

import pytest
import torch
from torch import nn

from helpers.kernels import LayerNorm, RMSNorm, swap_norms
from helpers.kernels import swaps as norms
from helpers.lab.timing import check_agreement


@pytest.mark.parametrize("kind", norms.KINDS)
def test_all_variants_compute_the_same(kind):
    x, dy = torch.randn(6, 40, requires_grad=True), torch.randn(6, 40)
    used = [torch.randn(40, requires_grad=True) for _ in range(1 if kind == "rms" else 2)]

    def run(variant):
        y = norms.norm(variant, kind)(x, *used)
        return [y, *torch.autograd.grad(y, [x, *used], dy)]

    check_agreement({name: partial(run, name) for name in (norms.WRITTEN_OUT, norms.TORCH, norms.OURS)}, 1e-5)


def transformer():
    torch.manual_seed(0)
    layer = nn.TransformerDecoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    return nn.TransformerDecoder(layer, 2, norm=nn.RMSNorm(16))


def outputs(model, x, memory):
    """The output and all gradients in one tensor, for some are zero but for rounding."""
    y = model(x, memory)
    gradients = torch.autograd.grad(y[..., 0].sum(), list(model.parameters()))
    return [y, torch.cat([gradient.flatten() for gradient in gradients])]


def test_a_decoders_norms_are_swapped_and_swapped_back():
    model, x, memory = transformer(), torch.randn(2, 5, 16), torch.randn(2, 3, 16)
    names, parameters = list(model.state_dict()), [id(p) for p in model.parameters()]
    expected = outputs(model, x, memory)
    assert swap_norms(model, "triton") == 7
    assert type(model.layers[0].norm1) is LayerNorm
    assert type(model.norm) is RMSNorm
    assert list(model.state_dict()) == names
    assert [id(p) for p in model.parameters()] == parameters
    check_agreement({"torch": lambda: expected, "swapped": lambda: outputs(model, x, memory)}, 1e-5)
    assert swap_norms(model, "triton") == 7
    assert swap_norms(model, "torch") == 7
    assert type(model.layers[1].norm3) is nn.LayerNorm
    assert type(model.norm) is nn.RMSNorm
    assert all(torch.equal(a, b) for a, b in zip(outputs(model, x, memory), expected, strict=True))


def test_under_autocast_a_swapped_norm_gives_half_precision_where_torchs_gives_fp32():
    for norm in (nn.LayerNorm(8), nn.Sequential(nn.LayerNorm(8))):  # a model that is a norm, and one that has one
        x = torch.randn(2, 8)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            before = norm(x).dtype
            assert swap_norms(norm) == 1
            assert (before, norm(x).dtype) == (torch.float32, torch.bfloat16)


def test_other_peoples_norms_and_wide_ones_are_left_alone():
    class Special(nn.LayerNorm):
        def forward(self, x):
            return x

    model = nn.Sequential(Special(8), nn.LayerNorm((2, 8)), nn.BatchNorm1d(2), nn.LayerNorm(8, bias=False))
    assert swap_norms(model) == 1
    assert [type(module) for module in model[:3]] == [Special, nn.LayerNorm, nn.BatchNorm1d]
    x = torch.randn(3, 2, 8)
    torch.testing.assert_close(model[3](x), nn.functional.layer_norm(x, (8,)))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: swap_norms(nn.LayerNorm(8), "fast"), "to is 'fast'; valid: 'torch', "),
        (lambda: norms.norm("fast", "rms"), "variant is 'fast'; valid: "),
        (lambda: norms.norm("torch", "batch"), "kind is 'batch'; valid: 'layer', 'rms'"),
    ],
)
def test_what_is_not_there_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_without_triton_our_kernels_are_plain_torch():
    code = "import sys; sys.modules['triton'] = None; import torch; from helpers.kernels import rms_norm; "
    code += "rms_norm(torch.randn(4, 8))"
    subprocess.run([sys.executable, "-c", code], check=True)
