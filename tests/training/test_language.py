"""The language model's data: lines, orders, padded and packed batches, and the loss over what counts."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.lab import device
from helpers.metrics import LMAccuracy, LMCrossEntropyLoss
from helpers.text import SyntheticText
from helpers.training import LANGUAGE
from helpers.training.language import MULTIPLE as PACK_MULTIPLE
from helpers.training.language import Lines, open_texts
from helpers.training.slow_parts import HostAccuracy, SpelledOutLoss
from helpers.training.text_batches import RandomOrder

SLOW = frozenset()
CLEAN = LANGUAGE.fixed - {"bf16", "workers"}
MULTIPLE = PACK_MULTIPLE[device().type]


def lengths():
    chosen = LANGUAGE.sizes["small"]
    text = SyntheticText(chosen["samples"], 0, chosen["vocab_size"])
    return np.minimum(text.lengths, chosen["max_length"] + 1)


def real_tokens(all_of_it=False):
    return int(lengths().sum()) - (0 if all_of_it else len(lengths()))


def capacity():
    return math.ceil(max(round(4 * lengths().mean()), lengths().max()) / MULTIPLE) * MULTIPLE


@pytest.mark.parametrize("fixes", [SLOW, LANGUAGE.fixed], ids=["slow", "fixed"])
def test_a_run_counts_real_tokens_and_padding(fixes):
    result = LANGUAGE.run(fixes, epochs=2)
    steps = result["steps"] // 2
    assert steps == (6 if fixes == SLOW else math.ceil(real_tokens(all_of_it=True) / capacity()))
    assert result["source"] == "synthetic text, seed 0"
    assert result["real_tokens_per_s"] == pytest.approx(real_tokens() / steps / result["iteration_mean_ms"] * 1e3)
    positions = steps * (4 * 192 if fixes == SLOW else capacity())
    assert result["padding_share"] == pytest.approx(1 - real_tokens() / positions)
    assert 0 <= result["validation_accuracy"] <= 1
    assert result["validation_loss"] < math.log(512)


def test_a_packed_batch_has_the_loss_of_its_samples_alone():
    """All samples in one pack, and one by one: the same tokens predicted, with the same loss."""
    everything, one_by_one = (
        LANGUAGE.prepare(CLEAN - {"packed"} | packed, batch_size=size, dropout=0.0, samples=6)
        for packed, size in (({"packed"}, 6), (set(), 1))
    )
    (batch,) = everything.epoch(0)
    losses = [(alone.real, one_by_one.forward(alone)[0]) for alone in one_by_one.epoch(0)]
    assert batch.real == sum(real for real, _ in losses)
    mean = sum(real * loss for real, loss in losses) / batch.real
    torch.testing.assert_close(everything.step(batch), mean.detach(), atol=1e-6, rtol=1e-5)


def test_padding_is_short_or_long_and_a_pack_always_as_long():
    widths = {}
    for name in ("no_item", "short_padding", "packed"):
        widths[name] = [batch.inputs.shape for batch in LANGUAGE.prepare({name}).epoch(0)]
    assert set(widths["no_item"]) == {(4, 192)}
    assert len(set(widths["short_padding"])) > 1
    assert max(width for _, width in widths["short_padding"]) <= lengths().max() - 1
    assert set(widths["packed"]) == {(1, capacity())}


def test_a_text_teaches_the_model_what_follows_what():
    size = {"samples": 200, "validation_samples": 40, "vocab_size": 99, "max_length": 32, "layers": 1, "batch_size": 8}
    result = LANGUAGE.run(CLEAN, epochs=4, dropout=0.0, learning_rate=3e-2, **size)
    assert result["validation_loss"] < 3.72 - 1  # nats: the entropy of the words' frequencies


@settings(max_examples=20, deadline=None)
@given(samples=st.integers(1, 20), vocabulary=st.integers(4, 3000))
def test_lines_of_text_are_the_samples_again(samples, vocabulary):
    text = SyntheticText(samples, seed=3, vocab_size=vocabulary)
    lines = Lines(text)
    assert len(lines) == len(text)
    for index, line in enumerate(lines):
        np.testing.assert_array_equal(line, text[index])
        assert lines.lengths[index] == len(line)


def test_wikitext_is_learned_from_where_it_is_given(tmp_path):
    written = {
        "valid": " = A Title = \n\n It 's a <unk> of ( 2 @,@ 000 ) words ; yes !\n" * 6,
        "test": " A title of words .\n",
    }
    for name, text in written.items():
        (tmp_path / f"wiki.{name}.tokens").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HELPERS_CACHE", str(tmp_path / "cache"))
        train, validation = open_texts(tmp_path, 10, 5, 99)
        result = LANGUAGE.run(LANGUAGE.fixed - {"workers"}, path=tmp_path, samples=10)
    assert (len(train), len(validation)) == (10, 1)
    assert train.vocab == validation.vocab
    assert result["source"] == train.source
    for text in (train, validation):
        for line, sample in zip(Lines(text), text, strict=True):
            np.testing.assert_array_equal(line, sample)


@settings(max_examples=30, deadline=None)
@given(count=st.integers(1, 50), size=st.integers(1, 20), seed=st.integers(0, 5))
def test_an_epoch_has_every_sample_once_in_an_order_of_its_own(count, size, seed):
    order = RandomOrder(count, size, seed)
    epochs = []
    for epoch in (0, 1, 0):
        order.set_epoch(epoch)
        batches = list(order)
        assert len(batches) == len(order)
        epochs.append(list(itertools.chain(*batches)))
        assert sorted(epochs[-1]) == list(range(count))
    assert epochs[0] == epochs[2]
    assert epochs[0] != epochs[1] or count < 5


@settings(max_examples=40, deadline=None)
@given(data=st.data(), batch=st.integers(1, 3), length=st.integers(1, 6), words=st.integers(2, 9))
def test_the_spelled_out_loss_and_the_hosts_accuracy_are_the_fast_ones(data, batch, length, words):
    drawn = st.lists(st.integers(0, words - 1), min_size=batch * length, max_size=batch * length)
    targets = torch.tensor(data.draw(drawn)).view(batch, length)
    torch.manual_seed(batch * length * words)
    logits = [(3 * torch.randn(batch, length, words)).requires_grad_()]
    logits.append(logits[0].detach().clone().requires_grad_())
    functions = SpelledOutLoss(0), LMCrossEntropyLoss(0)
    losses = [loss(each, targets) for loss, each in zip(functions, logits, strict=True)]
    torch.testing.assert_close(*losses, atol=1e-6, rtol=1e-5)
    gradients = [torch.autograd.grad(loss, each)[0] for loss, each in zip(losses, logits, strict=True)]
    torch.testing.assert_close(*gradients, atol=1e-6, rtol=1e-5)
    ours, theirs = HostAccuracy(0), LMAccuracy(0)
    for part in (slice(0, 1), slice(1, None)):
        for accuracy in (ours, theirs):
            accuracy.update(logits[0][part], targets[part])
    np.testing.assert_equal(ours.compute(), theirs.compute())
