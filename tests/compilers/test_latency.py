"""Latencies: a row that can be trusted, a row that says why there is none, and a timing that is wrong on purpose."""

import time

import pytest
import torch

from helpers.compilers import BACKENDS, backends, latency, missing_because, models
from helpers.compilers.backends import CHANNELS_LAST, EAGER, ONNX, TENSORRT, TRACE, Backend
from helpers.compilers.latency import backends_for, flawed_mean, measure_flawed, measure_latency, rounds_for
from helpers.compilers.messages import ExportFailed


@pytest.fixture
def replaced(monkeypatch):
    """Puts a function of the model in the place of TorchScript's traces."""

    def replace(prepare):
        backend = Backend(lambda model, example, folder, tf32: prepare(model), 1e-4)
        monkeypatch.setitem(backends.BACKENDS, TRACE, backend)

    return replace


def waiting(*waits):
    """A backend whose first calls wait."""

    def prepare(model):
        left = iter(waits)
        return lambda *inputs: (time.sleep(next(left, 0.0)), model(*inputs))[1]

    return prepare


@pytest.mark.parametrize(("model", "backend"), [(models.TINY_RESNET, CHANNELS_LAST), (models.TINY_BERT, TRACE)])
def test_a_row_holds_times_their_spread_and_the_distance_from_eager(model, backend):
    row = measure_latency(model, backend, 3, seconds=0.1)
    assert row["n"] >= 20
    assert 0 < row["p20_ms"] <= row["median_ms"] <= row["p80_ms"] <= row["p99_ms"]
    assert row["samples_per_s"] == pytest.approx(3000 / row["median_ms"])
    assert row["speedup"] == row["baseline_ms"] / row["median_ms"]
    assert 0 < row["speedup_p20"] <= row["speedup_p80"]
    assert 0 <= row["error"] <= row["tolerance"]
    assert row["threads"] == torch.get_num_threads()
    assert row["build_s"] > 0


def test_eager_is_as_fast_as_itself():
    row = measure_latency(models.TINY_BERT, EAGER, 1, seconds=0.1)
    assert row["speedup"] == 1.0
    assert row["max_difference"] == 0.0


@pytest.mark.parametrize(("waits", "slower"), [([0.02] * 100, True), ([0.1, 0.1, 0.1], False)])
def test_what_a_backend_waits_is_in_its_time_but_of_the_first_three_runs_in_its_building(waits, slower, replaced):
    replaced(waiting(*waits))
    row = measure_latency(models.TINY_BERT, TRACE, 1, seconds=0.1)
    assert row["build_s"] > sum(waits[:3])
    assert (row["median_ms"] > 20) == (row["speedup"] < 0.5) == slower


def test_a_backend_that_disagrees_is_a_row_that_says_so(replaced):
    replaced(lambda model: lambda *inputs: model(*inputs)[::-1])
    assert "returns shapes" in measure_latency(models.TINY_BERT, TRACE, 1)["status"]
    replaced(lambda model: lambda x: model(x) * 1.01)
    row = measure_latency(models.TINY_RESNET, TRACE, 1)
    assert row["status"].startswith("failed: 'TorchScript, trace' differs from 'eager' by 0.01")
    assert "median_ms" not in row


@pytest.mark.parametrize("measure", [measure_latency, measure_flawed])
def test_a_backend_that_fails_to_build_is_a_row_that_names_the_operation(measure, replaced):
    def broken(model):
        raise ExportFailed("export failed at mylib::odd: unknown")

    replaced(broken)
    assert measure(models.TINY_RESNET, TRACE, 1) == {"status": "failed: export failed at mylib::odd: unknown"}


@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.parametrize("measure", [measure_latency, measure_flawed])
def test_a_failure_in_the_first_runs_is_a_row_and_out_of_memory_is_not(measure, at, replaced):
    def failing(error):
        def prepare(model):
            calls = []

            def run(*inputs):
                calls.append(1)
                if len(calls) == at:
                    raise error
                return model(*inputs)

            return run

        return prepare

    replaced(failing(TypeError("unsupported dtype")))
    row = measure(models.TINY_RESNET, TRACE, 1)
    assert row["status"] == "failed: first runs failed: unsupported dtype"
    replaced(failing(torch.OutOfMemoryError("out of memory")))
    with pytest.raises(torch.OutOfMemoryError):
        measure(models.TINY_RESNET, TRACE, 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="about a machine without CUDA")
