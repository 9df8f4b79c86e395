"""The language model's pipeline: fixes that are speed only change no number, the others do, and every subset runs."""

import functools
import itertools
import math
import os
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.metrics import LMAccuracy, LMCrossEntropyLoss
from helpers.models import GPT2LikeModel
from helpers.profiling import diagnose, gpt_pipeline, loop
from helpers.profiling.findings import (
    ATTENTION,
    CONSTANT,
    HOST_WAITS,
    SEPARATE,
    UNALIGNED,
    UNFUSED,
    UNUSED,
    ZEROED,
)
from helpers.profiling.gpt_data import EpochBatches, Lines, open_texts
from helpers.profiling.gpt_pipeline import ALL, FIXED, PRESETS, SWITCHES, alone, build_model, cumulative, prepare, run
from helpers.profiling.gpt_slow import HostAccuracy, SpelledOutLoss, plain_state
from helpers.text import SyntheticText

SLOW = frozenset()
CPU = [torch.profiler.ProfilerActivity.CPU]
BY_NAME = {switch.name: switch for switch in SWITCHES}
EAGER = [switch.name for switch in SWITCHES if switch.name != "compile"]
SPEED_ONLY = [name for name in EAGER if BY_NAME[name].changes is None]
CLEAN = FIXED - {"bf16", "workers"}  # without rounding, and without what takes time to start


@pytest.fixture(scope="module", autouse=True)
def on_the_cpu():
    """Here the numbers are exact to the last few bits; what a GPU does is in tests/gpu."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (gpt_pipeline, loop):
            patch.setattr(module, "device", lambda: torch.device("cpu"))
        yield


def observe(fixes, **changes):
    """Three steps without dropout: the result, and the loss and all gradients of each step under the model's names."""
    seen = []

    def look(number, loss, model):
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        seen.append({"loss": loss.clone()} | plain_state(gradients))

    return run(fixes, steps=3, dropout=0.0, on_step=look, **changes), seen


@pytest.fixture(scope="module")
def slow():
    return observe(SLOW)


@pytest.fixture(scope="module")
def clean():
    return observe(CLEAN)


def assert_same(one, other):
    (one, one_seen), (other, other_seen) = one, other
    torch.testing.assert_close(one_seen, other_seen, atol=1e-6, rtol=1e-4)
    assert len(one_seen) == 3
    for name in ("train_accuracy", "validation_accuracy"):
        assert one[name] == other[name]
    for name in ("train_loss", "validation_loss"):
        assert one[name] == pytest.approx(other[name], rel=1e-5)


@pytest.mark.parametrize("name", SPEED_ONLY)
def test_a_speed_only_fix_leaves_every_loss_and_gradient_as_it_is(name, slow):
    assert_same(observe({name}), slow)


@pytest.mark.parametrize("name", sorted(CLEAN.intersection(SPEED_ONLY)))
def test_a_speed_only_fault_in_a_clean_loop_changes_no_number_either(name, clean):
    assert_same(observe(CLEAN - {name}), clean)


@pytest.mark.parametrize("name", [name for name in EAGER if BY_NAME[name].changes])
def test_a_fix_that_is_said_to_change_something_does(name, slow):
    found, seen = observe({name})
    assert found["steps"] == 3
    assert found["train_loss"] == pytest.approx(slow[0]["train_loss"], rel=0.1)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(seen, slow[1], atol=1e-6, rtol=1e-4)


def test_compile_leaves_loss_and_gradients_as_they_are(clean, monkeypatch):
    used = []
    eager = functools.partial(torch.compile, backend="eager")
    monkeypatch.setattr(torch, "compile", lambda model: used.append(model) or eager(model))
    assert_same(observe(CLEAN | {"compile"}), clean)
    assert len(used) == 1


@settings(max_examples=8, deadline=None)
@given(fixes=st.sets(st.sampled_from(sorted(FIXED - {"workers"}))))
def test_any_subset_of_the_fixes_runs(fixes):
    found = run(fixes, steps=1)
    assert found["steps"] == 1
    assert found["train_loss"] == pytest.approx(math.log(499), rel=0.1)  # nothing is learned yet


