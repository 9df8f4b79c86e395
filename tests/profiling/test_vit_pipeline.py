"""The ViT pipeline: fixes that are speed only change no number, the others do, and every subset runs."""

import functools
import itertools
import shutil
import timeit

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.models import ViT
from helpers.pictures import PictureError, photo_files
from helpers.profiling import loop
from helpers.profiling.epoch_metrics import CollectedMetrics, StreamingMetrics
from helpers.profiling.metrics_cost import metrics_cost
from helpers.profiling.vit_data import class_weights
from helpers.profiling.vit_pipeline import ALL, FIXED, PRESETS, SWITCHES, alone, build_model, cumulative, prepare, run
from helpers.profiling.vit_slow import plain_state

SLOW = frozenset()
BY_NAME = {switch.name: switch for switch in SWITCHES}
EAGER = [switch.name for switch in SWITCHES if switch.name != "compile"]
SPEED_ONLY = [name for name in EAGER if BY_NAME[name].changes is None]
# Without bf16, for its rounding; without the photos on the device, which leave a loader nothing to do; without workers,
# which take time to start.
CLEAN = FIXED - {"bf16", "photos_on_device", "workers"}


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HELPERS_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def observe(fixes):
    """Three steps without dropout: the result, and the loss and all gradients of each step under the ViT's names."""
    seen = []

    def look(number, loss, model):
        gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        seen.append({"loss": loss.clone()} | plain_state(gradients))

    return run(fixes, steps=3, dropout=0.0, on_step=look), seen


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
    assert one["validation_accuracy"] == other["validation_accuracy"]
    for name in ("validation_macro_f1", "train_loss", "train_accuracy", "train_macro_f1"):
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


@pytest.mark.parametrize("fixes", [SLOW, FIXED], ids=["slow", "fixed"])
def test_a_run_says_what_it_took_and_what_was_learned(fixes):
    found = run(fixes, epochs=2)
    assert (found["steps"], found["n"], found["skipped_files"]) == (8, 4, 0)
    assert found["source"] == "generated garments 100×133, 4 classes, seed 0"
    assert 0 < found["iteration_p20_ms"] <= found["iteration_ms"] <= found["iteration_p80_ms"]
    assert found["images_per_s"] == pytest.approx(16e3 / found["iteration_mean_ms"])
    assert found["epoch_s"] > 4 * found["iteration_p20_ms"] / 1e3
    assert (found["prepare_s"] > 0) == (fixes == FIXED)
    assert 0 <= found["validation_accuracy"] <= 1
    assert found["validation_accuracy"] * 32 == pytest.approx(round(found["validation_accuracy"] * 32))


def test_the_same_run_twice_gives_the_same_numbers():
    first, again = (run(FIXED, epochs=2) for _ in range(2))
    for name in ("train_loss", "train_accuracy", "validation_accuracy", "validation_macro_f1"):
        assert first[name] == again[name]


def test_a_run_of_some_steps_ends_after_them_and_has_no_epoch():
    found = run(FIXED, steps=2, epochs=5)
    assert (found["steps"], found["epoch_s"]) == (2, None)
    assert found["validation_accuracy"] >= 0


def test_an_excerpt_is_not_validated_and_ends_when_its_time_is_up():
    patient = run(FIXED, steps=loop.Excerpt(6, settling=2), passes=2)
    assert (patient["steps"], patient["n"]) == (6, 4)
    assert "validation_accuracy" not in patient
    hurried = run(FIXED, steps=loop.Excerpt(100, settling=2, within_s=0.0), passes=40)
    assert (hurried["steps"], hurried["n"]) == (2 + loop.ENOUGH, loop.ENOUGH)


def test_alone_and_cumulative_go_through_all_fixes_in_order():
    names = [switch.name for switch in SWITCHES]
    assert alone() == [SLOW, *({name} for name in names)]
    steps = cumulative()
    assert steps[0] == SLOW
    assert steps[-1] == ALL == set(names)
    assert [next(iter(after - before)) for before, after in itertools.pairwise(steps)] == names
    assert sorted(ALL - FIXED) == ["compile", "cuda_graph"]
    assert len(names) == len(set(names)) >= 12


