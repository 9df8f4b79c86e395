"""The layer in the place of others': in models, in exported programs, under what callers do to an output."""

import copy
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from helpers.lab.timing import relative_error
from helpers.swiglu import LEVELS, MemoryOptimizedSwigluMLP, MemoryOptimizedSwigluMLPFunction, SwigluMLP

EXACT = (0, 1, 2)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("shape", [(16,), (5, 16), (2, 5, 16), (2, 3, 5, 16), (0, 5, 16)])
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


def test_linears_there_and_back():
    gate, up, down = nn.Linear(16, 48, bias=False), nn.Linear(16, 48, bias=False), nn.Linear(48, 16, bias=False)
    up.weight.requires_grad_(False)
    layer = MemoryOptimizedSwigluMLP.from_linears(gate, up, down)
    x = torch.randn(5, 16)
    torch.testing.assert_close(layer(x), down(nn.functional.silu(gate(x)) * up(x)))
    for ours, theirs in zip(layer.to_linears(), (gate, up, down), strict=True):
        assert torch.equal(ours.weight, theirs.weight)
        assert (ours.in_features, ours.out_features) == (theirs.in_features, theirs.out_features)
        assert ours.weight.is_contiguous()
        assert ours.weight.requires_grad == theirs.weight.requires_grad
    with pytest.raises(ValueError, match="has a bias"):
        MemoryOptimizedSwigluMLP.from_linears(nn.Linear(16, 48), up, down)


def test_the_default_level_keeps_half_at_no_more_products():
    assert MemoryOptimizedSwigluMLP(16, 48).checkpoint_level == 2
    assert MemoryOptimizedSwigluMLP.from_plain(SwigluMLP(16, 48)).checkpoint_level == 2
    weights = [torch.randn(shape, requires_grad=True) for shape in ((5, 4), (4, 6), (4, 6), (6, 4))]
    found, expected = (MemoryOptimizedSwigluMLPFunction.apply(*weights, *level) for level in ((), (2,)))
    for a, b in zip(*(torch.autograd.grad(y.sum(), weights) for y in (found, expected)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("number", [np.int64, np.int32, np.uint8])
def test_numpys_integers_are_integers(number):
    layer = MemoryOptimizedSwigluMLP(number(16), number(48), number(1))
    assert (type(layer.checkpoint_level), layer.checkpoint_level) == (int, 1)
    assert layer(torch.randn(5, 16)).shape == (5, 16)
    with pytest.raises(ValueError, match="checkpoint_level is"):
        layer.checkpoint_level = number(4)


def llama(**options):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 48, "num_attention_heads": 2, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(vocab_size=32, num_key_value_heads=2, **sizes, **options)
    return transformers.LlamaForCausalLM(config)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_call_replaces_the_mlps_of_a_transformers_llama(dtype):
    model = llama().to(dtype)
    ours = copy.deepcopy(model).eval()
    state = torch.get_rng_state()
    assert MemoryOptimizedSwigluMLP.replace_in(ours, 1) == 2
    assert torch.equal(torch.get_rng_state(), state)
    assert [type(layer.mlp) for layer in ours.model.layers] == [MemoryOptimizedSwigluMLP] * 2
    assert not ours.model.layers[0].mlp.training
    tokens = torch.arange(20).reshape(2, 10)
    runs = [each(tokens, labels=tokens) for each in (model, ours)]
    assert relative_error(runs[1].logits, runs[0].logits) < (1e-5 if dtype == torch.float32 else 2e-2)
    for run in runs:
        run.loss.backward()
    found, expected = ours.model.layers[0].mlp.W.grad, model.model.layers[0].mlp.gate_proj.weight.grad
    assert relative_error(found.t(), expected) < (1e-5 if dtype == torch.float32 else 5e-2)
    assert ours.generate(tokens[:, :3], max_new_tokens=2, do_sample=False).shape == (2, 5)


@pytest.mark.parametrize("options", [{"hidden_act": "gelu"}, {"mlp_bias": True}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_mlp_that_computes_something_else_stays(options, dtype):
    model = llama(**options).to(dtype)
    with pytest.raises(ValueError, match="LlamaForCausalLM has no SwiGLU MLP"):
        MemoryOptimizedSwigluMLP.replace_in(model)


def test_an_mlp_is_freed_when_it_is_replaced():
    model, freed = llama(), []
    for layer in model.model.layers:
        weakref.finalize(layer.mlp.gate_proj.weight, freed.append, 1)
    first, build = [], MemoryOptimizedSwigluMLP._in_place_of

    def spy(module, level):
        first.append(len(freed))
        return build(module, level)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MemoryOptimizedSwigluMLP, "_in_place_of", spy)
        MemoryOptimizedSwigluMLP.replace_in(model)
    assert first == [0, 1]
    assert len(freed) == 2


def test_an_mlp_that_is_shared_is_replaced_by_one_layer():
    model = llama()
    model.model.layers[1].mlp = model.model.layers[0].mlp
    assert MemoryOptimizedSwigluMLP.replace_in(model) == 1
    assert model.model.layers[0].mlp is model.model.layers[1].mlp


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


def test_onnx_runs_it(tmp_path):
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    layer, x = MemoryOptimizedSwigluMLP(16, 48), torch.randn(5, 16)
    torch.onnx.export(layer, (x,), tmp_path / "layer.onnx", dynamo=True, verbose=False)
    session = runtime.InferenceSession(tmp_path / "layer.onnx", providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), layer(x).detach(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("frozen", ["", "WV", "WVU"])
def test_batched_gradients_are_those_of_one_after_the_other(level, frozen):
    layer = MemoryOptimizedSwigluMLP(16, 48, level)
    for name in frozen:
        getattr(layer, name).requires_grad_(False)
    x = torch.randn(3, 5, 16, requires_grad=True)
    wanted = [x, *(p for p in layer.parameters() if p.requires_grad)]
    many = torch.randn(4, 3, 5, 16)
    y = layer(x)
    one_by_one = [torch.autograd.grad(y, wanted, l, retain_graph=True) for l in many]
    mapped = torch.func.vmap(lambda l: torch.autograd.grad(y, wanted, l, retain_graph=True))(many)
    batched = torch.autograd.grad(y, wanted, many, is_grads_batched=True)
    for found in (batched, mapped):
        for place, gradient in enumerate(found):
            torch.testing.assert_close(
                gradient, torch.stack([each[place] for each in one_by_one]), atol=1e-5, rtol=1e-4
            )


@pytest.mark.parametrize("level", EXACT)
def test_gradcheck_of_batched_gradients(level):
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((3, 4), (4, 6), (4, 6), (6, 4))]
    function = MemoryOptimizedSwigluMLPFunction.apply
    assert torch.autograd.gradcheck(lambda *x: function(*x, level), inputs, check_batched_grad=True)