@pytest.mark.parametrize(
    ("fixes", "planted"),
    [
        (
            SLOW,
            {ATTENTION, CONSTANT, HOST_WAITS, SEPARATE, UNALIGNED, UNFUSED, UNUSED, ZEROED},
        ),
        (CLEAN, set()),
    ],
    ids=["slow", "clean"],
)
def test_a_diagnosis_finds_what_is_planted_and_nothing_else(fixes, planted):
    profilers = []

    def profile(model):
        schedule = torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=1)
        profilers.append(torch.profiler.profile(activities=CPU, schedule=schedule, record_shapes=True, with_stack=True))
        return profilers[0]

    run(fixes, steps=5, samples=48, profile=profile)
    assert set(diagnose(profilers[0])["finding"]) == planted


def test_a_packed_batch_has_the_loss_of_its_samples_alone():
    """All samples in one pack, and one by one: the same tokens predicted, with the same loss."""
    everything, one_by_one = (
        prepare(CLEAN - {"packed"} | packed, batch_size=size, dropout=0.0, samples=6)
        for packed, size in (({"packed"}, 6), (set(), 1))
    )
    (batch,) = everything.epoch(0)
    losses = [(training.real, one_by_one.loss(one_by_one._logits(one_by_one.model, training), training.targets))
              for training in one_by_one.epoch(0)]  # fmt: skip
    assert batch.real == sum(real for real, _ in losses)
    mean = sum(real * loss for real, loss in losses) / batch.real
    torch.testing.assert_close(everything.step(batch), mean.detach(), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("fixes", [SLOW, FIXED], ids=["slow", "fixed"])
def test_a_run_says_what_it_took_and_what_was_learned(fixes):
    found = run(fixes, epochs=2)
    steps = found["steps"] // 2
    assert steps == (6 if fixes == SLOW else math.ceil(real_tokens(all_of_it=True) / capacity()))
    assert found["source"] == "synthetic text, seed 0"
    assert 0 < found["iteration_p20_ms"] <= found["iteration_ms"] <= found["iteration_p80_ms"]
    rate = real_tokens() / steps / found["iteration_mean_ms"] * 1e3
    assert found["real_tokens_per_s"] == pytest.approx(rate)
    assert found["padding_share"] == pytest.approx(
        1 - real_tokens() / (steps * (4 * 192 if fixes == SLOW else capacity()))
    )
    assert found["epoch_s"] > steps * found["iteration_p20_ms"] / 1e3
    assert (found["prepare_s"] > 0) == (fixes == FIXED)
    assert 0 <= found["validation_accuracy"] <= 1
    assert found["validation_loss"] < math.log(512)
    assert {type(value) for value in found.values()} <= {int, float, str, type(None)}  # plain, to be recorded


def lengths():
    chosen = PRESETS["small"]
    text = SyntheticText(chosen["samples"], 0, chosen["vocab_size"])
    return np.minimum(text.lengths, chosen["max_length"] + 1)


def real_tokens(all_of_it=False):
    return int(lengths().sum()) - (0 if all_of_it else len(lengths()))


def capacity():
    return math.ceil(max(round(4 * lengths().mean()), lengths().max()) / 64) * 64


def test_the_same_run_twice_gives_the_same_numbers():
    first, again = (run(FIXED) for _ in range(2))
    for name in ("train_loss", "train_accuracy", "validation_loss", "validation_accuracy"):
        assert first[name] == again[name]


def test_a_run_of_some_steps_ends_after_them_and_has_no_epoch():
    found = run(FIXED, steps=2, epochs=5)
    assert (found["steps"], found["epoch_s"]) == (2, None)
    assert found["validation_accuracy"] >= 0


def test_alone_and_cumulative_go_through_all_fixes_in_order():
    names = [switch.name for switch in SWITCHES]
    assert alone() == [SLOW, *({name} for name in names)]
    steps = cumulative()
    assert steps[0] == SLOW
    assert steps[-1] == ALL == set(names)
    assert [next(iter(after - before)) for before, after in itertools.pairwise(steps)] == names
    assert {"compile"} == ALL - FIXED
    assert len(names) == len(set(names)) >= 10


def test_every_switch_says_what_is_slow_what_mends_it_and_what_else_changes():
    assert {switch.kind.partition(" the ")[0] for switch in SWITCHES} == {"speed only", "changes"}
    assert {switch.name for switch in SWITCHES if switch.changes} == {"packed", "bf16", "width_1024", "vocabulary_64"}
    assert all(switch.slow and switch.fixed and switch.where for switch in SWITCHES)


@pytest.mark.parametrize("fixes", [SLOW, {"fused_qkv"}, {"no_dead_projection"}, {"positions_once"}], ids=str)
def test_weights_go_from_any_variant_to_the_plain_model(fixes):
    chosen = PRESETS["small"] | {"dropout": 0.0}
    tokens = torch.randint(1, 499, (2, 40))
    model = build_model(frozenset(fixes), 499, 0, chosen, seed=0)
    plain = GPT2LikeModel(499, d_model=30, num_heads=2, num_layers=2, max_length=193, dropout=0.0)
    plain.load_state_dict(plain_state(model.state_dict()))
    causal = functools.partial(torch.nn.functional.scaled_dot_product_attention, is_causal=True)
    torch.testing.assert_close(model(tokens, attend=causal), plain(tokens), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("preset", PRESETS)
def test_the_fixed_sizes_suit_the_kernels_and_the_slow_ones_do_not(preset):
    chosen = PRESETS[preset]
    slow, fixed = chosen["shape"]
    assert slow["d_model"] % 4
    assert fixed["d_model"] % 32 == fixed["d_model"] // fixed["num_heads"] % 8 == 0
    assert chosen["vocab_size"] % 64
    if preset == "full":
        assert (slow["d_model"], fixed["d_model"] % 64) == (1023, 0)
    small = PRESETS["small"]
    padded = build_model(frozenset({"vocabulary_64"}), 499, 0, small, 0)
    assert (padded.head.out_features, build_model(SLOW, 499, 0, small, 0).head.out_features) == (512, 499)


def test_a_profile_shows_the_parts_of_a_step_by_name():
    profilers = []

    def profile(model):
        schedule = torch.profiler.schedule(wait=0, warmup=1, active=3)
        profilers.append(torch.profiler.profile(activities=CPU, schedule=schedule))
        return profilers[0]

    run(CLEAN, steps=3, profile=profile)
    calls = {event.key: event.count for event in profilers[0].key_averages()}
    for name in ("load", "forward", "loss", "backward", "optimizer"):
        assert calls[name] == 2
    assert calls["metrics"] >= 2
    assert calls["validation"] == 1


def test_validation_keeps_no_graph_when_that_is_fixed():
    for name, kept in (("inference_mode", False), ("no_item", True)):
        training, seen = prepare({name}), []
        training.model.register_forward_hook(lambda module, inputs, output, seen=seen: seen.append(output))
        training.validate()
        assert all((output.grad_fn is not None) == kept for output in seen)
        assert training.model.training


def test_the_dead_projection_is_computed_and_gets_no_gradient():
    training, calls = prepare(CLEAN - {"no_dead_projection"}), []
    dead = training.model.decoder.layers[0].linear1.dead
    dead.register_forward_hook(lambda *_: calls.append(1))
    training.step(next(training.epoch(0)))
    assert (len(calls), dead.weight.grad) == (1, None)


def test_the_mask_and_the_table_of_positions_are_made_in_each_step_until_that_is_fixed():
    def made(fixes):
        training = prepare(fixes)
        batches = training.epoch(0)
        training.step(next(batches))
        with torch.profiler.profile(activities=CPU) as prof:
            training.step(next(batches))
        counts = {event.key: event.count for event in prof.key_averages()}
        return counts.get("aten::triu", 0), counts.get("aten::sin", 0)

    assert made(CLEAN) == (0, 0)
    assert made(CLEAN - {"fused_attention"}) == (1, 0)
    assert made(CLEAN - {"positions_once"}) == (0, 1)


@pytest.mark.parametrize("before", [(False, False), (True, False), (True, True)])
def test_settings_of_torch_are_put_back(before):
    def now():
        return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()

    seen, environment = [], dict(os.environ)
    try:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for fixes in (SLOW, CLEAN):
                run(fixes, steps=1, on_step=lambda *_: seen.append(now()[0]))
                assert now() == before
        assert os.environ == environment
    finally:
        torch.use_deterministic_algorithms(False)
    assert seen == [True, False]


def test_a_text_teaches_the_model_what_follows_what():
    size = {"samples": 320, "validation_samples": 60, "vocab_size": 99, "max_length": 32, "layers": 1, "batch_size": 8}
    found = run(CLEAN, epochs=4, dropout=0.0, learning_rate=2e-2, **size)
    assert found["validation_loss"] < SyntheticText(320, 0, 99).unigram_entropy - 1


# Data


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
        found = run(FIXED - {"workers"}, path=tmp_path, samples=10)
    assert (len(train), len(validation)) == (10, 1)
    assert train.vocab == validation.vocab
    assert found["source"] == train.source
    for text in (train, validation):
        for line, sample in zip(Lines(text), text, strict=True):
            np.testing.assert_array_equal(line, sample)


@settings(max_examples=30, deadline=None)
@given(count=st.integers(1, 50), size=st.integers(1, 20), seed=st.integers(0, 5))
def test_an_epoch_has_every_sample_once_in_an_order_of_its_own(count, size, seed):
    order = EpochBatches(count, size, seed)
    epochs = []
    for epoch in (0, 1, 0):
        order.set_epoch(epoch)
        batches = list(order)
        assert len(batches) == len(order)
        epochs.append(list(itertools.chain(*batches)))
        assert sorted(epochs[-1]) == list(range(count))
    assert epochs[0] == epochs[2]
    assert epochs[0] != epochs[1] or count < 5


def test_padding_is_short_or_long_and_a_pack_always_as_long():
    widths = {}
    for name in ("no_item", "short_padding", "packed"):
        widths[name] = [batch.tokens.shape for batch in prepare({name}).epoch(0)]
    assert set(widths["no_item"]) == {(4, 192)}
    assert len(set(widths["short_padding"])) > 1
    assert max(width for _, width in widths["short_padding"]) <= lengths().max() - 1
    assert set(widths["packed"]) == {(1, capacity())}


def test_a_batch_larger_than_the_data_is_packed_as_long_as_the_data():
    (batch,) = prepare({"packed"}, batch_size=1000).epoch(0)
    assert batch.tokens.shape[1] - lengths().sum() in range(64)


# Loss and accuracy


@settings(max_examples=40, deadline=None)
@given(data=st.data(), batch=st.integers(1, 3), length=st.integers(1, 6), words=st.integers(2, 9))
def test_the_spelled_out_loss_and_the_hosts_accuracy_are_the_fast_ones(data, batch, length, words):
    targets = torch.tensor(
        data.draw(st.lists(st.integers(0, words - 1), min_size=batch * length, max_size=batch * length))
    )
    targets = targets.view(batch, length)
    torch.manual_seed(batch * length * words)
    logits = [(3 * torch.randn(batch, length, words)).requires_grad_()]
    logits.append(logits[0].detach().clone().requires_grad_())
    losses = [
        loss(each, targets) for loss, each in zip((SpelledOutLoss(0), LMCrossEntropyLoss(0)), logits, strict=True)
    ]
    torch.testing.assert_close(*losses, atol=1e-6, rtol=1e-5)
    gradients = [torch.autograd.grad(loss, each)[0] for loss, each in zip(losses, logits, strict=True)]
    torch.testing.assert_close(*gradients, atol=1e-6, rtol=1e-5)
    ours, theirs = HostAccuracy(0), LMAccuracy(0)
    for part in (slice(0, 1), slice(1, None)):
        for accuracy in (ours, theirs):
            accuracy.update(logits[0][part], targets[part])
    np.testing.assert_equal(ours.compute(), theirs.compute())


# What the user got wrong


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"fixes": {"faster"}}, "unknown fix 'faster'; valid: token_cache, workers"),
        ({"fixes": "workers"}, "fixes is 'workers'; it must be a set of names"),
        ({"preset": "huge"}, "unknown preset 'huge'; valid: small, reduced, full"),
        ({"epochs": 0}, "epochs is 0; it must be an integer of at least 1"),
        ({"steps": True}, "steps is True"),
        ({"workers": -1}, "workers is -1; it must be an integer of at least 0"),
        ({"colour": 1}, "the preset has no 'colour' to change; it has samples"),
    ],
)
def test_wrong_arguments_are_named(arguments, said):
    with pytest.raises(ValueError, match=said):
        run(**arguments)
