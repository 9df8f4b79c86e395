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

from helpers.findings.diagnose import diagnose
from helpers.training import CLOTHES, LANGUAGE

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
def on_the_cpu():
    """Here the numbers are exact to the last few bits; what a GPU does is in tests/gpu."""
    with pytest.MonkeyPatch.context() as patch:
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


@subjects
def test_speed_only_fixes_leave_every_loss_and_gradient_as_they_are(name):
    fixes = {fix for subject, fix in SPEED_ONLY if subject == name and BY_NAME[name][fix].fault}
    assert_same(observe(name, frozenset(fixes)), observe(name, SLOW))


@pytest.mark.long
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


@settings(max_examples=4, deadline=None)
@given(fixes=st.sets(st.sampled_from(sorted(LANGUAGE.fixed - {"workers"}))))
def test_any_subset_of_the_fixes_runs(fixes):
    result = LANGUAGE.run(fixes, steps=1, samples=4, validation_samples=4)
    assert result["steps"] == 1
    assert result["train_loss"] == pytest.approx(math.log(499), rel=0.1)  # nothing is learned yet


def profiled(schedule, **options):
    profilers = []

    def profile(model):
        profilers.append(torch.profiler.profile(activities=CPU, schedule=schedule, **options))
        return profilers[0]

    return profilers, profile


@pytest.mark.parametrize(
    ("fixes", "planted"),
    [
        (
            SLOW,
            {
                "attention from matmul and softmax",
                "unfused elementwise operations",
                "repeated constant work",
                "host synchronisation",
                "separate projections of one input",
                "unaligned sizes",
                "unfused optimizer",
                "result never used",
                "gradients zeroed, not dropped",
                "deterministic algorithms",
            },
        ),
        (CLEAN["language"], set()),
    ],
    ids=["slow", "clean"],
)
def test_a_diagnosis_finds_what_is_planted_and_nothing_else(fixes, planted):
    schedule = torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=1)
    profilers, profile = profiled(schedule, record_shapes=True, with_stack=True)
    LANGUAGE.run(fixes, steps=5, samples=48, profile=profile)
    diagnosis = diagnose(profilers[0], least=0.0)
    noted = {"host synchronisation"} if any(note.kind == "host synchronisation" for note in diagnosis.notes) else set()
    assert set(diagnosis.table["finding"]) - {"waiting for the loader"} | noted == planted  # a busy machine loads late


@subjects
def test_a_profile_shows_the_parts_of_a_step_by_name(name):
    profilers, profile = profiled(torch.profiler.schedule(wait=0, warmup=1, active=3))
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
    first, again = (BOTH[name].run(CLEAN[name] | {"workers"}, epochs=2) for _ in range(2))
    for column in ("train_loss", "train_accuracy", "validation_loss", "validation_accuracy"):
        assert first[column] == again[column]


@subjects
def test_a_run_of_some_steps_ends_after_them_and_has_no_epoch(name):
    result = BOTH[name].run(CLEAN[name], steps=2, epochs=5)
    assert (result["steps"], result["epoch_s"]) == (2, None)
    assert result["validation_accuracy"] >= 0
    assert "validation_accuracy" not in BOTH[name].run(CLEAN[name], steps=1, validates=False)


@subjects
def test_a_rate_is_of_what_counts_and_values_are_plain(name):
    result = BOTH[name].run(CLEAN[name], epochs=2)
    assert 0 < result["iteration_p20_ms"] <= result["iteration_ms"] <= result["iteration_p80_ms"]
    assert result["epoch_s"] > result["steps"] / 2 * result["iteration_p20_ms"] / 1e3
    assert result[BOTH[name].rate] > 0
    assert result["prepare_s"] > 0 == BOTH[name].run(SLOW, steps=1)["prepare_s"]
    assert {type(value) for value in result.values()} <= {int, float, str, type(None)}  # plain, to be recorded


@subjects
def test_every_switch_names_its_fault(name):
    table = BOTH[name].switches
    assert {switch.name for switch in table if not switch.fault} == {"bf16"} | {s.name for s in table if s.optional}
    assert {switch.name for switch in table} - BOTH[name].fixed <= {"compile", "cuda_graph"}


def test_the_fixed_sizes_suit_the_kernels_and_the_slow_ones_do_not():
    for sizes in LANGUAGE.sizes.values():
        slow, fixed = sizes["shape"]
        assert slow["d_model"] % 4 and sizes["vocab_size"] % 64
        assert fixed["d_model"] % 32 == fixed["d_model"] // fixed["num_heads"] % 8 == 0


@subjects
def test_validation_keeps_no_graph_when_that_is_fixed(name):
    for fix, kept in (("inference_mode", False), ("no_item", True)):
        trainer, seen = BOTH[name].prepare({fix}), []
        trainer.model.register_forward_hook(lambda module, inputs, output, seen=seen: seen.append(output))
        trainer.validate()
        assert all((output.grad_fn is not None) == kept for output in seen)
        assert trainer.model.training


@pytest.mark.parametrize("before", [(False, False), (True, True)])
def test_settings_of_torch_are_put_back(before):
    def now():
        return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()

    seen, environment = [], dict(os.environ)
    try:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for fixes in (SLOW, CLEAN["language"]):
                LANGUAGE.run(fixes, steps=1, samples=4, validation_samples=4, on_step=lambda _: seen.append(now()[0]))
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
        ("language", {"fixes": "workers"}, "fixes is 'workers'; it must be a set of names"),
        ("clothes", {"preset": "huge"}, "preset is 'huge'; valid: 'small', 'cpu', 'gpu', 'full'"),
        ("language", {"epochs": 0}, "epochs is 0; it must be an integer of at least 1"),
        ("language", {"steps": True}, "steps is True"),
        ("clothes", {"steps": 0}, "steps is 0"),
        ("language", {"colour": 1}, "the preset has no 'colour' to change; it has words"),
    ],
)
def test_wrong_arguments_are_named(name, arguments, said):
    with pytest.raises(ValueError, match=said):
        BOTH[name].run(**arguments)
