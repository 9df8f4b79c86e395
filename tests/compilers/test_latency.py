"""Latencies: a row that can be trusted, a row that says why there is none, and a timing that is wrong on purpose."""

import time

import pytest
import torch

from helpers.compilers import backends, inputs, latency
from helpers.compilers.backends import CHANNELS_LAST, EAGER, ONNX, TENSORRT, TRACE, WAYS, ExportFailed, Way
from helpers.compilers.latency import flawed_mean, measure_flawed, measure_latency, rounds_for, ways


def replaced(monkeypatch, way, prepare, tolerance=1e-4):
    monkeypatch.setitem(backends.WAYS, way, Way(prepare, tolerance))


@pytest.mark.parametrize(("model", "way"), [(inputs.TINY_RESNET, CHANNELS_LAST), (inputs.TINY_BERT, TRACE)])
def test_a_row_holds_times_their_spread_and_the_distance_from_eager(model, way):
    row = measure_latency(model, way, 3, seconds=0.1)
    assert row["n"] >= 20
    assert 0 < row["p20_ms"] <= row["median_ms"] <= row["p80_ms"] <= row["p99_ms"]
    assert row["samples_per_s"] == pytest.approx(3000 / row["median_ms"])
    assert row["speedup_p20"] <= row["speedup"] <= row["speedup_p80"]
    assert 0 <= row["error"] <= row["tolerance"]
    assert row["threads"] == torch.get_num_threads()
    assert row["build_s"] > 0


def test_eager_is_as_fast_as_itself():
    row = measure_latency(inputs.TINY_BERT, EAGER, 1, seconds=0.1)
    assert row["speedup"] == 1.0
    assert row["max_difference"] == 0.0


def test_a_slower_way_is_slower_by_what_it_waits(monkeypatch):
    def slow(model, example, folder, tf32):
        return lambda *inputs: (time.sleep(0.02), model(*inputs))[1]

    replaced(monkeypatch, TRACE, slow)
    row = measure_latency(inputs.TINY_BERT, TRACE, 1, seconds=0.1)
    assert row["median_ms"] > 20
    assert row["speedup"] < 1


def test_a_way_that_disagrees_is_a_row_that_says_so(monkeypatch):
    replaced(monkeypatch, TRACE, lambda model, example, folder, tf32: lambda *inputs: model(*inputs)[::-1])
    assert "returns shapes" in measure_latency(inputs.TINY_BERT, TRACE, 1)["status"]
    replaced(monkeypatch, TRACE, lambda model, example, folder, tf32: lambda x: model(x) * 1.01)
    row = measure_latency(inputs.TINY_RESNET, TRACE, 1)
    assert row["status"].startswith("failed: 'TorchScript, trace' differs from 'eager' by 0.01")
    assert "median_ms" not in row


def test_a_way_that_fails_is_a_row_that_names_the_operation(monkeypatch):
    def broken(model, example, folder, tf32):
        raise ExportFailed("export failed at mylib::odd: unknown")

    replaced(monkeypatch, TRACE, broken)
    for measure in (measure_latency, measure_flawed):
        row = measure(inputs.TINY_RESNET, TRACE, 1)
        assert row == {"status": "failed: export failed at mylib::odd: unknown"}


@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.parametrize("measure", [measure_latency, measure_flawed])
def test_a_failure_in_the_first_runs_is_a_row_and_running_out_of_memory_is_not(measure, at, monkeypatch):
    def failing(error):
        def prepare(model, example, folder, tf32):
            calls = []

            def run(*inputs):
                calls.append(1)
                if len(calls) == at:
                    raise error
                return model(*inputs)

            return run

        return prepare

    replaced(monkeypatch, TRACE, failing(TypeError("unsupported dtype")))
    said = measure(inputs.TINY_RESNET, TRACE, 1)["status"]
    assert said == "failed: first runs failed: unsupported dtype"
    replaced(monkeypatch, TRACE, failing(torch.OutOfMemoryError("out of memory")))
    with pytest.raises(torch.OutOfMemoryError):
        measure(inputs.TINY_RESNET, TRACE, 1)


