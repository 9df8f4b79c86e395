"""Chapter 1's experiments on the small preset, and what is said of their records."""

import fake_records
import pandas as pd
import pytest

from helpers.amp import experiments, plots, story
from helpers.lab import records


@pytest.fixture
def recorded(tmp_path):
    fake_records.write(tmp_path)
    return lambda e: records.read("nvidia-test", "amp", e.table, tmp_path)


def test_quality_says_how_a_run_went():
    rows = experiments.quality("small").to_dict("records")
    assert {row["task"] for row in rows} == {"segmentation", "lm"}
    for row in rows:
        assert row["diverged"] == "no"
        assert 0 <= row["zero_share"] < 0.5
        assert row["source"]
        assert (row["final_scale"] == row["final_scale"]) == (row["precision"] == "dynamic")


def test_curves_follow_loss_and_scale():
    rows = experiments.curves("small")
    dynamic = rows[rows["precision"] == "dynamic"]
    assert dynamic["scale"].eq(2.0**16).all()
    assert rows[rows["precision"] == "fp32"]["scale"].isna().all()
    assert rows["loss"].notna().all()


def test_exponents_are_shares_of_all_gradients():
    rows = experiments.exponents("small")
    shares = rows.groupby("kind")["share"].sum()
    assert shares.to_dict() == pytest.approx({"activations": 1.0, "weights": 1.0})
    assert rows["exponent"].dropna().between(experiments.LOWEST, experiments.HIGHEST).all()


def test_exponents_are_those_of_the_values():
    import torch

    counts = experiments._exponents(torch.tensor([0.0, 1.0, -1.5, 2.0, 2.0**-30, 2.0**-100]))
    places = {place - 1 + experiments.LOWEST: int(count) for place, count in enumerate(counts) if count and place}
    assert counts[0] == 1
    assert places == {0: 2, 1: 1, -30: 1, experiments.LOWEST: 1}


def test_zeros_are_counted_for_each_layer():
    rows = experiments.zeros("small")
    assert set(rows["precision"]) == {"amp", "static"}
    assert rows["zero_share"].between(0, 1).all()
    assert rows.groupby("precision")["layer"].nunique().min() > 3


def test_a_handed_over_step_never_reads_on_the_host_and_the_readable_one_does():
    rows = experiments.scaler_step("small").set_index("way")
    assert rows.loc["ours", "host_reads"] == rows.loc["no scaler", "host_reads"] == 0
    assert rows.loc["ours, readable", "host_reads"] == 1
    assert rows.loc["torch.amp.GradScaler", "ratio_to_torch"] == 1


def test_costs_are_measured_for_each_way():
    assert set(experiments.autocast_overhead("small")["way"]) == {"no autocast", "torch.autocast", "ours"}
    assert (experiments.gradient_time("small")["median_ms"] > 0).all()


def test_quality_is_told_as_mean_and_spread(recorded):
    table = story.quality(recorded(experiments.quality)).set_index(["task", "training"])
    assert table.loc[("segmentation", "AMP fp16, dynamic scale"), "validation accuracy"] == "0.9910 ± 0.0010"
    assert table.loc[("lm", "pure fp16"), "diverged"] == 3


def test_the_reduced_size_is_held_against_fp32(recorded):
    measured = recorded(experiments.reduced_quality)
    said = story.reduced_verdicts(measured)
    assert (
        "NVIDIA Test: AMP fp16, no scaler, -0.0400 in accuracy against fp32 (seeds: 3), 70.0% of the gradients zero"
        in said
    )
    assert len(said) == 4
    assert story.reduced_verdicts(pd.DataFrame()) == ["Not measured yet."]
    assert experiments.reduced_quality("small")["validation_accuracy"].between(0, 1).all()


def test_goals_are_held_against_the_records(recorded):
    quality, steps = recorded(experiments.quality), recorded(experiments.scaler_step)
    said = story.quality_verdicts(quality)
    assert "NVIDIA Test: without a scaler, AMP is 0.0400 below the dynamic scale, on the mean" in said
    worse = quality.assign(validation_accuracy=0.9)
    assert any("missed" in line for line in story.quality_verdicts(worse))
    said = story.step_verdicts(steps, recorded(experiments.autocast_overhead))
    assert any("1.010 of one under torch's (reached" in line for line in said)
    empty = pd.DataFrame()
    assert len(story.quality_verdicts(empty)) == len(story.step_verdicts(empty, empty)) == 1


def test_what_fp16_loses_is_a_share_of_what_is_there(recorded):
    table = story.lost(recorded(experiments.exponents))
    assert table["share"].between(0, 1).all()
    assert table["share"].iloc[0] == pytest.approx(26 / 40)


def test_the_figures_can_be_drawn(recorded):
    curves = recorded(experiments.curves)
    for figure in (plots.losses(curves), plots.scales(curves), plots.exponents(recorded(experiments.exponents))):
        assert len(figure.axes) == 2
