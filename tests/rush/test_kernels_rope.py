"""Rotary embedding: the kernel in Triton's interpreter, and plain torch, against its definition by complex numbers."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreted import run_plain_or_interpreted

from helpers.lab import saved_bytes
from helpers.lab.timing import relative_error
from helpers.rush.kernels import rope, rotate

DTYPES = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1.6e-2}


@pytest.fixture(params=["plain", "interpreted"], autouse=True)
def kernels(request, monkeypatch):
    return run_plain_or_interpreted(request, monkeypatch, rope)


def angles(tokens, head_dim, batch=None):
    shape = (tokens, head_dim // 2) if batch is None else (batch, tokens, head_dim // 2)
    turns = torch.rand(shape) * 6.3
    return turns.cos(), turns.sin()


def turned(x, cos, sin):
    """(batch, token, heads, head_dim): the pairs (i, i + D/2) as complex numbers, times e^(iφ)."""
    pairs = torch.complex(*x.float().chunk(2, dim=-1)) * torch.complex(cos, sin).unsqueeze(-2)
    return torch.cat((pairs.real, pairs.imag), dim=-1)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=6, deadline=None)
@given(
    batch=st.integers(0, 3),
    tokens=st.integers(1, 5),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 3)]),
    head_dim=st.sampled_from([2, 16, 40]),
    for_each=st.booleans(),
)
def test_pairs_turn_by_their_angle_and_gradients_turn_back(dtype, batch, tokens, heads, head_dim, for_each):
    cos, sin = angles(tokens, head_dim, batch if for_each else None)
    given = [torch.randn(batch, tokens, n, head_dim).to(dtype).requires_grad_() for n in heads]
    actual = rotate(*given, cos, sin)
    upstream = [torch.randn_like(t) for t in actual]
    gradients = torch.autograd.grad(actual, given, upstream)
    for x, y, l, gradient in zip(given, actual, upstream, gradients, strict=True):
        assert y.dtype == gradient.dtype == dtype
        assert relative_error(y, turned(x, cos, sin)) <= DTYPES[dtype]
        assert relative_error(gradient, turned(l, cos, -sin)) <= DTYPES[dtype]


def test_views_with_gaps_and_expanded_gradients():
    whole, (cos, sin) = torch.randn(2, 5, 4, 32), angles(5, 8)
    q, k = whole[..., ::2, 8:16].requires_grad_(), whole[..., 16:].transpose(2, 3)[..., 4:8, :].transpose(2, 3)
    k = torch.cat((k, k), dim=-1).transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    actual = rotate(q, k, cos, sin)
    assert relative_error(actual[0], turned(q, cos, sin)) < 1e-6
    assert relative_error(actual[1], turned(k, cos, sin)) < 1e-6
    dq, dk = torch.autograd.grad(actual[0].sum() + actual[1].sum(), [q, k])
    assert relative_error(dq, turned(torch.ones_like(q), cos, -sin)) < 1e-6
    assert relative_error(dk, turned(torch.ones_like(k), cos, -sin)) < 1e-6


def test_nothing_is_saved_but_the_angles():
    q, k = torch.randn(2, 5, 4, 8, requires_grad=True), torch.randn(2, 5, 2, 8, requires_grad=True)
    cos, sin = angles(5, 8)
    assert saved_bytes(lambda: rotate(q, k, cos, sin), without=[cos, sin]) == 0


def test_a_compiled_graph_gives_the_same():
    cos, sin = angles(5, 8)

    def attention_scores(x):
        q, k = rotate(x[:, :, :4], x[:, :, 4:], cos, sin)
        return (q.transpose(1, 2) @ k.transpose(1, 2).mT).tanh()

    x = torch.randn(2, 5, 8, 8, requires_grad=True)
    compiled = torch.compile(attention_scores, backend="aot_eager", fullgraph=True)
    l = torch.randn(2, 4, 5, 5)
    expected = attention_scores(x * 1)
    assert relative_error(compiled(x), expected) < 1e-6
    actual = torch.autograd.grad(compiled(x), x, l)[0]
    assert relative_error(actual, torch.autograd.grad(expected, x, l)[0]) < 1e-6


def test_gradients_by_differences(kernels):
    if kernels == "interpreted":
        pytest.skip("the kernel is in fp32")
    q, k = (torch.randn(2, 3, n, 4, dtype=torch.float64, requires_grad=True) for n in (2, 1))
    assert torch.autograd.gradcheck(lambda q, k: rotate(q, k, *(t.double() for t in TABLES)), (q, k))


TABLES = angles(3, 4)


@pytest.mark.parametrize(
    ("q", "k", "tables", "message"),
    [
        ((2, 3, 4, 5), (2, 3, 4, 5), (3, 2), "the last one even"),
        ((2, 3, 8), (2, 3, 8), (3, 4), "four dimensions"),
        ((2, 3, 4, 8), (2, 4, 4, 8), (3, 4), "k must be like q but for its heads"),
        ((2, 3, 4, 8), (2, 3, 4, 8), (4, 4), r"cos must have shape \(3, 4\)"),
        ((2, 3, 4, 8), (2, 3, 4, 8), (3, 8), r"cos must have shape \(3, 4\)"),
    ],
)
def test_what_does_not_fit_is_named(q, k, tables, message):
    with pytest.raises(ValueError, match=message):
        rotate(torch.randn(q), torch.randn(k), torch.randn(tables), torch.randn(tables))
