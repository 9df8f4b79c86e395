"""torch.compile: same results, and levels that keep their promise inside a compiled graph."""

import pytest
import torch

from helpers.chapters.swiglu import derived_costs as costs
from helpers.lab import saved_bytes
from helpers.lab.timing import relative_error
from helpers.swiglu import LEVELS, MemoryOptimizedSwigluMLP


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("frozen", ["", "WU"])
def test_a_compiled_graph_gives_the_same_and_keeps_the_same(level, frozen):
    torch.compiler.reset()  # other tests have compiled the same forward as often as is allowed
    layer = MemoryOptimizedSwigluMLP(16, 48, level)
    for name in frozen:
        getattr(layer, name).requires_grad_(False)
    learning = [p for p in layer.parameters() if p.requires_grad]
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x, l = torch.randn(2, 5, 16, requires_grad=True), torch.randn(2, 5, 16)
    result = torch.autograd.grad(compiled(x), [x, *learning], l)
    expected = torch.autograd.grad(layer(x), [x, *learning], l)
    for a, b in zip(result, expected, strict=True):
        assert relative_error(a, b) < 1e-6
    if not frozen:
        counted = saved_bytes(lambda: compiled(x), without=layer.parameters())
        assert counted == costs.saved_bytes(level, 10, 16, 48, 4)


def test_autocast_and_changing_shapes_inside_compile():
    layer = MemoryOptimizedSwigluMLP(16, 48, 2)
    compiled = torch.compile(layer, backend="aot_eager")
    for tokens in (3, 8, 20):
        x = torch.randn(tokens, 16, requires_grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            result, expected = compiled(x), layer(x)
        assert result.dtype == torch.bfloat16
        assert relative_error(result, expected) < 1e-2