def test_what_the_third_run_still_builds_counts_as_building(monkeypatch):
    def records(model, example, folder, tf32):
        waits = iter([0.1, 0.1, 0.1])
        return lambda *inputs: (time.sleep(next(waits, 0.0)), model(*inputs))[1]

    replaced(monkeypatch, TRACE, records)
    row = measure_latency(inputs.TINY_RESNET, TRACE, 1, seconds=0.1)
    assert row["build_s"] > 0.3
    assert row["median_ms"] < 100


@pytest.mark.skipif(torch.cuda.is_available(), reason="about a machine without CUDA")
def test_what_cannot_run_here_is_a_row_that_says_why():
    assert measure_latency(inputs.RESNET_18, TENSORRT, 1) == {"status": "needs CUDA"}
    assert measure_flawed(inputs.RESNET_18, TENSORRT, 1) == {"status": "needs CUDA"}


def test_the_flawed_timing_counts_the_first_run_and_the_right_one_does_not(monkeypatch):
    def warms_up(model, example, folder, tf32):
        calls = []

        def run(*inputs):
            calls.append(1)
            if len(calls) == 1:
                time.sleep(0.5)
            return model(*inputs)

        return run

    replaced(monkeypatch, TRACE, warms_up)
    row = measure_flawed(inputs.TINY_BERT, TRACE, 1, seconds=0.1)
    assert row["flawed_n"] == 100
    assert row["flawed_ms"] > 500 / 100
    assert row["flawed_ms"] > row["median_ms"] + 3
    assert row["flawed_speedup"] == pytest.approx(row["flawed_eager_ms"] / row["flawed_ms"])


def test_the_flawed_mean_is_over_all_runs_until_patience_ends(monkeypatch):
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
    assert ways(inputs.RESNET_18) == list(WAYS)
    assert set(WAYS) - set(ways(inputs.BERT_BASE)) == {CHANNELS_LAST}


def test_the_lectures_fourteen_tokens_are_allowed():
    (tokens,) = inputs.example(inputs.BERT_BASE, 2, length=14)
    assert tokens.shape == (2, 14)
    assert inputs.example(inputs.BERT_BASE, 2)[0].shape == (2, 128)
    assert inputs.example(inputs.RESNET_18, 2)[0].shape == (2, 3, 224, 224)


def test_a_model_is_the_same_each_time_and_leaves_the_random_numbers_alone():
    state = torch.get_rng_state()
    one, other = (inputs.network(inputs.TINY_RESNET).state_dict() for _ in range(2))
    torch.testing.assert_close(one, other)
    assert torch.equal(torch.get_rng_state(), state)


def test_settings_of_products_are_put_back():
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    with inputs.products("fp32"):
        assert torch.get_float32_matmul_precision() == "highest"
        assert not torch.backends.cudnn.allow_tf32
    assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == before


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("huge", EAGER, 1, {}), "unknown model 'huge'; valid: tiny resnet"),
        ((inputs.TINY_BERT, "magic", 1, {}), "unknown way 'magic'"),
        ((inputs.TINY_BERT, EAGER, 0, {}), "batch is 0; it must be an integer of at least 1"),
        ((inputs.TINY_BERT, EAGER, 1, {"length": 33}), "length is 33; tiny bert reads 32 tokens at most"),
        ((inputs.TINY_RESNET, EAGER, 1, {"length": 3}), "length is 3; tiny resnet reads pictures"),
        ((inputs.TINY_RESNET, EAGER, 1, {"precision": "fp4"}), "precision is 'fp4'; allowed: 'fp32'"),
    ],
)
def test_wrong_arguments_are_named(arguments, said):
    *positional, named = arguments
    with pytest.raises(ValueError, match=said):
        measure_latency(*positional, **named)


def test_a_runtime_without_a_dtype_fails_in_a_line():
    if reason := backends.obstacle(ONNX, torch.device("cpu")):
        pytest.skip(reason)
    said = measure_latency(inputs.TINY_RESNET, ONNX, 1, precision="bf16")["status"]
    assert said.startswith("failed: ")
    assert "\n" not in said
