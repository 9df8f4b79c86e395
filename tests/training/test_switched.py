"""Trainings that are slow on purpose: fixes that are speed only change no number, the others do, every subset runs."""

import functools
import math
import os
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from training_cases import plain_gpt_state, plain_vit_state

from helpers.models import GPT2LikeModel, ViT
from helpers.profiling import diagnose
from helpers.profiling.findings import (
    ATTENTION,
    CHAINS,
    CONSTANT,
    HOST_WAITS,
    SEPARATE,
    UNALIGNED,
    UNFUSED,
    UNUSED,
    ZEROED,
)
from helpers.training import CLOTHES, LANGUAGE, Excerpt, clothes, language, loop

SLOW = frozenset()
BOTH = {"language": LANGUAGE, "clothes": CLOTHES}
PLAIN = {"language": plain_gpt_state, "clothes": plain_vit_state}
BY_NAME = {name: {switch.name: switch for switch in subject.switches} for name, subject in BOTH.items()}
# Without bf16, for its rounding; without the photos on the device, which leave a loader nothing to do; without workers,
# which take time to start.
CLEAN = {name: subject.fixed - {"bf16", "photos_on_device", "workers"} for name, subject in BOTH.items()}
EAGER = [(name, fix) for name, switches in BY_NAME.items() for fix in switches if fix != "compile"]
SPEED_ONLY = [(name, fix) for name, fix in EAGER if BY_NAME[name][fix].changes is None]
CPU = [torch.profiler.ProfilerActivity.CPU]

subjects = pytest.mark.parametrize("name", BOTH)


@pytest.fixture(scope="module", autouse=True)
def on_the_cpu(tmp_path_factory):
    """Here the numbers are exact to the last few bits; what a GPU does is in tests/gpu."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HELPERS_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(torch.cuda, "is_available", lambda: False)
        yield


@functools.cache
def observe(name, fixes):
    """Three steps without dropout: the result, and the loss and all gradients of each step under the model's names."""
    seen = []

    def look(step):
        gradients = {name: p.grad.clone() for name, p in step.model.named_parameters() if p.grad is not None}
        seen.append({"loss": step.loss.clone()} | PLAIN[name](gradients))

    return BOTH[name].run(fixes, steps=3, dropout=0.0, on_step=look), seen


def assert_same(one, other):
    (one, one_seen), (other, other_seen) = one, other
    torch.testing.assert_close(one_seen, other_seen, atol=1e-6, rtol=1e-4)
    assert len(one_seen) == 3
    assert one["validation_accuracy"] == other["validation_accuracy"]
    for name in {"train_loss", "train_accuracy", "train_macro_f1", "validation_loss", "validation_macro_f1"} & set(one):
        assert one[name] == pytest.approx(other[name], rel=1e-5)


@pytest.mark.parametrize(("name", "fix"), SPEED_ONLY)
def test_a_speed_only_fix_leaves_every_loss_and_gradient_as_it_is(name, fix):
    assert_same(observe(name, frozenset({fix})), observe(name, SLOW))


@pytest.mark.parametrize(("name", "fix"), [(name, fix) for name, fix in SPEED_ONLY if fix in CLEAN[name]])
def test_a_speed_only_fault_in_a_clean_loop_changes_no_number_either(name, fix):
    assert_same(observe(name, CLEAN[name] - {fix}), observe(name, CLEAN[name]))


@pytest.mark.parametrize(("name", "fix"), [(name, fix) for name, fix in EAGER if BY_NAME[name][fix].changes])
def test_a_fix_that_is_said_to_change_something_does(name, fix):
    (result, seen), (slow, slow_seen) = observe(name, frozenset({fix})), observe(name, SLOW)
    assert result["steps"] == 3
    assert result["train_loss"] == pytest.approx(slow["train_loss"], rel=0.1)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(seen, slow_seen, atol=1e-6, rtol=1e-4)


@subjects
def test_compile_leaves_loss_and_gradients_as_they_are(name, monkeypatch):
    used = []
    eager = functools.partial(torch.compile, backend="eager")
    monkeypatch.setattr(torch, "compile", lambda model: used.append(model) or eager(model))
    assert_same(observe(name, CLEAN[name] | {"compile"}), observe(name, CLEAN[name]))
    assert len(used) == 1


@settings(max_examples=8, deadline=None)
@given(fixes=st.sets(st.sampled_from(sorted(LANGUAGE.fixed - {"workers"}))))
def test_any_subset_of_the_fixes_runs(fixes):
    result = LANGUAGE.run(fixes, steps=1)
    assert result["steps"] == 1
    assert result["train_loss"] == pytest.approx(math.log(499), rel=0.1)  # nothing is learned yet


def profiled(subject, fixes, schedule, **options):
    profilers = []

    def profile(model):
        profilers.append(torch.profiler.profile(activities=CPU, schedule=schedule, **options))
        return profilers[0]

    return profilers, profile


