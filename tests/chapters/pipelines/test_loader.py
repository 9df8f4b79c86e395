import os
import time
import warnings
from importlib import import_module
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from helpers.chapters.pipelines.loader import JpegCrops, loader, predict
from helpers.pipelines.samples import example_jpegs

MODULE = import_module("helpers.chapters.pipelines.loader")


def test_a_sample_depends_on_its_number_alone():
    dataset = JpegCrops(example_jpegs(3, (64, 48)), 12, "Pillow")
    one, two = (list(DataLoader(dataset, batch_size=4, num_workers=workers)) for workers in (0, 1))
    for (ours, labels), (theirs, their_labels) in zip(one, two, strict=True):
        assert ours.shape == (4, 3, 64, 64) and ours.dtype == torch.uint8
        assert torch.equal(ours, theirs) and torch.equal(labels, their_labels)
    assert not torch.equal(dataset[0][0], dataset[3][0])  # the same image, another cut
    assert dataset[0][1] == dataset[3][1]


@settings(deadline=None, max_examples=40)
@given(st.floats(0.5, 50), st.floats(0.5, 50), st.integers(0, 2))
def test_the_prediction_is_what_a_queue_of_such_steps_does(step_ms, load_ms, workers):
    """Batches come at a fixed rate; the device takes one after another."""
    steps, spans, free = 200, [], 0.0
    ready = list(accumulate([load_ms / max(workers, 1)] * steps))
    for at in range(steps):
        begin = max(free, ready[at])
        free = begin + step_ms
        spans.append((begin, free))
    summary = MODULE.summary(spans, warmup=100, batch=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MODULE, "cores", lambda: 2)
        expected = predict(step_ms, load_ms, workers)
    assert summary["idle_share"] == pytest.approx(expected, abs=1e-9)
    assert summary["samples_per_s"] == pytest.approx(4e3 * (1 - expected) / step_ms)


def test_more_workers_than_cores_are_predicted_to_gain_nothing(monkeypatch):
    monkeypatch.setattr(MODULE, "cores", lambda: 2)
    assert predict(10, 60, 2) == predict(10, 60, 8) == pytest.approx(2 / 3)


def test_the_host_is_never_more_than_so_many_steps_ahead_of_a_simulated_device():
    work = MODULE.SimulatedDevice(5)
    for _ in range(6):
        work.step()
        assert sum(end > time.perf_counter() * 1e3 + 0.5 for _, end in work.spans) <= MODULE.AHEAD


@pytest.mark.parametrize("workers", [0, 2])
def test_a_row_has_speed_idle_share_and_its_prediction(workers, monkeypatch):
    """Without a warning where workers are more than cores."""
    monkeypatch.setattr(MODULE, "example_jpegs", lambda count: example_jpegs(3, (64, 48)))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0}, raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        row = loader.measure(1.0, workers, 1, "Pillow")
    assert 0 <= row["idle_share"] < 1
    assert row["predicted_idle_share"] == predict(1.0, 4 * row["sample_ms"], workers)
    assert 0 < row["samples_per_s"] <= 4 / 1e-3 * 1.01 and row["startup_s"] > 0
