"""Losses and gradients over the logits: the kernel in Triton's interpreter, and plain torch, against torch's own."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreted import run_plain_or_interpreted

from helpers.rush.kernels import cross_entropy, loss_and_gradient

DTYPES = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@pytest.fixture(params=["plain", "interpreted"], autouse=True)
def kernels(request, monkeypatch):
    monkeypatch.setattr(cross_entropy, "BLOCK", 128)  # so that rows have several blocks
    return run_plain_or_interpreted(request, monkeypatch, cross_entropy)


def assert_is_torchs(logits, target, tolerance):
    leaf = logits.detach().float().requires_grad_()
    expected = F.cross_entropy(leaf, target, reduction="none")
    (gradient,) = torch.autograd.grad(expected.sum(), leaf)
    losses, gradient_in_place = loss_and_gradient(logits, target)
    assert gradient_in_place is logits
    torch.testing.assert_close(losses, expected.detach(), rtol=1e-5, atol=1e-5)
    assert (gradient_in_place.float() - gradient).norm() <= tolerance * max(gradient.norm(), 1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=8, deadline=None)
@given(rows=st.integers(0, 6), vocabulary=st.sampled_from([1, 2, 31, 64, 257, 1000]), seed=st.integers(0, 99))
def test_losses_and_gradient_are_torchs(dtype, rows, vocabulary, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocabulary, generator=generator).mul(3).to(dtype)
    target = torch.randint(0, vocabulary, (rows,), generator=generator)
    target[torch.rand(rows, generator=generator) < 0.3] = -100
    assert_is_torchs(logits, target, DTYPES[dtype])


def test_other_layouts_and_the_columns_beside_a_padded_vocabulary():
    whole, target = torch.randn(4, 40), torch.tensor([3, 32, -100, 0])
    neighbour = whole[:, 33:].clone()
    assert_is_torchs(whole[:, :33], target, 1e-5)
    assert torch.equal(whole[:, 33:], neighbour)
    assert_is_torchs(torch.randn(33, 4).T, target, 1e-5)


def test_logits_of_minus_infinity_have_no_probability():
    logits, target = torch.randn(2, 300), torch.tensor([5, 299])
    logits[:, 10:280] = float("-inf")
    assert_is_torchs(logits, target, 1e-5)


def test_what_still_needs_the_logits_fails_and_is_not_wrong():
    leaf, target = torch.randn(3, 20, requires_grad=True), torch.tensor([1, 2, 3])
    logits = leaf.tanh()  # the derivative of tanh needs its result
    loss_and_gradient(logits, target)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logits.sum().backward()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_target_outside_the_vocabulary_is_loud(kernels):
    logits, target = torch.randn(2, 20), torch.tensor([3, 20])
    if kernels == "interpreted":
        assert loss_and_gradient(logits, target)[0][1].isnan()
    else:
        with pytest.raises(IndexError):
            loss_and_gradient(logits, target)


@pytest.mark.parametrize(
    ("logits", "target", "message"),
    [
        (torch.randn(4), torch.tensor(1), r"logits must be floating-point \(N, V\)"),
        (torch.randn(4, 5).long(), torch.zeros(4).long(), "logits must be floating-point"),
        (torch.randn(4, 5), torch.zeros(5).long(), r"shape \(4,\)"),
        (torch.randn(4, 5), torch.zeros(4), "target must be int64 or int32"),
    ],
)
def test_what_does_not_fit_is_named(logits, target, message):
    with pytest.raises(ValueError, match=message):
        loss_and_gradient(logits, target)