@pytest.mark.parametrize(
    ("fixes", "planted"),
    [
        (SLOW, {ATTENTION, CHAINS, CONSTANT, HOST_WAITS, SEPARATE, UNALIGNED, UNFUSED, UNUSED, ZEROED}),
        (CLEAN["language"], set()),
    ],
    ids=["slow", "clean"],
)
def test_a_diagnosis_finds_what_is_planted_and_nothing_else(fixes, planted):
    schedule = torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=1)
    profilers, profile = profiled(LANGUAGE, fixes, schedule, record_shapes=True, with_stack=True)
    LANGUAGE.run(fixes, steps=5, samples=48, profile=profile)
    diagnosis = diagnose(profilers[0], least=0.0)
    noted = {HOST_WAITS} if any(note.kind == HOST_WAITS for note in diagnosis.notes) else set()
    assert set(diagnosis.table["finding"]) | noted == planted


@subjects
def test_a_profile_shows_the_parts_of_a_step_by_name(name):
    profilers, profile = profiled(BOTH[name], CLEAN[name], torch.profiler.schedule(wait=0, warmup=1, active=3))
    BOTH[name].run(CLEAN[name], steps=3, profile=profile)
    calls = {event.key: event.count for event in profilers[0].key_averages()}
    for part in ("load", "backward", "optimizer"):
        assert calls[part] == 2
    assert calls["forward"] == calls["loss"] > 2  # in validation, too
    assert calls["metrics"] >= 2
    assert calls["validation"] == 1
    assert calls["ProfilerStep*"] >= 2


@subjects
def test_the_same_run_twice_gives_the_same_numbers(name):
    first, again = (BOTH[name].run(epochs=2) for _ in range(2))
    for column in ("train_loss", "train_accuracy", "validation_loss", "validation_accuracy"):
        assert first[column] == again[column]


@subjects
def test_a_run_of_some_steps_ends_after_them_and_has_no_epoch(name):
    result = BOTH[name].run(steps=2, epochs=5)
    assert (result["steps"], result["epoch_s"]) == (2, None)
    assert result["validation_accuracy"] >= 0


def test_an_excerpt_is_not_validated_and_ends_when_its_time_is_up():
    patient = CLOTHES.run(steps=Excerpt(6, settling=2), passes=2)
    assert (patient["steps"], patient["n"]) == (6, 4)
    assert "validation_accuracy" not in patient
    hurried = CLOTHES.run(steps=Excerpt(100, settling=2, within_s=0.0), passes=40)
    assert (hurried["steps"], hurried["n"]) == (2 + loop.ENOUGH, loop.ENOUGH)


@subjects
def test_a_rate_is_of_what_counts_and_values_are_plain(name):
    result = BOTH[name].run(CLEAN[name], epochs=2)
    assert 0 < result["iteration_p20_ms"] <= result["iteration_ms"] <= result["iteration_p80_ms"]
    assert result["epoch_s"] > result["steps"] / 2 * result["iteration_p20_ms"] / 1e3
    assert result[BOTH[name].rate] > 0
    assert result["prepare_s"] > 0 == BOTH[name].run(SLOW, steps=1)["prepare_s"]
    assert {type(value) for value in result.values()} <= {int, float, str, type(None)}  # plain, to be recorded


@subjects
def test_every_switch_names_its_fault_and_what_else_it_changes(name):
    table, changing = BOTH[name].switches, {s.name for s in BOTH[name].switches if s.changes}
    assert len({switch.name for switch in table}) == len(table) >= 12
    assert {switch.name for switch in table if not switch.fault} == {"bf16"} | {s.name for s in table if s.optional}
    assert (
        changing
        == {
            "language": {"packed", "bf16", "width_1024", "vocabulary_64"},
            "clothes": {"single_cut", "decode_once", "width_256", "bf16", "photos_on_device"},
        }[name]
    )
    assert BOTH[name].everything - BOTH[name].fixed <= {"compile", "cuda_graph"}


