"""The loss in chunks: the plain one's value and gradients, without ever holding all logits."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.kernels import chunked_loss as losses
from helpers.lab import peak_memory
from helpers.lab.timing import relative_error
from helpers.rush import Setup, trainer


def inputs(tokens, vocabulary, width, dtype=torch.float32, ignored=0):
    x = torch.randn(tokens, width, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocabulary, width, dtype=dtype, requires_grad=True)
    targets = torch.randint(vocabulary, (tokens,))
    targets[:ignored] = losses.IGNORED
    return x, weight, targets


def gradients(head, x, weight, targets, scale=1.0, **options):
    loss = head(x, weight, targets, **options)
    return loss.detach(), *torch.autograd.grad(loss * scale, (x, weight))


@settings(max_examples=20, deadline=None)
@given(
    tokens=st.integers(1, 20),
    vocabulary=st.integers(1, 30),
    width=st.integers(1, 8),
    chunk=st.integers(1, 25),
    ignored=st.integers(0, 19),
    scale=st.sampled_from([1.0, 0.125, 65536.0]),
)
def test_chunks_give_the_plain_loss_and_gradients(tokens, vocabulary, width, chunk, ignored, scale):
    given = inputs(tokens, vocabulary, width, ignored=min(ignored, tokens - 1))
    expected = gradients(losses.full, *given, scale)
    actual = gradients(losses.chunked, *given, scale, chunk=chunk)
    for ours, plain in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, plain, atol=2e-6 * scale, rtol=1e-4)


@pytest.mark.parametrize("autocast", [True, False])
def test_in_bf16_chunks_are_as_near_to_the_truth_as_the_plain_loss(autocast):
    x, weight, targets = inputs(64, 500, 32)
    truth = gradients(losses.full, x, weight, targets)
    if not autocast:
        x, weight = (tensor.detach().bfloat16().requires_grad_() for tensor in (x, weight))

    def errors(head, **options):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            actual = gradients(head, x, weight, targets, **options)
        assert [tensor.dtype for tensor in actual] == [torch.float32, x.dtype, weight.dtype]
        return [relative_error(ours, true) for ours, true in zip(actual, truth, strict=True)]

    for ours, plain in zip(errors(losses.chunked, chunk=16), errors(losses.full), strict=True):
        assert ours < 1.5 * plain + 1e-5


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="torch has no F.linear_cross_entropy")
def test_torchs_own_chunks_give_the_same():
    given = inputs(50, 64, 8, ignored=3)
    for theirs, plain in zip(gradients(losses.torch_chunked, *given), gradients(losses.full, *given), strict=True):
        torch.testing.assert_close(theirs, plain, atol=1e-6, rtol=1e-4)


def test_all_logits_are_never_held():
    given = inputs(512, 4096, 8)
    logits = 512 * 4096 * 4
    assert peak_memory(lambda: gradients(losses.full, *given)).peak_bytes > 1.9 * logits
    assert peak_memory(lambda: gradients(losses.chunked, *given, chunk=32)).peak_bytes < 0.5 * logits


def test_where_no_gradient_is_wanted_none_is_computed():
    x, weight, targets = inputs(8, 4096, 64)
    expected = losses.full(x, weight, targets)

    def evaluate():
        with torch.no_grad():
            return losses.chunked(x, weight, targets, chunk=2)

    assert not evaluate().requires_grad
    torch.testing.assert_close(evaluate(), expected)
    assert peak_memory(evaluate).peak_bytes < weight.numel() * 4


def test_backward_runs_once():
    loss = losses.chunked(*inputs(8, 10, 4))
    (2 * loss).backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (2 * loss).backward()


@given(
    tokens=st.integers(1, 10**6),
    vocabulary=st.integers(1, 10**6),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    gib=st.sampled_from([1, 4]),
)
def test_a_chunk_is_the_largest_power_of_two_that_fits(tokens, vocabulary, dtype, gib):
    chunk = losses.chunk_length(tokens, vocabulary, dtype, gib)
    assert 1 <= chunk <= tokens
    assert chunk * vocabulary * dtype.itemsize <= gib * losses.GIB
    assert chunk == tokens or 2 * chunk * vocabulary * dtype.itemsize > gib * losses.GIB


def test_a_setups_chunks_are_of_its_size(monkeypatch):
    lengths, chunked = [], losses._Chunked.apply
    monkeypatch.setattr(losses._Chunked, "apply", lambda *given: (lengths.append(given[3]), chunked(*given))[1])
    monkeypatch.setattr(losses, "GIB", 16 * 512 * 4)
    for gib in (1, 2):
        trainer.build_trainer(Setup(model="tiny", sequence=64, head="chunked", logits_gib=gib)).step(
            torch.ones(1, 65, dtype=torch.int64)
        )
    assert lengths == [16, 32]
