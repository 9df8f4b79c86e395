"""Latencies: a row that can be trusted, a row that says why there is none, and a timing that is wrong on purpose."""

import itertools
import time

import pytest
import torch

from helpers.chapters.compilers import workloads
from helpers.chapters.compilers.latency import backends_for, measure_latency
from helpers.compilers import backends
from helpers.compilers.backends import AOT, AUTOTUNE, CHANNELS_LAST, EAGER, TRACE, Backend
from helpers.compilers.messages import ExportFailed


@pytest.fixture
def replaced(monkeypatch):
    """Puts a function of the model in the place of TorchScript's traces."""

    def replace(prepare):
        backend = Backend(lambda model, example, folder: prepare(model), 1e-4)
        monkeypatch.setitem(backends.BACKENDS, TRACE, backend)

    return replace


def waiting(*waits):
    """A backend whose first calls wait."""

    def prepare(model):
        left = iter(waits)
        return lambda *inputs: (time.sleep(next(left, 0.0)), model(*inputs))[1]

    return prepare


def row_of(model, backend, batch=1, **settings):
    return measure_latency(model, batch, [backend], seconds=0.1, **settings)[-1]


def test_rows_hold_times_their_spread_and_one_baseline():
    rows = measure_latency(workloads.TINY_RESNET, 3, [CHANNELS_LAST, TRACE], seconds=0.1)
    assert [row["backend"] for row in rows] == [EAGER, CHANNELS_LAST, TRACE]
    for row in rows:
        assert row["n"] >= 8
        assert 0 < row["p20_ms"] <= row["median_ms"] <= row["p80_ms"]
        assert row["baseline_ms"] == rows[0]["median_ms"]
        assert row["speedup"] == row["baseline_ms"] / row["median_ms"]
        assert 0 < row["speedup_p20"] <= row["speedup_p80"]
        assert row["build_s"] > 0
    assert rows[0]["speedup"] == 1.0


@pytest.mark.parametrize(("waits", "slower"), [([0.05] * 100, True), ([0.1, 0.1, 0.1], False)])
def test_what_a_backend_waits_is_in_its_time_but_of_the_first_three_runs_in_its_building(waits, slower, replaced):
    replaced(waiting(*waits))
    row = row_of(workloads.TINY_BERT, TRACE)
    assert row["build_s"] > sum(waits[:3])
    assert (row["median_ms"] > 50) == slower


def test_a_backend_that_disagrees_is_a_row_that_says_so_and_costs_the_others_nothing(replaced):
    replaced(lambda model: lambda *inputs: model(*inputs)[::-1])
    eager, row = measure_latency(workloads.TINY_BERT, 1, [TRACE], seconds=0.1)
    assert "returns shapes" in row["status"]
    assert "median_ms" in eager
    replaced(lambda model: lambda x: model(x) * 1.01)
    row = row_of(workloads.TINY_RESNET, TRACE)
    assert row["status"].startswith("failed: 'TorchScript, trace' differs from 'eager' by 0.01")
    assert "median_ms" not in row


def test_a_failure_to_build_in_the_first_runs_or_for_want_of_memory_is_a_row(replaced):
    def broken(model):
        raise ExportFailed("export failed at mylib::odd: unknown")

    failures = {
        "failed: export failed at mylib::odd: unknown": broken,
        "failed: first runs failed: unsupported dtype": failing(TypeError("unsupported dtype"), 3),
        "out of memory": failing(torch.OutOfMemoryError("out of memory"), 2),
    }
    for status, prepare in failures.items():
        replaced(prepare)
        assert row_of(workloads.TINY_RESNET, TRACE)["status"] == status


def failing(error, at):
    """A backend that raises in one of its calls."""

    def prepare(model):
        calls = itertools.count(1)

        def run(*inputs):
            if next(calls) == at:
                raise error
            return model(*inputs)

        return run

    return prepare


def test_each_model_has_the_backends_that_suit_it_and_long_builds_for_one_batch():
    models = ((workloads.RESNET_18, 1), (workloads.BERT_BASE, 1), (workloads.BERT_BASE, 8))
    resnet, bert, batched = (set(backends_for(*model)) for model in models)
    assert resnet - bert == {CHANNELS_LAST}
    assert {AOT} <= bert - batched <= {AOT, AUTOTUNE}


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="model is 'huge'; valid: 'tiny ResNet'"):
        measure_latency("huge", 1, [EAGER])
    with pytest.raises(ValueError, match="precision is 'fp4'; valid: 'fp32'"):
        measure_latency(workloads.TINY_RESNET, 1, [EAGER], precision="fp4")
