"""The language model over packed documents: losses and gradients are those of the documents, each alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_cases import VOCABULARY, alone, documents, gradients, packed, summed_loss

from helpers.batching.attention import packed_attention
from helpers.metrics import LMCrossEntropyLoss
from helpers.models import GPT2LikeModel

HERE = ("dense", "flex")  # the variants that run on the CPU
LENGTHS = st.lists(st.integers(1, 20), min_size=1, max_size=6)


def model(dtype=torch.float64, **changes):
    torch.manual_seed(0)
    sizes = {"dropout": 0.0, "max_length": 40, "d_model": 16, "num_heads": 2, "num_layers": 2} | changes
    return GPT2LikeModel(VOCABULARY, **sizes).to(dtype)


def assert_close(actual, expected):
    torch.testing.assert_close(actual, expected, atol=1e-10, rtol=1e-7)


@pytest.mark.parametrize("variant", HERE)
@settings(max_examples=4, deadline=None)
@given(lengths=LENGTHS, padding=st.sampled_from([0, 0, 1, 30]))
def test_loss_and_every_gradient_are_those_of_the_documents_alone(variant, lengths, padding):
    network, texts = model(), documents(lengths)
    expected, expected_gradients = alone(network, texts)
    tokens, targets, positions, layout = packed(texts, padding)
    attend = packed_attention(layout, variant, "cpu")
    loss = summed_loss(network(tokens, positions, attend=attend), targets)
    torch.testing.assert_close(loss, expected)
    assert_close(gradients(network, loss), expected_gradients)
    with torch.no_grad():  # where flex is FlexAttention itself
        logits = network(tokens, positions, attend=attend)
    torch.testing.assert_close(summed_loss(logits, targets), expected)
    mean = LMCrossEntropyLoss(pad_id=0)(logits, targets)
    torch.testing.assert_close(mean, expected / max((targets != 0).sum().item(), 1))


def test_attention_dropout_is_dropout_unless_said_otherwise_and_changes_no_parameter():
    for changes, expected in (({}, 0.2), ({"attention_dropout": 0.0}, 0.0), ({"attention_dropout": 0.4}, 0.4)):
        network = model(dropout=0.2, **changes)
        for layer in network.decoder.layers:
            assert layer.self_attn.dropout == layer.multihead_attn.dropout == expected
            assert layer.dropout1.p == 0.2
        assert network.state_dict().keys() == model().state_dict().keys()
    tokens, _, positions, layout = packed(documents([7, 5]))
    network(tokens, positions, attend=packed_attention(layout, "dense", "cpu"))
    with pytest.raises(ValueError, match="'flex' has no dropout of attention weights"):
        network(tokens, positions, attend=packed_attention(layout, "flex", "cpu"))
    network.eval()(tokens, positions, attend=packed_attention(layout, "flex", "cpu"))
    model(dropout=0.2, attention_dropout=0.0)(tokens, positions, attend=packed_attention(layout, "flex", "cpu"))


@pytest.mark.parametrize("training", [True, False])
def test_it_is_one_graph_for_torch_compile_whatever_the_documents(training):
    network = model(torch.float32)
    compiled = torch.compile(network, backend="eager", fullgraph=True)
    with torch.set_grad_enabled(training):
        for number, lengths in enumerate(([7, 5, 1, 8], [21], [1] * 21)):
            tokens, _, positions, layout = packed(documents(lengths))
            attend = packed_attention(layout, "flex", "cpu")
            with torch._dynamo.config.patch(error_on_recompile=number > 0):
                logits = compiled(tokens, positions, attend=attend)
            torch.testing.assert_close(logits, network(tokens, positions, attend=attend))
