"""The language model: strictly causal, blind to padding, and able to learn."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.models import GPT2LikeModel, PositionalEncoding

VOCABULARY = 50


def model(seed=0, **changes):
    torch.manual_seed(seed)
    sizes = {"d_model": 32, "num_heads": 2, "num_layers": 2, "dropout": 0.0, "max_length": 40} | changes
    return GPT2LikeModel(VOCABULARY, **sizes)


def tokens(*shape, seed=1):
    return torch.randint(1, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def test_positions_are_the_sines_and_cosines_of_the_paper():
    table = PositionalEncoding(6, max_length=50)(torch.zeros(1, 50, 6))[0]
    for position in (0, 1, 7, 49):
        for channel in range(6):
            angle = position / 10000 ** ((channel - channel % 2) / 6)
            expected = math.cos(angle) if channel % 2 else math.sin(angle)
            assert table[position, channel].item() == pytest.approx(expected, abs=1e-6)


def test_a_sequence_that_is_too_long_names_both_lengths():
    with pytest.raises(ValueError, match="41 positions, and max_length is 40"):
        PositionalEncoding(8, max_length=40)(torch.randn(1, 41, 8))
    with pytest.raises(ValueError, match="41 positions, and max_length is 40"):
        model()(tokens(1, 41))


@pytest.mark.parametrize("training", [True, False])
@settings(max_examples=8, deadline=None)
@given(length=st.integers(2, 40), data=st.data())
def test_a_token_changes_nothing_before_it_and_something_from_it_on(training, length, data):
    at = data.draw(st.integers(0, length - 1))
    network = model().train(training)
    before = tokens(2, length, seed=length)
    before[0, data.draw(st.integers(1, length)) :] = 0
    after = before.clone()
    after[:, at] = after[:, at] % (VOCABULARY - 1) + 1
    first, second = network(before), network(after)
    torch.testing.assert_close(first[:, :at], second[:, :at], atol=1e-6, rtol=1e-5)
    assert (first[1, at:] - second[1, at:]).abs().amax(dim=-1).min() > 1e-6


@settings(max_examples=8, deadline=None)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=5))
def test_a_padded_sequence_gives_what_it_gives_alone(lengths):
    network = model()
    batch = torch.zeros(len(lengths), max([1, *lengths]) + 3, dtype=torch.long)
    for row, length in enumerate(lengths):
        batch[row, :length] = tokens(length, seed=row)
    logits = network(batch)
    assert logits.isfinite().all()
    for row, length in enumerate(lengths):
        alone = network(batch[row : row + 1, :length])
        torch.testing.assert_close(logits[row : row + 1, :length], alone, atol=1e-5, rtol=1e-4)


def test_what_stands_in_the_padding_gets_no_gradient_from_real_tokens():
    network = model(tied=False)
    batch = tokens(2, 10)
    batch[0, 6:] = 0
    logits = network(batch)
    (logits[0, :6].square().sum() + logits[1].square().sum()).backward()
    assert network.embedding.weight.grad[0].abs().max() == 0
    assert network.embedding.weight.grad[1:].abs().max() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_of_nothing_but_padding_stay_finite(dtype):
    network = model().to(dtype)
    batch = tokens(3, 12)
    batch[0], batch[1, :4] = 0, 0
    logits = network(batch)
    logits.float().square().mean().backward()
    assert logits.dtype == dtype
    assert logits.isfinite().all()
    assert all(parameter.grad.isfinite().all() for parameter in network.parameters())


def test_weights_start_as_gpt_2s_do():
    network = model(d_model=256, num_layers=3, tied=False)
    for name, parameter in network.named_parameters():
        if parameter.dim() > 1:
            ends_branch = name.endswith(("out_proj.weight", "linear2.weight"))
            assert parameter.std().item() == pytest.approx(0.02 / 3 if ends_branch else 0.02, rel=0.05), name
        elif name.endswith("bias"):
            assert parameter.abs().max() == 0, name


def test_a_tied_head_shares_the_embedding_and_the_masks_are_not_in_the_state_dict():
    tied, own = model(), model(tied=False)
    assert tied.head.weight is tied.embedding.weight
    assert own.head.weight is not own.embedding.weight
    assert not {name for name in own.state_dict() if "causal" in name or "table" in name}
