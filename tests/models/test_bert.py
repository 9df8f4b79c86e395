"""BERT's encoder: torch's own layers as oracle."""

import pytest
import torch
from torch import nn

from helpers.models import Bert

VOCABULARY, WIDTH, POSITIONS = 11, 8, 10
TOKENS = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 0, 0]])


def tiny():
    return Bert(VOCABULARY, WIDTH, layers=2, heads=2, feedforward_size=12, max_length=POSITIONS).eval()


def filled():
    """With weights that are far from the start's, so that each of them matters."""
    model = tiny()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    return model


def test_states_and_pooled_token_are_those_of_torchs_layers():
    model = filled()
    x = model.words(TOKENS) + model.positions(torch.arange(5)) + model.segments(torch.zeros_like(TOKENS))
    x = nn.functional.layer_norm(x, (WIDTH,), model.norm.weight, model.norm.bias, 1e-12)
    for layer in model.layers:
        peer = nn.TransformerEncoderLayer(WIDTH, 2, 12, activation="gelu", batch_first=True, layer_norm_eps=1e-12)
        qkv = {f"in_proj_{name}": value for name, value in layer.attention.qkv.state_dict().items()}
        out = {f"out_proj.{name}": value for name, value in layer.attention.out.state_dict().items()}
        peer.self_attn.load_state_dict(qkv | out)
        for theirs, ours in (("linear1", "up"), ("linear2", "down"), ("norm1", "norm1"), ("norm2", "norm2")):
            getattr(peer, theirs).load_state_dict(getattr(layer, ours).state_dict())
        x = peer.eval()(x)
    states, pooled = model(TOKENS)
    torch.testing.assert_close(states, x, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(pooled, model.pooler(x[:, 0]).tanh(), atol=1e-5, rtol=1e-4)


def test_a_sequence_that_is_too_long_is_named():
    with pytest.raises(ValueError, match="the sequence has 11 positions, and max_length is 10"):
        tiny()(torch.zeros(1, 11, dtype=torch.long))
