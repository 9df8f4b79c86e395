"""The layer in the place of others': in models, in exported programs, under what callers do to an output."""

import pytest
import torch
from torch import nn

from helpers.swiglu import LEVELS, MemoryOptimizedSwigluMLP


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("shape", [(16,), (2, 3, 5, 16), (0, 5, 16)])
def test_the_output_can_be_changed_in_place(level, shape):
    layer = MemoryOptimizedSwigluMLP(16, 48, level)
    x = torch.randn(shape, requires_grad=True)
    y = layer(x)
    expected = torch.autograd.grad(2 * layer(x).sum(), [x, *layer.parameters()])
    assert not y._is_view()
    y += 1
    y *= 2
    nn.functional.dropout(y, 0.0, inplace=True)
    for found, wanted in zip(torch.autograd.grad(y.sum(), [x, *layer.parameters()]), expected, strict=True):
        torch.testing.assert_close(found, wanted)


def test_linears_become_a_layer():
    gate, up, down = nn.Linear(16, 48, bias=False), nn.Linear(16, 48, bias=False), nn.Linear(48, 16, bias=False)
    up.weight.requires_grad_(False)
    layer = MemoryOptimizedSwigluMLP.from_linears(gate, up, down)
    x = torch.randn(5, 16)
    torch.testing.assert_close(layer(x), down(nn.functional.silu(gate(x)) * up(x)))
    assert [weight.requires_grad for weight in (layer.W, layer.V, layer.U)] == [True, False, True]
    with pytest.raises(ValueError, match="has a bias"):
        MemoryOptimizedSwigluMLP.from_linears(nn.Linear(16, 48), up, down)


@pytest.mark.parametrize("learns", [False, True])
def test_an_exported_program_needs_nothing_of_ours(learns):
    layer = MemoryOptimizedSwigluMLP(16, 48).requires_grad_(learns)
    x = torch.randn(2, 5, 16)
    program = torch.export.export(layer, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    names = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert names
    assert all(name.startswith("aten.") for name in names)
    torch.testing.assert_close(program.module()(torch.cat([x, x])), layer(torch.cat([x, x])))


def test_a_trace_needs_nothing_of_ours():
    layer, x = MemoryOptimizedSwigluMLP(16, 48), torch.randn(2, 5, 16)
    traced = torch.jit.trace(layer, x)
    assert "aten::silu" in str(traced.inlined_graph)
    assert "PythonOp" not in str(traced.inlined_graph)
    torch.testing.assert_close(traced(x), layer(x))


def test_a_compiled_graph_without_gradients_is_open_to_fusion():
    torch.compiler.reset()  # other tests have compiled the same forward as often as is allowed
    layer, seen = MemoryOptimizedSwigluMLP(16, 48), []

    def backend(graph, _):
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    x = torch.randn(5, 16)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(layer, backend=backend, fullgraph=True)(x), layer(x))
    assert sum("silu" in name for name in seen) == 1
