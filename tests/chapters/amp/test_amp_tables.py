"""Chapter 1's experiments on the small preset."""

from importlib import import_module

import pandas as pd
import pytest
import torch

from helpers.chapters import amp, tables_of
from helpers.chapters.amp.exponents import HIGHEST, LOWEST, count_exponents
from helpers.chapters.amp.gradient_time import FP32_KERNELS
from helpers.chapters.amp.quality import constant_accuracy
from helpers.chapters.amp.scaler_step import decoder_shapes
from helpers.chapters.amp.trainings import BOTH, training_setup
from helpers.lab.memory import GIB, Memory
from helpers.train import build_task


@pytest.fixture(scope="module")
def runs():
    configs = amp.quality.configurations("small")[::2]
    return pd.DataFrame([row for config in configs for row in amp.quality.rows(config)])


@pytest.mark.long
def test_quality_says_how_a_run_went(runs):
    rows = runs.to_dict("records")
    assert {row["task"] for row in rows} == {"segmentation", "lm"}
    for row in rows:
        assert row["diverged"] == "no"
        assert 0 <= row["zero_share"] < 0.5
        assert 0 < row["constant_accuracy"] < 1
        assert row["source"]


def test_curves_follow_loss_and_scale_of_the_first_seeds_trainings(runs):
    curves = amp.curves.of_rows(runs).tasks
    assert curves.keys() == {"segmentation", "lm"}
    pictures = curves["segmentation"]
    assert pictures["dynamic"]["scale"].eq(2.0**16).all() and pictures["fp32"]["scale"].isna().all()
    for line in (line for lines in curves.values() for line in lines.values()):
        assert line["loss"].notna().all() and line["step"].is_monotonic_increasing
    config = amp.quality.configurations("small")[0] | {"seed": 1}
    assert "curve" not in amp.quality.measure(**config)


def test_the_constant_guess_is_the_most_frequent_target_of_training(runs):
    assert runs.loc[runs["task"] == "segmentation", "constant_accuracy"].gt(0.5).all()  # background
    setup = training_setup("lm", "fp32", "small")
    task = build_task(setup, torch.device("cpu"))
    tokens = torch.cat([batch.targets.flatten() for batch in task.batches(0)])
    commonest = tokens[tokens != 0].mode().values
    targets = torch.cat([batch.targets.flatten() for batch in task.validation()])
    expected = float((targets == commonest).sum() / (targets != 0).sum())
    assert constant_accuracy(task) == pytest.approx(expected)


def test_what_takes_seconds_is_measured_before_whole_trainings():
    order = [e.table for e in tables_of("amp")]
    assert order[-1] == "quality"
    for preset in ("cpu", "big-gpu"):
        seeds = [run["seed"] for run in amp.quality.configurations(preset)]
        assert seeds == sorted(seeds)


def test_exponents_are_shares_of_all_gradients():
    rows = amp.exponents("small")
    shares = rows.groupby("kind")["share"].sum()
    assert shares.to_dict() == pytest.approx({"activations": 1.0, "weights": 1.0})
    assert rows["exponent"].dropna().between(LOWEST, HIGHEST).all()


def test_exponents_are_those_of_the_values():
    counts = count_exponents(torch.tensor([0.0, 1.0, -1.5, 2.0, 2.0**-30, 2.0**-100]))
    places = {place - 1 + LOWEST: int(count) for place, count in enumerate(counts) if count and place}
    assert counts[0] == 1
    assert places == {0: 2, 1: 1, -30: 1, LOWEST: 1}


def test_a_handed_over_step_never_reads_on_the_host_and_each_is_queued_behind_a_busy_gpu(monkeypatch):
    busy = []
    monkeypatch.setattr(import_module("helpers.chapters.amp.scaler_step"), "queue_ahead", busy.append)
    rows = amp.scaler_step("small").set_index("variant")
    assert len(busy) > rows["n"].sum()
    assert rows.loc["ours", "host_reads"] == rows.loc["no scaler", "host_reads"] == 0
    assert rows.loc["plain operations", "host_reads"] == 1
    assert rows.loc["torch.amp.GradScaler", "ratio_to_torch"] == 1
    assert rows.loc["ours", "ratio_to_torch_low"] <= rows.loc["ours", "ratio_to_torch"]


@pytest.mark.parametrize("millions", [1, 24, 1000])
def test_a_decoder_has_about_as_many_parameters_as_asked_for(millions):
    parameters = sum(torch.Size(shape).numel() for shape in decoder_shapes(millions))
    assert parameters == pytest.approx(millions * 1e6, rel=0.1)


def test_gradients_are_timed_and_their_memory_leaves_out_what_else_lies_there(monkeypatch):
    pictures = 10 * GIB
    monkeypatch.setattr(
        import_module("helpers.chapters.amp.gradient_time"),
        "peak_memory",
        lambda step: Memory(pictures, pictures + GIB, pictures),
    )
    for task in BOTH:
        run = {"task": task, "precision": "dynamic", "size": "small", "kernels": FP32_KERNELS}
        row = amp.gradient_time.measure(**run)
        assert row["median_ms"] > 0 and 1 < row["peak_gib"] < 1.01
