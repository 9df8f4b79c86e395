"""What a checkpoint recomputes in backward runs under the `Autocast` of its forward."""

import contextlib

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from helpers.amp.autocast import Autocast

BOTH = pytest.mark.parametrize("use_reentrant", [False, True])


def block():
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Dropout(0.2), nn.Linear(8, 8))


def gradients(model, forward, region):
    torch.manual_seed(0)
    model.zero_grad()
    x = torch.linspace(-1, 1, 32).view(4, 8).requires_grad_()
    with region:
        loss = forward(x).float().square().sum()
    loss.backward()
    return [x.grad, *(parameter.grad for parameter in model.parameters())]


def products_in_backward(model, forward, region):
    """The types of the matrix products between two marks: those that backward recomputes and its own."""
    seen = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
                seen.append(args[-1].dtype)
            return func(*args, **(kwargs or {}))

    x = torch.randn(4, 8, requires_grad=True)
    with region:
        loss = forward(x).float().sum()
    with Watch():
        loss.backward()
    return set(seen)


@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_equal_those_without_checkpoint_and_those_under_torch_autocast(use_reentrant, dtype):
    model = block()
    again = lambda x: checkpoint(model, x, use_reentrant=use_reentrant)  # noqa: E731
    found = gradients(model, again, Autocast(dtype))
    torch.testing.assert_close(found, gradients(model, again, torch.autocast("cpu", dtype)), rtol=0, atol=0)
    torch.testing.assert_close(found, gradients(model, model, Autocast(dtype)), rtol=0, atol=0)


@BOTH
def test_the_recomputation_multiplies_in_the_low_type(use_reentrant):
    model = block()
    types = products_in_backward(
        model, lambda x: checkpoint(model, x, use_reentrant=use_reentrant), Autocast(torch.bfloat16)
    )
    assert types == {torch.bfloat16}


@BOTH
def test_regions_inside_and_around_the_checkpoint(use_reentrant):
    model = block()

    def inner(x):
        with Autocast(enabled=False):
            x = model(x.float())
        x = x @ x.T
        with Autocast(torch.float16):
            return model(torch.cat([x, x], 1).to(torch.float16))

    def around(x):
        x = checkpoint(inner, x, use_reentrant=use_reentrant)
        with Autocast(enabled=False):
            x = checkpoint(model, x.float(), use_reentrant=use_reentrant)
        return checkpoint(model, x, use_reentrant=use_reentrant)

    def plainly(x):
        x = inner(x)
        with Autocast(enabled=False):
            x = model(x.float())
        return model(x)

    found = gradients(model, around, Autocast(torch.bfloat16))
    expected = gradients(model, plainly, Autocast(torch.bfloat16))
    torch.testing.assert_close(
        found, expected, rtol=1e-5, atol=1e-5
    )  # reentrant: the gradients add up in another order


@BOTH
def test_a_region_inside_a_checkpoint_ends_where_it_ends(use_reentrant):
    model = block()

    def partly(x):
        with Autocast(torch.bfloat16):
            x = model(x)
        return model(x.float())

    found = gradients(model, lambda x: checkpoint(partly, x, use_reentrant=use_reentrant), contextlib.nullcontext())
    torch.testing.assert_close(found, gradients(model, partly, contextlib.nullcontext()), rtol=0, atol=0)


@BOTH
def test_checkpoints_in_a_checkpoint(use_reentrant):
    model = block()

    def nested(x):
        x = model(x)
        x = checkpoint(model, x, use_reentrant=use_reentrant)
        return model(x)

    again = lambda x: checkpoint(nested, x, use_reentrant=use_reentrant)  # noqa: E731
    found = gradients(model, again, Autocast(torch.bfloat16))
    torch.testing.assert_close(found, gradients(model, nested, Autocast(torch.bfloat16)), rtol=0, atol=0)


@BOTH
def test_checkpoint_sequential_and_backward_inside_the_region(use_reentrant):
    model = block()
    x = torch.randn(4, 8, requires_grad=True)
    grads = []
    for segments in (1, 3):
        torch.manual_seed(0)
        with Autocast(torch.bfloat16):
            checkpoint_sequential(model, segments, x, use_reentrant=use_reentrant).float().sum().backward()
        grads.append(x.grad)
        x.grad = None
    torch.testing.assert_close(*grads, rtol=0, atol=0)
