"""Chapter 1's experiments on the small preset."""

import pandas as pd
import pytest
import torch

from helpers.chapters import tables_of
from helpers.experiments import amp as experiments
from helpers.experiments.amp import gradients, overheads, setups, trainings
from helpers.lab.memory import GIB, Memory


@pytest.fixture(scope="module")
def trained():
    """The tables of runs and of their curves, and how many trainings they took."""
    done, train = [], trainings.training.train
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainings.training, "train", lambda *given, **how: done.append(1) or train(*given, **how))
        tables = (experiments.quality, experiments.curves)
        runs, curves = (pd.DataFrame([r for c in e.configurations("small")[::2] for r in e.rows(c)]) for e in tables)
        return runs, curves, len(done)


def test_quality_says_how_a_run_went(trained):
    rows = trained[0].to_dict("records")
    assert {row["task"] for row in rows} == {"segmentation", "lm"}
    for row in rows:
        assert row["diverged"] == "no"
        assert 0 <= row["zero_share"] < 0.5
        assert 0 < row["constant_accuracy"] < 1
        assert row["source"]


def test_curves_follow_loss_and_scale_of_the_same_trainings(trained):
    runs, curves, trainings = trained
    assert trainings == len(runs)
    assert curves.loc[curves["precision"] == "dynamic", "scale"].eq(2.0**16).all()
    assert curves.loc[curves["precision"] == "fp32", "scale"].isna().all()
    assert curves["loss"].notna().all()


def test_the_constant_guess_is_the_most_frequent_target_of_training(trained):
    runs = trained[0]
    assert runs.loc[runs["task"] == "segmentation", "constant_accuracy"].gt(0.5).all()  # background
    setup = setups.training_setup("lm", "fp32", "small")
    task = trainings.training.build_task(setup, torch.device("cpu"))
    tokens = torch.cat([batch.targets.flatten() for batch in task.batches(0)])
    commonest = tokens[tokens != 0].mode().values
    targets = torch.cat([batch.targets.flatten() for batch in task.validation()])
    expected = float((targets == commonest).sum() / (targets != 0).sum())
    assert trainings.constant_accuracy(task) == pytest.approx(expected)


def test_what_takes_seconds_is_measured_before_whole_trainings():
    order = [e.table for e in tables_of("amp")]
    assert set(order[-2:]) == {"quality", "curves"}
    for preset in ("cpu", "big-gpu"):
        seeds = [run["seed"] for run in experiments.quality.configurations(preset)]
        assert seeds == sorted(seeds)


def test_exponents_are_shares_of_all_gradients():
    rows = experiments.exponents("small")
    shares = rows.groupby("kind")["share"].sum()
    assert shares.to_dict() == pytest.approx({"activations": 1.0, "weights": 1.0})
    assert rows["exponent"].dropna().between(gradients.LOWEST, gradients.HIGHEST).all()


def test_exponents_are_those_of_the_values():
    counts = gradients.count_exponents(torch.tensor([0.0, 1.0, -1.5, 2.0, 2.0**-30, 2.0**-100]))
    places = {place - 1 + gradients.LOWEST: int(count) for place, count in enumerate(counts) if count and place}
    assert counts[0] == 1
    assert places == {0: 2, 1: 1, -30: 1, gradients.LOWEST: 1}


def test_zeros_are_counted_for_each_layer():
    rows = experiments.zeros("small")
    assert set(rows["precision"]) == {"amp", "static"}
    assert rows["zero_share"].between(0, 1).all()
    assert rows.groupby("precision")["layer"].nunique().min() > 3


def test_a_handed_over_step_never_reads_on_the_host_and_each_is_queued_behind_a_busy_gpu(monkeypatch):
    busy = []
    monkeypatch.setattr(overheads, "queue_ahead", busy.append)
    rows = experiments.scaler_step("small").set_index("variant")
    assert len(busy) > rows["n"].sum()
    assert rows.loc["ours", "host_reads"] == rows.loc["no scaler", "host_reads"] == 0
    assert rows.loc["plain operations", "host_reads"] == 1
    assert rows.loc["torch.amp.GradScaler", "ratio_to_torch"] == 1
    assert rows.loc["ours", "ratio_to_torch_low"] <= rows.loc["ours", "ratio_to_torch"]


@pytest.mark.parametrize("millions", [1, 24, 1000])
def test_a_decoder_has_about_as_many_parameters_as_asked_for(millions):
    parameters = sum(torch.Size(shape).numel() for shape in overheads.decoder_shapes(millions))
    assert parameters == pytest.approx(millions * 1e6, rel=0.1)


def test_gradients_of_the_stack_are_in_the_range_of_fp16():
    """The mean over all outputs makes them small: 2 / outputs, for an output of 1."""
    for config in experiments.autocast_overhead.configurations("big-gpu"):
        gradient = overheads.LOSS_SCALE * 2 / (config["batch"] * config["hidden"])
        assert torch.finfo(torch.float16).tiny < gradient < 1


def test_gradients_are_timed_and_their_memory_leaves_out_what_else_lies_there(monkeypatch):
    pictures = 10 * GIB
    monkeypatch.setattr(gradients, "peak_memory", lambda step: Memory(pictures, pictures + GIB, pictures))
    for task in setups.BOTH:
        run = {"task": task, "precision": "dynamic", "size": "small", "kernels": gradients.FP32_KERNELS}
        row = experiments.gradient_time.measure(**run)
        assert row["median_ms"] > 0 and 1 < row["peak_gib"] < 1.01


def test_each_autocast_is_measured():
    assert set(experiments.autocast_overhead("small")["variant"]) == {"no autocast", "torch.autocast", "ours"}