@pytest.mark.parametrize("fix", ["none", "fused_qkv", "no_dead_projection", "positions_once"])
def test_a_language_models_weights_go_from_any_variant_to_the_plain_one(fix):
    chosen = LANGUAGE.sizes["small"] | {"dropout": 0.0}
    tokens = torch.randint(1, 499, (2, 40))
    trainer = LANGUAGE.prepare({fix} - {"none"}, dropout=0.0)
    plain = GPT2LikeModel(499, **chosen["shape"][0], num_layers=2, max_length=193, dropout=0.0)
    plain.load_state_dict(plain_gpt_state(trainer.model.state_dict()))
    causal = functools.partial(torch.nn.functional.scaled_dot_product_attention, is_causal=True)
    torch.testing.assert_close(trainer.model(tokens, attend=causal), plain(tokens), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("fix", ["none", "fused_qkv", "conv_patches", "fused_attention"])
def test_a_vits_weights_go_from_any_variant_to_the_plain_one(fix):
    chosen = CLOTHES.sizes["small"] | {"dropout": 0.0}
    images = torch.randn(2, 3, 32, 32)
    model = clothes.build_vit(chosen, 4, 0, CLOTHES.faults({fix}))
    plain = ViT(4, width=model.head.in_features, dropout=0.0, **chosen["model"])
    plain.load_state_dict(plain_vit_state(model.state_dict()))
    torch.testing.assert_close(plain(images), model(images), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("preset", LANGUAGE.sizes)
def test_the_fixed_sizes_suit_the_kernels_and_the_slow_ones_do_not(preset):
    chosen = LANGUAGE.sizes[preset]
    slow, fixed = chosen["shape"]
    assert slow["d_model"] % 4
    assert fixed["d_model"] % 32 == fixed["d_model"] // fixed["num_heads"] % 8 == 0
    assert chosen["vocab_size"] % 64
    if preset == "full":
        assert (slow["d_model"], fixed["d_model"] % 64) == (1023, 0)


def test_the_vocabulary_is_rounded_up_by_its_fix():
    words = [LANGUAGE.prepare(fixes).model.head.out_features for fixes in (SLOW, {"vocabulary_64"})]
    assert words == [499, 512]


@subjects
def test_validation_keeps_no_graph_when_that_is_fixed(name):
    for fix, kept in (("inference_mode", False), ("no_item", True)):
        trainer, seen = BOTH[name].prepare({fix}), []
        trainer.model.register_forward_hook(lambda module, inputs, output, seen=seen: seen.append(output))
        trainer.validate()
        assert all((output.grad_fn is not None) == kept for output in seen)
        assert trainer.model.training


def test_the_dead_projection_is_computed_and_gets_no_gradient():
    trainer, calls = LANGUAGE.prepare(CLEAN["language"] - {"no_dead_projection"}), []
    dead = trainer.model.decoder.layers[0].linear1.dead
    dead.register_forward_hook(lambda *_: calls.append(1))
    trainer.step(next(trainer.epoch(0)))
    assert (len(calls), dead.weight.grad) == (1, None)


def test_the_mask_and_the_table_of_positions_are_made_in_each_step_until_that_is_fixed():
    def made(fixes):
        trainer = LANGUAGE.prepare(fixes)
        batches = trainer.epoch(0)
        trainer.step(next(batches))
        with torch.profiler.profile(activities=CPU) as prof:
            trainer.step(next(batches))
        counts = {event.key: event.count for event in prof.key_averages()}
        return counts.get("aten::triu", 0), counts.get("aten::sin", 0)

    clean = CLEAN["language"]
    assert [made(clean - removed) for removed in (set(), {"fused_attention"}, {"positions_once"})] == [
        (0, 0), (1, 0), (0, 1),
    ]  # fmt: skip


@pytest.mark.parametrize("before", [(False, False), (True, False), (True, True)])
def test_settings_of_torch_are_put_back(before):
    def now():
        return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()

    seen, environment = [], dict(os.environ)
    try:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for fixes in (SLOW, CLEAN["language"]):
                LANGUAGE.run(fixes, steps=1, on_step=lambda _: seen.append(now()[0]))
                assert now() == before
        assert os.environ == environment
    finally:
        torch.use_deterministic_algorithms(False)
    assert seen == [True, False]


def test_cudnns_settings_are_put_back():
    cudnn = torch.backends.cudnn
    before = (cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32)
    seen = []
    for fixes in (SLOW, CLOTHES.fixed):
        CLOTHES.run(fixes, steps=1, on_step=lambda _: seen.append((cudnn.benchmark, cudnn.deterministic)))
        assert (cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32) == before
    assert seen == [(False, True), (True, False)]


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("language", {"fixes": {"faster"}}, "unknown fix 'faster'; valid: token_cache, workers"),
        ("clothes", {"fixes": {"faster"}}, "unknown fix 'faster'; valid: workers, pinned"),
        ("language", {"fixes": "workers"}, "fixes is 'workers'; it must be a set of names"),
        ("language", {"preset": "huge"}, "unknown preset 'huge'; valid: small, reduced, cpu, gpu, full"),
        ("clothes", {"preset": "huge"}, "unknown preset 'huge'; valid: small, cpu, gpu, full"),
        ("language", {"epochs": 0}, "epochs is 0; it must be an integer of at least 1"),
        ("language", {"steps": True}, "steps is True"),
        ("clothes", {"steps": 0}, "steps is 0"),
        ("clothes", {"batch_size": 0}, "batch_size is 0; it must be an integer of at least 1"),
        ("language", {"workers": -1}, "workers is -1; it must be an integer of at least 0"),
        ("language", {"colour": 1}, "the preset has no 'colour' to change; it has words"),
        ("clothes", {"colour": 1}, "the preset has no 'colour' to change; it has"),
    ],
)
def test_wrong_arguments_are_named(name, arguments, said):
    with pytest.raises(ValueError, match=said):
        BOTH[name].run(**arguments)


def test_every_task_has_its_sizes_in_one_form():
    optional = {"workers", "limited", "micro_batches"}
    for sizes in (language.SIZES, language.SWITCHED_SIZES):
        assert {frozenset(size) - optional for size in sizes.values()} == {frozenset(sizes["small"]) - optional}
