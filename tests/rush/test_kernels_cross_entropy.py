"""Cross-entropy over the logits: the kernels in Triton's interpreter, and plain torch, against torch's own."""

import sys

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreted import run_plain_or_interpreted

from helpers.lab import saved_bytes
from helpers.lab.timing import relative_error
from helpers.rush.kernels import cross_entropy as loss_of
from helpers.rush.kernels import loss_and_gradient

cross_entropy = sys.modules["helpers.rush.kernels.cross_entropy"]  # the package has its function by that name

DTYPES = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
SIZES = {
    "rows": st.integers(0, 6),
    "vocabulary": st.sampled_from([1, 2, 31, 64, 257, 1000]),
    "seed": st.integers(0, 99),
}


@pytest.fixture(params=["plain", "interpreted"], autouse=True)
def kernels(request, monkeypatch):
    monkeypatch.setattr(cross_entropy, "BLOCK", 128)  # so that rows have several blocks
    return run_plain_or_interpreted(request, monkeypatch, cross_entropy)


def data(rows, vocabulary, dtype, seed=0, ignored=0.3):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocabulary, generator=generator).mul(3).to(dtype)
    target = torch.randint(0, vocabulary, (rows,), generator=generator)
    target[torch.rand(rows, generator=generator) < ignored] = -100
    return logits, target


def torchs(logits, target):
    """Loss and gradient in fp32."""
    leaf = logits.detach().float().requires_grad_()
    loss = F.cross_entropy(leaf, target)
    return loss.detach(), torch.autograd.grad(loss, leaf)[0]


def ours(logits, target, **options):
    """The same; the logits are a result of something, as they are in a network."""
    leaf = logits.detach().clone().requires_grad_()
    loss = loss_of(leaf * 1, target, **options)
    return loss.detach(), torch.autograd.grad(loss, leaf)[0]


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=8, deadline=None)
@given(**SIZES)
def test_loss_and_gradient_are_torchs(dtype, rows, vocabulary, seed):
    logits, target = data(rows, vocabulary, dtype, seed)
    (loss, gradient), (expected, expected_gradient) = ours(logits, target), torchs(logits, target)
    assert loss.dtype == torch.float32
    assert gradient.dtype == dtype
    torch.testing.assert_close(loss, expected, equal_nan=True, rtol=1e-5, atol=1e-5)
    if (target != -100).any():
        assert (gradient.float() - expected_gradient).norm() <= DTYPES[dtype] * max(expected_gradient.norm(), 1e-2)
    else:
        assert loss.isnan()  # a mean of nothing, as torch has it
        assert not gradient.any()


def test_the_gradient_lies_where_the_logits_lay():
    logits, target = data(5, 300, torch.float32)
    x = logits.requires_grad_()
    result = x * 1
    place = result.data_ptr()
    loss = loss_of(result, target)
    expected = torchs(logits, target)[1]
    assert relative_error(result.detach(), expected) < 1e-5
    (gradient,) = torch.autograd.grad(loss, result)
    assert gradient.data_ptr() == place


def test_logits_stay_if_nobody_learns_from_them():
    logits, target = data(5, 300, torch.float32)
    before = logits.clone()
    loss = loss_of(logits, target)
    with torch.no_grad():
        again = loss_of(logits.requires_grad_(), target)
    assert torch.equal(logits, before)
    assert torch.equal(loss, again)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, F.cross_entropy(before, target))


def test_what_still_needs_the_logits_fails_and_is_not_wrong():
    leaf, target = torch.randn(3, 20, requires_grad=True), torch.tensor([1, 2, 3])
    loss = loss_of(leaf.tanh(), target)  # the derivative of tanh needs its result
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_backward_runs_once():
    leaf = torch.randn(3, 20, requires_grad=True)
    loss = loss_of(leaf * 1, torch.tensor([1, 2, 3]))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward can run once"):
        loss.backward()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1.0, 0.25, 65536.0])
def test_a_scaled_loss_has_a_scaled_gradient(dtype, scale):
    logits, target = data(6, 150, dtype)
    leaf = logits.clone().requires_grad_()
    (loss_of(leaf * 1, target) * scale).backward()
    assert relative_error(leaf.grad, torchs(logits, target)[1] * scale) <= DTYPES[dtype]


