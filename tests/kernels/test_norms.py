"""RMSNorm and LayerNorm: the kernels in Triton's interpreter, and plain torch, against torch's own."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreted import run_plain_or_interpreted

from helpers.kernels import add_rms_norm, layer_norm, norms, rms_norm
from helpers.lab import saved_bytes

# The interpreter rounds to bf16 towards zero, a GPU to nearest.
DTYPES = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 1.6e-2}
OURS = {"layer": layer_norm, "rms": lambda x, weight, bias=None: rms_norm(x, weight)}


@pytest.fixture(params=["plain", "interpreted"], autouse=True)
def kernels(request, monkeypatch):
    return run_plain_or_interpreted(request, monkeypatch, norms)


def theirs(kind, x, weight, bias):
    """In fp64 throughout."""
    x, weight, bias = (None if t is None else t.double() for t in (x, weight, bias))
    if kind == "rms":
        return F.rms_norm(x, x.shape[-1:], weight, torch.finfo(torch.float32).eps)
    return F.layer_norm(x, x.shape[-1:], weight, bias)


def learning(*tensors):
    return [None if t is None else t.detach().requires_grad_() for t in tensors]


def gradients(outputs, inputs, upstream):
    present = [t for t in inputs if t is not None]
    return torch.autograd.grad(outputs, present, upstream)


def assert_close(actual, expected, tolerance):
    """Off by `tolerance` of its norm, or of a norm of normal numbers: some gradients are zero but for rounding."""
    for a, b in zip(actual, expected, strict=True):
        assert a.shape == b.shape
        assert (a.double() - b.double()).norm() <= tolerance * max(b.double().norm(), b.numel() ** 0.5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", OURS)
@settings(max_examples=3, deadline=None)
@given(rows=st.integers(0, 9), width=st.sampled_from([1, 5, 130, 1030]), affine=st.sampled_from(["", "w", "wb"]))
def test_output_and_gradients_are_torchs(kind, dtype, rows, width, affine):
    x, dy = torch.randn(2, rows, width).to(dtype), torch.randn(2, rows, width).to(dtype)
    weight = torch.randn(width).to(dtype) if "w" in affine else None
    bias = torch.randn(width).to(dtype) if "b" in affine and kind == "layer" else None
    ours, reference = learning(x, weight, bias), learning(x, weight, bias)
    y, expected = OURS[kind](*ours), theirs(kind, *reference)
    assert y.dtype == dtype
    assert_close([y], [expected], DTYPES[dtype])
    actual = gradients(y, ours, dy)
    assert [g.dtype for g in actual] == [dtype] * len(actual)
    assert_close(actual, gradients(expected, reference, dy.double()), 4 * DTYPES[dtype])


@pytest.mark.parametrize("kind", OURS)
def test_views_and_expanded_gradients(kind):
    whole = torch.randn(4, 6, 96)
    views = [whole[:, ::2, 32:64], whole.transpose(1, 2), whole[:1].expand(3, 6, 96)]
    for view in views:
        ours, reference = learning(view, torch.randn(view.shape[-1])), learning(view, None)
        reference[1] = ours[1].detach().requires_grad_()
        y, expected = OURS[kind](*ours), theirs(kind, *reference, None)
        assert_close([y], [expected], 1e-6)
        dy = torch.randn(()).expand(y.shape)
        assert_close(gradients(y, ours, dy), gradients(expected, reference, dy.double()), 1e-5)


@pytest.mark.parametrize("kind", OURS)
def test_weights_in_fp32_with_activations_in_half_precision(kind):
    x, dy = torch.randn(7, 40).bfloat16(), torch.randn(7, 40).bfloat16()
    ours = learning(x, torch.randn(40))
    y = OURS[kind](*ours)
    dx, dweight = gradients(y, ours, dy)
    assert (y.dtype, dx.dtype, dweight.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    reference = learning(x, ours[1])
    expected = gradients(theirs(kind, *reference, None), reference, dy.double())
    assert_close([dx, dweight], expected, DTYPES[torch.bfloat16])


@pytest.mark.parametrize(
    ("x_dtype", "branch_dtype"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16)],
    ids=str,
)
@pytest.mark.parametrize("compiled", [False, True], ids=["", "compiled"])
def test_a_residual_branch_is_added_before_the_norm_as_two_operations_would(x_dtype, branch_dtype, compiled):
    def add_and_norm(x, branch, weight, eps):
        total = x + branch
        return rms_norm(total, weight, eps), total

    fused = torch.compile(add_rms_norm, backend="aot_eager", fullgraph=True) if compiled else add_rms_norm
    x, branch = torch.randn(3, 5, 130, dtype=x_dtype), torch.randn(5, 3, 130, dtype=branch_dtype).transpose(0, 1)
    upstream = [torch.randn(3, 5, 130, dtype=x_dtype), torch.randn(3, 5, 130, dtype=x_dtype)]
    ours, reference = learning(x, branch, torch.randn(130)), learning(x, branch, None)
    reference[2] = ours[2].detach().requires_grad_()
    outputs, expected = fused(*ours, 1e-5), add_and_norm(*reference, 1e-5)
    assert [each.dtype for each in outputs] == [x_dtype] * 2
    assert_close(outputs, expected, 0 if x_dtype == torch.float32 else DTYPES[x_dtype])
    actual = torch.autograd.grad(outputs, ours, upstream)
    assert [each.dtype for each in actual] == [x_dtype, branch_dtype, torch.float32]
    assert_close(actual, torch.autograd.grad(expected, reference, upstream), DTYPES[branch_dtype])


def test_what_a_norm_with_a_branch_saves_is_the_sum_that_the_next_layers_have_anyhow():
    x, branch, weight = learning(torch.randn(15, 64), torch.randn(15, 64), torch.randn(64))
    total = []
    kept = saved_bytes(lambda: total.append(add_rms_norm(x, branch, weight, 1e-5)[1]), without=[weight])
    assert kept == 15 * 64 * 4 + 15 * 4


def test_autocast_decides_the_outputs_type_and_x_is_read_in_its_own():
    ours = learning(torch.randn(4, 16), torch.randn(16), torch.randn(16))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer_norm(*ours)
    assert y.dtype == torch.bfloat16
    assert_close([y], [theirs("layer", *ours)], DTYPES[torch.bfloat16])
    assert all(g.dtype == torch.float32 for g in gradients(y, ours, torch.randn(4, 16).bfloat16()))


@pytest.mark.parametrize("learns", ["x", "weight", "bias", "weight bias"])
def test_only_gradients_that_are_wanted_are_computed(learns):
    named = {"x": torch.randn(5, 33), "weight": torch.randn(33), "bias": torch.randn(33)}
    tensors = [t.requires_grad_(name in learns.split()) for name, t in named.items()]
    y = layer_norm(*tensors)
    dy = torch.randn(5, 33)
    wanted = [t for t in tensors if t.requires_grad]
    assert_close(gradients(y, wanted, dy), gradients(theirs("layer", *tensors), wanted, dy.double()), 1e-5)


@pytest.mark.parametrize(("kind", "statistics"), [("layer", 2), ("rms", 1)])
def test_kept_for_backward_are_x_and_a_number_or_two_for_each_row(kind, statistics):
    x, weight = learning(torch.randn(3, 5, 64).bfloat16(), torch.randn(64).bfloat16())
    kept = saved_bytes(lambda: OURS[kind](x, weight), without=[weight])
    assert kept == 15 * 64 * 2 + 15 * 4 * statistics


@pytest.mark.parametrize("kind", OURS)
def test_a_compiled_graph_gives_the_same(kind):
    compiled = torch.compile(lambda *t: OURS[kind](t[0].sin(), *t[1:]).cos(), backend="aot_eager", fullgraph=True)
    ours = learning(torch.randn(3, 5, 24), torch.randn(24), torch.randn(24) if kind == "layer" else None)
    ours = [t for t in ours if t is not None]
    dy = torch.randn(3, 5, 24)
    expected = OURS[kind](ours[0].sin(), *ours[1:]).cos()
    assert_close([compiled(*ours)], [expected], 1e-6)
    assert_close(gradients(compiled(*ours), ours, dy), gradients(expected, ours, dy), 1e-6)


def test_a_second_derivative_is_refused():
    x = torch.randn(3, 8, requires_grad=True)
    (dx,) = torch.autograd.grad(rms_norm(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        dx.sum().backward()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rms_norm(torch.randn(3, 8), torch.randn(7)), r"weight must have shape \(8,\)"),
        (lambda: layer_norm(torch.randn(3, 8), None, torch.randn(1, 8)), r"bias must have shape \(8,\)"),
        (lambda: rms_norm(torch.arange(8)), "floating-point"),
        (lambda: add_rms_norm(torch.randn(3, 8), torch.randn(8), torch.ones(8), 1e-5), r"the shape of x, \(3, 8\)"),
        (lambda: rms_norm(torch.randn(())), "last dimension"),
    ],
)
def test_what_does_not_fit_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
