import pytest
import torch
from profiling_cases import Spender
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from helpers.chapters.profiling.layer_costs import Cost, cost


def counted(fn):
    with FlopCounterMode(display=False) as counter:
        result = fn()
    return counter.get_total_flops(), result


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.Linear(7, 5), (2, 3, 7)),
        (nn.Conv2d(4, 6, 3, 2, 1), (2, 4, 9, 8)),
        (nn.Conv2d(4, 6, 3, padding="same", dilation=2), (2, 4, 9, 8)),
    ],
)
def test_a_layer_costs_the_products_that_torch_counts_forward_and_backward(module, shape):
    x = torch.randn(shape, requires_grad=True)
    forward, y = counted(lambda: module(x))
    backward, _ = counted(lambda: y.sum().backward())
    assert [part.flop for part in cost(module, shape, y.shape)] == [forward, backward]


@pytest.mark.parametrize("module", [nn.LayerNorm(8), nn.GELU(), nn.Softmax(-1), nn.Linear(8, 3), nn.Conv2d(2, 3, 2)])
def test_bytes_are_those_of_each_tensor_once(module):
    x = torch.randn(4, 2, 5, 8, requires_grad=True)
    y = module(x)
    weights = sum(parameter.nbytes for parameter in module.parameters())
    forward, backward = cost(module, x.shape, y.shape)
    assert forward.bytes == x.nbytes + weights + y.nbytes
    assert backward.bytes == y.nbytes + 2 * x.nbytes + 2 * weights


def test_an_embedding_reads_the_rows_it_is_asked_for_and_its_gradient_is_whole():
    forward, backward = cost(nn.Embedding(100, 16), (3, 5), (3, 5, 16), 2)
    assert forward == Cost(0, 15 * 8 + 2 * 15 * 16 * 2)
    assert backward == Cost(0, 15 * 8 + 15 * 16 * 2 + 100 * 16 * 2)


def test_the_lower_bound_is_what_binds():
    one = Cost(flop=10**12, bytes=10**9)
    assert one.lower_bound_ms(tflops=100, gb_per_s=1000) == 10
    assert one.lower_bound_ms(tflops=1000, gb_per_s=100) == 10


def test_an_unknown_layer_has_no_cost():
    assert cost(Spender(), (3,), (3,)) is None
