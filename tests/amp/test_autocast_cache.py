"""A weight is cast once in a region, and never twice where that would be wrong."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.amp.autocast import Autocast

X = torch.ones(4, 4)


class Casts(TorchDispatchMode):
    """Counts the casts."""

    def __enter__(self):
        self.count = 0
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._to_copy.default
        return func(*args, **(kwargs or {}))


def test_a_weight_is_cast_once_in_the_outermost_region_and_dropped_after():
    layer = nn.Linear(4, 4, bias=False)
    x = X.bfloat16()
    with Casts() as casts:
        with Autocast(torch.bfloat16):
            layer(x), layer(x)
            with Autocast(torch.bfloat16):
                layer(x)
            with Autocast(enabled=False), Autocast(torch.bfloat16):
                layer(x)
            assert casts.count == 1
            with Autocast(torch.float16):
                layer(x), layer(x)
        assert casts.count == 2 + 2  # the weight again, and x twice
    with Casts() as casts, Autocast(torch.bfloat16):
        layer(x)
        assert casts.count == 1


def test_what_is_no_leaf_weight_is_not_kept():
    layer = nn.Linear(4, 4, bias=False)
    x = X.bfloat16()
    with Casts() as casts, Autocast(torch.bfloat16):
        for weight in (layer.weight.detach(), layer.weight * 1, layer.weight.view(4, 4)):
            F.linear(x, weight), F.linear(x, weight)
    assert casts.count == 6
    with Casts() as casts, Autocast(torch.bfloat16, cache_enabled=False):
        layer(x), layer(x)
    assert casts.count == 2


def test_a_weight_that_changes_in_a_region_is_cast_again():
    layer = nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), 1.0)
    with Autocast(torch.bfloat16):
        before = layer(X)
        before.sum().backward()
        optimizer.step()
        assert not torch.equal(layer(X), before)
        torch.testing.assert_close(layer(X), X.bfloat16() @ layer.weight.bfloat16().T)


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_a_weight_first_used_without_gradients_gets_its_gradient(without):
    layer = nn.Linear(4, 4)
    with Autocast(torch.bfloat16):
        with without():
            layer(X)
        layer(X).sum().backward()
    assert layer.weight.grad is not None and layer.bias.grad is not None


def test_casts_are_freed_with_the_region():
    layer = nn.Linear(4, 4, bias=False)
    with Autocast(torch.bfloat16):
        layer(X)
        mode = torch.overrides._get_current_function_mode()
        assert len(mode.casts) == 1
    assert not mode.casts_of