def test_every_switch_says_what_is_slow_what_mends_it_and_what_else_changes():
    assert {switch.kind.partition(" the ")[0] for switch in SWITCHES} == {"speed only", "changes"}
    assert {switch.name for switch in SWITCHES if switch.changes} == {
        "single_cut", "decode_once", "width_256", "bf16", "photos_on_device",
    }  # fmt: skip
    assert all(switch.slow and switch.fixed and switch.where for switch in SWITCHES)


def test_weights_go_from_any_variant_to_the_fast_one():
    chosen = PRESETS["small"] | {"dropout": 0.0}
    images = torch.randn(2, 3, 32, 32)
    for fixes in (SLOW, {"fused_qkv"}, {"conv_patches"}, {"fused_attention"}):
        model = build_model(frozenset(fixes), 4, chosen, seed=0)
        fast = ViT(4, width=31, dropout=0.0, **chosen["model"])
        fast.load_state_dict(plain_state(model.state_dict()))
        torch.testing.assert_close(fast(images), model(images), atol=1e-6, rtol=1e-5)


def test_a_profile_shows_the_parts_of_a_step_by_name():
    profilers = []

    def profile(model):
        schedule = torch.profiler.schedule(wait=0, warmup=1, active=3)
        profilers.append(torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], schedule=schedule))
        return profilers[0]

    run(FIXED, steps=3, profile=profile)
    calls = {event.key: event.count for event in profilers[0].key_averages()}
    for name in ("load", "forward", "loss", "backward", "optimizer"):
        assert calls[name] == 2
    assert calls["metrics"] >= 2
    assert calls["validation"] == 1
    assert calls["ProfilerStep*"] >= 2


def test_validation_keeps_no_graph_when_that_is_fixed():
    for name, kept in (("inference_mode", False), ("workers", True)):
        training, seen = prepare({name}), []
        training.model.register_forward_hook(lambda module, inputs, output, seen=seen: seen.append(output))
        training.validate()
        assert all((output.grad_fn is not None) == kept for output in seen)
        assert training.model.training


def test_cudnns_settings_are_put_back():
    cudnn = torch.backends.cudnn
    before = (cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32)
    seen = []
    for fixes in (SLOW, FIXED):
        run(fixes, steps=1, on_step=lambda *_: seen.append((cudnn.benchmark, cudnn.deterministic)))
        assert (cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32) == before
    assert seen == [(False, True), (True, False)]


def test_a_photo_teaches_the_model_what_garment_it_shows():
    found = run(
        FIXED - {"bf16"},
        classes=3,
        samples=180,
        validation_samples=90,
        epochs=12,
        learning_rate=2e-3,
        dropout=0.0,
    )
    assert found["validation_accuracy"] > 0.5  # by chance 0.33


# Broken files


@pytest.fixture
def damaged(tmp_path):
    """A folder of 16 and 8 photos, of which three and one are broken."""
    train, _ = photo_files(classes=2, samples=16, validation_samples=8, size=(40, 53))
    folder = tmp_path / "photos"
    shutil.copytree(train.files[0].parents[2], folder)
    names = [
        *sorted(folder.glob("train/pants/*.jpg"))[:2],
        *sorted(folder.glob("train/t-shirt/*.jpg"))[:1],
        *sorted(folder.glob("validation/pants/*.jpg"))[:1],
    ]
    for file in names:
        file.write_bytes(b"no image")
    return folder, names


@pytest.mark.parametrize("fixes", [SLOW, {"workers"}, {"decode_once"}, {"photos_on_device"}], ids=str)
def test_broken_files_are_skipped_named_and_counted_at_the_end(fixes, damaged):
    folder, names = damaged
    with pytest.warns(UserWarning, match=r"4 image files could not be read and were skipped: .*\.jpg, …") as caught:
        found = run(fixes, path=folder, epochs=2, batch_size=4)
    assert found["skipped_files"] == 4
    assert any(str(name) in str(caught[0].message) for name in names)
    assert found["steps"] == (6 if "decode_once" in fixes or "photos_on_device" in fixes else 8)
    assert found["validation_accuracy"] * 7 == pytest.approx(round(found["validation_accuracy"] * 7))


def test_a_folder_of_nothing_but_broken_files_is_an_error(damaged):
    folder, _ = damaged
    for file in folder.glob("*/*/*.jpg"):
        file.write_bytes(b"")
    for fixes in (SLOW, {"decode_once"}):
        with pytest.raises(PictureError, match="could be read"):
            run(fixes, path=folder)


# Metrics


