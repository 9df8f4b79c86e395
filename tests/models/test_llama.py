"""Llama: transformers' logits as the oracle, parts that can be exchanged, and able to learn."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from llama_cases import SIZE, TOKENS, numbers

from helpers.models import Llama
from helpers.models.llama import PRESETS, rates
from helpers.swiglu import MemoryOptimizedSwigluMLP

# What transformers computed on `llama_cases`: logits of every sixth position, and rates of rotation by preset.
KNOWN = json.loads(Path(__file__).with_name("llama_logits.json").read_text())

PARTS = {
    "fused products": {"fused": True},
    "SDPA": {"attend": lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)},
    "F.rms_norm": {"normalise": lambda x, weight, epsilon: F.rms_norm(x, weight.shape, weight, epsilon)},
    "chapter 4's mlp": {"mlp": lambda width, hidden: MemoryOptimizedSwigluMLP(width, hidden, 2)},
}


def small(**changes):
    return Llama(**SIZE | changes)


def filled(**changes):
    model = small(**changes)
    for name, view in model.weights().items():
        view.copy_(numbers(name, view.shape))
    return model


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("parts", [{}, *PARTS.values()], ids=["plain", *PARTS])
def test_logits_are_those_of_transformers(tied, parts):
    logits = filled(tied=tied, **parts)(torch.tensor(TOKENS))
    known = torch.tensor(KNOWN["tied" if tied else "untied"])
    torch.testing.assert_close(logits[0, ::6], known, atol=3e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["llama-3.2-1b", "llama-3.1-8b"])
def test_positions_turn_as_fast_as_in_transformers(name):
    size = PRESETS[name]
    computed = rates(size["width"] // size["heads"], 500000.0, size["scaling"])
    torch.testing.assert_close(computed, torch.tensor(KNOWN[name], dtype=torch.float64), rtol=1e-5, atol=0)


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
def test_logits_are_those_of_the_transformers_that_is_installed():
    from transformers import LlamaForCausalLM

    from helpers.chapters.rush import transformers_llama as peers

    theirs = LlamaForCausalLM(peers.config("tiny"))
    ours = Llama.from_name("tiny")
    for name, view in ours.weights().items():
        view.copy_(theirs.state_dict()[name])
    tokens = torch.randint(512, (2, 300))
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_a_part_changes_neither_the_weights_at_the_start_nor_the_gradients(parts):
    tokens = torch.tensor(TOKENS)

    def gradients(**changes):
        torch.manual_seed(3)
        model = small(**changes)
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        return model.weights(), model.weights(lambda parameter: parameter.grad)

    (weights, grads), (reference, reference_grads) = gradients(**parts), gradients()
    assert weights.keys() == reference.keys()
    assert all(torch.equal(weights[name], reference[name]) for name in reference)
    for name, grad in reference_grads.items():
        torch.testing.assert_close(grads[name], grad, atol=1e-6, rtol=1e-4)


def test_tables_of_positions_stay_fp32_when_the_model_is_cast():
    model = small()
    cos = model.positions.cos.clone()
    model.to(torch.bfloat16)
    assert model.embedding.weight.dtype == torch.bfloat16
    assert torch.equal(model.positions.cos, cos)


def test_a_model_laid_out_without_memory_can_be_filled():
    with torch.device("meta"):
        model = small()
    model.to_empty(device="cpu")
    model.head.weight = model.embedding.weight
    model.reset_parameters(torch.Generator().manual_seed(1))
    reference = small()
    reference.reset_parameters(torch.Generator().manual_seed(1))
    tokens = torch.tensor(TOKENS)
    assert torch.equal(model(tokens), reference(tokens))


def test_the_residual_stream_may_be_narrower_than_the_weights():
    model, tokens = small(residual=torch.bfloat16), torch.tensor(TOKENS)
    seen = []
    model.layers[1].register_forward_pre_hook(lambda module, arguments: seen.append(arguments[0].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        model(tokens)
    assert seen == [torch.bfloat16]


def test_wrong_input_is_named():
    model = small()
    with pytest.raises(ValueError, match="has 129 positions, and max_length is 128"):
        model(torch.zeros(1, 129, dtype=torch.long))
