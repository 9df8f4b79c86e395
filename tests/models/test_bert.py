"""BERT's encoder: transformers' model as oracle, padding that nobody sees, nothing to trip a compiler."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.models import Bert

VOCABULARY, WIDTH, LAYERS, MLP, POSITIONS = 11, 8, 2, 12, 10


def tiny():
    return Bert(VOCABULARY, WIDTH, LAYERS, 2, MLP, POSITIONS).eval()


def transformers_state():
    """A state dict as transformers names it. The values are a formula, so that they are the same everywhere."""
    embeddings = {"word_embeddings": VOCABULARY, "position_embeddings": POSITIONS, "token_type_embeddings": 2}
    shapes = {f"embeddings.{name}.weight": (rows, WIDTH) for name, rows in embeddings.items()}
    shapes |= both("embeddings.LayerNorm", WIDTH)
    for i in range(LAYERS):
        name = f"encoder.layer.{i}."
        for part in ("self.query", "self.key", "self.value", "output.dense"):
            shapes |= both(f"{name}attention.{part}", WIDTH, WIDTH)
        shapes |= both(f"{name}intermediate.dense", MLP, WIDTH) | both(f"{name}output.dense", WIDTH, MLP)
        shapes |= both(f"{name}attention.output.LayerNorm", WIDTH) | both(f"{name}output.LayerNorm", WIDTH)
    shapes |= both("pooler.dense", WIDTH, WIDTH)
    state = {}
    for number, (name, shape) in enumerate(shapes.items()):
        places = torch.arange(math.prod(shape), dtype=torch.float64)
        values = torch.sin(0.7 * places + 1.3 * number) / 2 + float("LayerNorm.weight" in name)
        state[name] = values.float().reshape(shape)
    return state


def both(name, *shape):
    return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}


TOKENS = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 0, 0]])
MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]).bool()
TYPES = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 1, 1]])

# What transformers' BertModel gives for these (the pooled token of each, and the state of the last real one).
POOLED = [
    [0.01326, 0.12952, 0.18827, 0.15849, 0.04723, -0.09625, -0.19952, -0.21183],
    [-0.12342, 0.07765, 0.24164, 0.29049, 0.20439, 0.01244, -0.19085, -0.30052],
]
STATES = [
    [0.43943, -1.84037, 1.12044, -0.06639, -0.87901, 0.69928, 0.34268, -0.79697],
    [0.92744, -1.85861, 0.81308, 0.22550, -0.93924, 0.50313, 0.51245, -0.96722],
]


def loaded():
    model = tiny()
    model.load_weights(transformers_state())
    return model


def test_states_and_pooled_token_are_transformers():
    states, pooled = loaded()(TOKENS, MASK, TYPES)
    torch.testing.assert_close(pooled, torch.tensor(POOLED), atol=2e-5, rtol=0)
    torch.testing.assert_close(states[[0, 1], [4, 2]], torch.tensor(STATES), atol=2e-5, rtol=0)


@pytest.mark.parametrize("mask", [None, MASK], ids=["no mask", "mask"])
def test_it_is_transformers_own_model_on_the_same_weights(mask):
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        intermediate_size=MLP,
        max_position_embeddings=POSITIONS,
    )
    theirs = transformers.BertModel(config).eval()
    found = theirs.load_state_dict(transformers_state(), strict=False)
    assert not found.unexpected_keys
    with torch.no_grad():
        expected = theirs(TOKENS, attention_mask=None if mask is None else mask.long(), token_type_ids=TYPES)
        states, pooled = loaded()(TOKENS, mask, TYPES)
    real = torch.ones_like(MASK) if mask is None else mask
    torch.testing.assert_close(states[real], expected.last_hidden_state[real], atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(pooled, expected.pooler_output, atol=2e-5, rtol=1e-4)


def test_the_encoder_of_a_bert_with_a_head_is_loaded():
    state = {f"bert.{name}": weight for name, weight in transformers_state().items()}
    model = tiny()
    model.load_weights(state | {"classifier.weight": torch.ones(2, WIDTH)})
    for ours, expected in zip(model.parameters(), loaded().parameters(), strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda state: {}, r"lack 'embeddings\.LayerNorm\.bias' and 38 more; the model has 39"),
        (
            lambda state: state | {"encoder.layer.2.output.dense.bias": torch.ones(WIDTH)},
            r"no place for 'encoder",
        ),
        (
            lambda state: state | {"pooler.dense.bias": torch.ones(3)},
            r"pooler.* is \(3,\); it must be \(8,\)",
        ),
    ],
)
def test_weights_of_another_bert_are_refused(change, said):
    model = tiny()
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(ValueError, match=said):
        model.load_weights(change(transformers_state()))
    assert all(map(torch.equal, before, model.parameters()))


@settings(max_examples=20, deadline=None)
@given(length=st.integers(1, POSITIONS), real=st.data())
def test_what_is_padded_changes_nothing_for_what_is_real(length, real):
    model, tokens = tiny(), torch.randint(VOCABULARY, (1, length))
    count = real.draw(st.integers(1, length))
    mask = torch.arange(length)[None] < count
    states, pooled = model(tokens, mask)
    alone, alone_pooled = model(tokens[:, :count])
    torch.testing.assert_close(states[:, :count], alone, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(pooled, alone_pooled, atol=1e-5, rtol=1e-4)


def test_a_row_of_nothing_but_padding_is_finite():
    states, pooled = tiny()(TOKENS, torch.zeros_like(MASK))
    assert states.isfinite().all()
    assert pooled.isfinite().all()


def test_without_types_all_is_of_the_first_segment():
    model = tiny()
    torch.testing.assert_close(model(TOKENS)[0], model(TOKENS, None, torch.zeros_like(TOKENS))[0])
    assert not torch.allclose(model(TOKENS)[0], model(TOKENS, None, TYPES)[0], atol=1e-3)


def test_the_order_of_tokens_matters():
    model = tiny()
    assert not torch.allclose(model(TOKENS)[0].flip(1), model(TOKENS.flip(1))[0], atol=1e-3)


def test_half_precision_is_finite_with_padding():
    model = tiny().to(torch.bfloat16)
    states, _ = model(TOKENS, MASK)
    assert states.dtype == torch.bfloat16
    assert states.isfinite().all()


def test_a_sequence_that_is_too_long_is_named():
    with pytest.raises(ValueError, match="the sequence has 11 positions, and max_length is 10"):
        tiny()(torch.zeros(1, 11, dtype=torch.long))