@settings(max_examples=50, deadline=None)
@given(data=st.data(), classes=st.integers(2, 6), count=st.integers(1, 40))
def test_both_metrics_are_accuracy_and_f1_by_their_definition(data, classes, count):
    draw = st.lists(st.integers(0, classes - 1), min_size=count, max_size=count)
    labels, predicted = (torch.tensor(data.draw(draw)) for _ in range(2))
    logits = torch.nn.functional.one_hot(predicted, classes).float()
    scores = []
    for at in set(labels.tolist()) | set(predicted.tolist()):
        precision = ((labels == at) & (predicted == at)).sum() / max((predicted == at).sum(), 1)
        recall = ((labels == at) & (predicted == at)).sum() / max((labels == at).sum(), 1)
        scores.append(float(2 * precision * recall / max(precision + recall, 1e-9)))
    expected = {"accuracy": (labels == predicted).float().mean().item(), "macro_f1": np.mean(scores)}
    for metrics in (CollectedMetrics(classes), StreamingMetrics(classes)):
        for part in torch.arange(count).split(7):
            metrics.update(logits[part], labels[part])
        assert metrics.compute() == pytest.approx(expected, abs=1e-6)
        metrics.reset()
        assert np.isnan(metrics.compute()["accuracy"])


def test_the_collected_metric_grows_and_the_streaming_one_does_not():
    sizes = {}
    for metrics in (CollectedMetrics(4), StreamingMetrics(4)):
        for step in range(10):
            metrics.update(torch.randn(8, 4), torch.randint(4, (8,)))
            if step in (0, 9):
                held = [value for value in vars(metrics).values() if not isinstance(value, int)]
                arrays = [array for value in held for array in (value if isinstance(value, list) else [value])]
                sizes.setdefault(type(metrics).__name__, []).append(sum(array.nbytes for array in arrays))
    assert sizes["CollectedMetrics"][1] == 10 * sizes["CollectedMetrics"][0]
    assert sizes["StreamingMetrics"][1] == sizes["StreamingMetrics"][0] == 8 * 16


def test_the_collected_metric_takes_longer_the_longer_the_epoch_and_the_streaming_one_does_not():
    took = {}
    for kind in (CollectedMetrics, StreamingMetrics):
        for samples in (1_000, 300_000):
            metrics = kind(10)
            metrics.update(torch.randn(samples, 10), torch.randint(10, (samples,)))
            runs = timeit.repeat(metrics.compute, number=1, repeat=5)
            took[kind, samples] = min(runs)
    assert took[CollectedMetrics, 300_000] > 20 * took[CollectedMetrics, 1_000]
    assert took[StreamingMetrics, 300_000] < 5 * took[StreamingMetrics, 1_000]


def test_metrics_cost_gives_a_row_for_each_step_and_way():
    rows = metrics_cost(4)
    ways = ["collected on the CPU", "streaming on the device"]
    assert [(row["step"], row["way"]) for row in rows] == [(step, way) for step in range(4) for way in ways]
    assert all(row["ms"] > 0 for row in rows)


@settings(max_examples=30, deadline=None)
@given(labels=st.lists(st.integers(0, 4), min_size=1, max_size=50))
def test_class_weights_make_every_class_count_alike(labels):
    labels = np.array(labels)
    weights = class_weights(labels, 5, torch.device("cpu")).numpy()
    totals = [weights[at] * (labels == at).sum() for at in set(labels.tolist())]
    np.testing.assert_allclose(totals, totals[0], rtol=1e-5)
    np.testing.assert_allclose(weights[labels].mean(), 1, rtol=1e-5)


# What the user got wrong


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"fixes": {"faster"}}, "unknown fix 'faster'; valid: workers, pinned"),
        ({"fixes": "workers"}, "fixes is 'workers'; it must be a set of names"),
        ({"preset": "huge"}, "unknown preset 'huge'; valid: small, full"),
        ({"epochs": 0}, "epochs is 0"),
        ({"steps": 0}, "steps is 0"),
        ({"batch_size": 0}, "batch_size is 0; it must be an integer of at least 1"),
        ({"workers": -1}, "workers is -1; it must be an integer of at least 0"),
        ({"colour": 1}, "the preset has no 'colour' to change; it has classes"),
    ],
)
def test_wrong_arguments_are_named(arguments, said):
    with pytest.raises(ValueError, match=said):
        run(**arguments)