@pytest.mark.parametrize("measure", [measure_latency, measure_flawed])
def test_what_cannot_run_here_is_a_row_that_says_why(measure):
    assert measure(models.RESNET_18, TENSORRT, 1) == {"status": "needs CUDA"}


def test_the_flawed_timing_counts_the_first_run_and_the_right_one_does_not(replaced):
    replaced(waiting(0.5))
    row = measure_flawed(models.TINY_BERT, TRACE, 1, seconds=0.1)
    assert row["flawed_n"] == 100
    assert row["flawed_ms"] > max(500 / 100, row["median_ms"] + 3)
    assert row["flawed_speedup"] == pytest.approx(row["flawed_eager_ms"] / row["flawed_ms"])


def test_the_flawed_mean_is_over_all_runs_until_its_limit(monkeypatch):
    waits = iter([0.03] + [0.0] * 9)
    mean, n = flawed_mean(lambda: time.sleep(next(waits)), 10)
    assert n == 10
    assert 3 <= mean < 10
    monkeypatch.setattr(latency, "FLAWED_MOST_MS", 0)
    assert flawed_mean(lambda: None, 100)[1] == 10


@pytest.mark.parametrize(("ms", "expected"), [(1, (100, 3)), (40, (20, 3)), (1200, (5, 1))])
def test_slow_runs_are_repeated_less(ms, expected, monkeypatch):
    clock = iter(range(10_000))
    monkeypatch.setattr("time.perf_counter", lambda: next(clock) * ms / 1e3)
    assert rounds_for({"a": lambda: None, "b": lambda: None}, 0.2) == expected


def test_text_has_no_channels_to_put_last():
    assert backends_for(models.RESNET_18) == list(BACKENDS)
    assert set(BACKENDS) - set(backends_for(models.BERT_BASE)) == {CHANNELS_LAST}


@pytest.mark.parametrize(
    ("model", "length", "shape"),
    [(models.BERT_BASE, 14, (2, 14)), (models.BERT_BASE, None, (2, 128)), (models.RESNET_18, None, (2, 3, 224, 224))],
)
def test_an_example_has_the_models_size_or_the_length_asked_for(model, length, shape):
    assert models.example(model, 2, length=length)[0].shape == shape


def test_a_model_is_the_same_each_time_and_leaves_the_random_numbers_alone():
    state = torch.get_rng_state()
    one, other = (models.network(models.TINY_RESNET).state_dict() for _ in range(2))
    torch.testing.assert_close(one, other)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("huge", EAGER, 1, {}), "model is 'huge'; valid: 'tiny resnet'"),
        ((models.TINY_BERT, "magic", 1, {}), "backend is 'magic'; valid: 'eager'"),
        ((models.TINY_BERT, EAGER, 0, {}), "batch is 0; it must be an integer of at least 1"),
        ((models.TINY_BERT, EAGER, 1, {"length": 33}), "length is 33; tiny bert reads 32 tokens at most"),
        ((models.TINY_RESNET, EAGER, 1, {"length": 3}), "length is 3; tiny resnet reads pictures"),
        ((models.TINY_RESNET, EAGER, 1, {"precision": "fp4"}), "precision is 'fp4'; valid: 'fp32'"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    *positional, named = arguments
    with pytest.raises(ValueError, match=message):
        measure_latency(*positional, **named)


def test_a_runtime_without_a_dtype_fails_in_a_line():
    if reason := missing_because(ONNX, torch.device("cpu")):
        pytest.skip(reason)
    status = measure_latency(models.TINY_RESNET, ONNX, 1, precision="bf16")["status"]
    assert status.startswith("failed: ")
    assert "\n" not in status
