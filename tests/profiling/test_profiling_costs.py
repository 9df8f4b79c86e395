import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from profiling_cases import Spender
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from helpers.profiling.costs import Cost, cost


def counted(fn):
    with FlopCounterMode(display=False) as counter:
        result = fn()
    return counter.get_total_flops(), result


def check_flop(module, shape, call=None):
    """Ours are those that torch counts, forward and backward."""
    x = torch.randn(shape, requires_grad=True)
    forward, y = counted(lambda: (call or module)(x))
    backward, _ = counted(lambda: y.sum().backward())
    ours = cost(module, shape)
    assert (ours[0].flop, ours[1].flop) == (forward, backward)


sizes = st.integers(1, 9)


@settings(deadline=None, max_examples=30)
@given(st.lists(sizes, max_size=3), sizes, sizes, st.booleans())
def test_a_linear_layer_costs_the_products_that_torch_counts(rows, inside, outside, bias):
    check_flop(nn.Linear(inside, outside, bias=bias), (*rows, inside))


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 2), st.integers(0, 2), sizes)
def test_a_convolution_costs_the_products_that_torch_counts(kernel, stride, dilation, padding, side):
    shape = (2, 4, side + 5, side + 6)
    check_flop(nn.Conv2d(4, 6, kernel, stride, padding, dilation), shape)
    check_flop(nn.Conv2d(4, 6, 2 * kernel - 1, padding="same", dilation=dilation), shape)


def test_a_grouped_convolution_costs_what_its_groups_cost():
    """Which torch's counter gets wrong in backward: it counts the weight's gradient as if there were one group."""
    grouped, alone = nn.Conv2d(4, 6, 3, groups=2), nn.Conv2d(2, 3, 3)
    for whole, one in zip(cost(grouped, (2, 4, 9, 8)), cost(alone, (2, 2, 9, 8)), strict=True):
        assert whole == Cost(2 * one.flop, 2 * one.bytes)


@pytest.mark.parametrize("batch_first", [True, False])
def test_attention_as_a_module_costs_the_products_that_torch_counts(batch_first):
    module = nn.MultiheadAttention(8, 2, batch_first=batch_first)
    check_flop(module, (3, 5, 8), lambda x: module(x, x, x, need_weights=True)[0])


@pytest.mark.parametrize("module", [nn.LayerNorm(8), nn.GELU(), nn.Softmax(-1), nn.Linear(8, 3), nn.Conv2d(2, 3, 2)])
def test_bytes_are_those_of_each_tensor_once(module):
    x = torch.randn(4, 2, 5, 8, requires_grad=True)
    y = module(x)
    weights = sum(parameter.nbytes for parameter in module.parameters())
    forward, backward = cost(module, tuple(x.shape))
    assert forward.bytes == x.nbytes + weights + y.nbytes
    assert backward.bytes == y.nbytes + 2 * x.nbytes + 2 * weights


def test_an_embedding_reads_the_rows_it_is_asked_for_and_its_gradient_is_whole():
    forward, backward = cost(nn.Embedding(100, 16), (3, 5), 2)
    assert forward == Cost(0, 15 * 8 + 2 * 15 * 16 * 2)
    assert backward == Cost(0, 15 * 8 + 15 * 16 * 2 + 100 * 16 * 2)


def test_the_lower_bound_is_what_binds():
    one = Cost(flop=10**12, bytes=10**9)
    assert one.lower_bound_ms(tflops=100, gb_per_s=1000) == 10
    assert one.lower_bound_ms(tflops=1000, gb_per_s=100) == 10
    with pytest.raises(ValueError, match="tflops is 0; it must be above 0"):
        one.lower_bound_ms(0, 1)


def test_an_unknown_layer_has_no_cost():
    assert cost(Spender(), (3,)) is None