def test_fp16_keeps_small_gradients_that_a_scale_makes_large():
    rows = 64  # a probability of 1.7e-5 is 280 steps of fp16, and its share of the mean 4.4
    logits, target = torch.zeros(rows, 20).half(), torch.zeros(rows, dtype=torch.int64)
    logits[:, 1:] = -11.0
    leaf = logits.clone().requires_grad_()
    loss_of(leaf * 1, target).mul(2.0**10).backward()
    expected = torchs(logits, target)[1] * 2.0**10
    assert relative_error(leaf.grad[:, 1:], expected[:, 1:]) < 5e-3


def test_batches_views_and_padded_vocabularies():
    whole, target = torch.randn(2, 3, 40), torch.randint(0, 33, (2, 3))
    for cut in (lambda t: t[..., :33], lambda t: t.mT.contiguous().mT[..., :33], lambda t: t[..., :33].flip(0)):
        leaf = whole.clone().requires_grad_()
        loss = loss_of(cut(leaf * 1), target)
        reference = whole.clone().requires_grad_()
        expected = F.cross_entropy(cut(reference).flatten(0, 1), target.flatten())
        torch.testing.assert_close(loss, expected)
        (found,), (theirs,) = torch.autograd.grad(loss, leaf), torch.autograd.grad(expected, reference)
        torch.testing.assert_close(found, theirs)


def test_the_columns_beside_a_padded_vocabulary_are_left_alone():
    whole, target = torch.randn(4, 40), torch.tensor([3, 32, -100, 0])
    beside = whole[:, 33:].clone()
    loss_and_gradient(whole[:, :33], target)
    assert torch.equal(whole[:, 33:], beside)


@pytest.mark.parametrize("dtype", DTYPES)
def test_loss_and_gradient_of_the_sum_for_layers_that_work_in_chunks(dtype):
    logits, target = data(7, 130, dtype)
    expected = F.cross_entropy(logits.float(), target, reduction="none")
    gradient = torchs(logits, target)[1] * (target != -100).sum()
    losses, found = loss_and_gradient(logits, target)
    assert found is logits
    torch.testing.assert_close(losses, expected)
    assert relative_error(found, gradient) <= DTYPES[dtype]


def test_logits_of_minus_infinity_have_no_probability():
    logits, target = torch.randn(2, 300), torch.tensor([5, 299])
    logits[:, 10:280] = float("-inf")
    (loss, gradient), (expected, expected_gradient) = ours(logits, target), torchs(logits, target)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient, expected_gradient)


@pytest.mark.parametrize("ignore_index", [-1, 0, 7])
def test_any_index_can_be_ignored(ignore_index):
    logits, target = data(6, 20, torch.float32, ignored=0)
    target[::2] = ignore_index
    loss, gradient = ours(logits, target, ignore_index=ignore_index)
    torch.testing.assert_close(loss, F.cross_entropy(logits, target, ignore_index=ignore_index))
    assert not gradient[::2].any()


def test_nothing_is_kept_besides_the_logits():
    leaf = torch.randn(8, 256, requires_grad=True)
    assert saved_bytes(lambda: loss_of(leaf * 1, torch.arange(8))) <= 8  # a number of the multiplication


def test_a_compiled_graph_gives_the_same():
    logits, target = data(6, 33, torch.bfloat16)
    leaf = logits.clone().requires_grad_()
    loss = torch.compile(lambda x: loss_of(x * 1, target), backend="aot_eager", fullgraph=True)(leaf)
    expected, gradient = torchs(logits, target)
    torch.testing.assert_close(loss, expected)
    assert relative_error(torch.autograd.grad(loss, leaf)[0], gradient) <= DTYPES[torch.bfloat16]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_target_outside_the_vocabulary_is_loud(kernels):
    logits, target = torch.randn(2, 20), torch.tensor([3, 20])
    if kernels == "interpreted":
        assert loss_of(logits, target).isnan()
    else:
        with pytest.raises(IndexError):
            loss_of(logits, target)


@pytest.mark.parametrize(
    ("logits", "target", "message"),
    [
        (torch.randn(4), torch.tensor(1), r"logits must be floating-point \(…, V\)"),
        (torch.randn(4, 5).long(), torch.zeros(4).long(), "logits must be floating-point"),
        (torch.randn(4, 5), torch.zeros(5).long(), r"shape \(4,\)"),
        (torch.randn(4, 5), torch.zeros(4), "target must be int64 or int32"),
    ],
)
def test_what_does_not_fit_is_named(logits, target, message):
    with pytest.raises(ValueError, match=message):
        loss_of(logits, target)
