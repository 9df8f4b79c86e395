"""Chapter 5's experiments on the small preset, and what is said of their records."""

import fake_records
import pandas as pd
import pytest

from helpers.lab import records
from helpers.rush import experiments, plots, story


@pytest.fixture
def recorded(tmp_path):
    fake_records.write(tmp_path)
    return lambda e: records.read("nvidia-test", "rush", e.table, tmp_path)


@pytest.mark.parametrize("name", ["ladder", "batch", "checkpointing", "peers"])
def test_setups_are_measured_or_say_why_not(name):
    rows = getattr(experiments, name)("small")
    ran = rows[rows["status"] == "ok"]
    assert len(ran)
    assert ran["tokens_per_s"].gt(0).all() and ran["loss"].between(1, 10).all()
    assert rows.loc[rows["status"] != "ok", "status"].str.startswith("not here: ").all()


def test_a_loader_is_waited_for():
    (row,) = experiments.loading("small").to_dict("records")
    assert row["step_ms"] > 0 and row["wait_ms"] > 0


@pytest.mark.parametrize("name", ["norms", "adam", "lecture"])
def test_kernels_are_compared_and_those_that_lack_something_say_so(name):
    rows = getattr(experiments, name)("small")
    assert rows.loc[rows["status"] == "ok", "median_ms"].gt(0).all()
    assert rows.loc[rows["status"] != "ok", "status"].str.match("not installed: |not here: ").all()


def test_every_strategy_ends_at_the_same_loss():
    rows = experiments.distributed("small").set_index("strategy")
    assert set(rows.index) == set(experiments.STRATEGIES)
    assert rows["last_loss"].max() - rows["last_loss"].min() < 1e-4
    assert rows.loc["zero3", "optimizer_bytes"] < 0.6 * rows.loc["ddp", "optimizer_bytes"]


def test_simulated_memory_is_told_beside_the_derived():
    (row,) = experiments.memory_plan("small").to_dict("records")
    assert row["simulated"]
    assert row["derived_ratio"] == pytest.approx(1, abs=0.03)


def test_scaling_is_predicted_for_each_strategy():
    rows = experiments.scaling("small")
    assert rows["predicted"].all()
    assert rows["efficiency"].between(0, 1).all()
    assert set(rows["strategy"]) == {"ddp", "zero2", "zero3"}


def test_rungs_are_told_against_what_they_stand_on(recorded):
    told = story.ladder(recorded(experiments.ladder)).set_index("step")
    assert told.loc["TF32", "gain"] == pytest.approx(2.0)
    assert told.loc["mixed precision", "gain in all"] == pytest.approx(3.0)
    assert told.loc["no optimisation", "gain"] is None or pd.isna(told.loc["no optimisation", "gain"])
    assert set(story.changes()["step"]) == set(told.index) - {"no optimisation"}


def test_goals_are_held_against_the_records(recorded):
    said = " ".join(story.ladder_verdicts(recorded(experiments.ladder), recorded(experiments.peers)))
    assert "best bf16 rung, Triton SwiGLU" in said and "MFU (reached: at least 60%)" in said
    assert "2.00× transformers, liger-kernel, FlashAttention-2, fused AdamW (reached: at least 1.5)" in said
    said = story.kernel_verdicts(recorded(experiments.norms), recorded(experiments.adam))
    assert (
        "NVIDIA Test: our norm kernel moves its bytes at 70% of a copy's rate or more (reached: at least 65%)" in said
    )
    said = story.simulation_verdicts(recorded(experiments.memory_plan))
    assert "the derived memory is within 1.00% of the measured one (reached: at most 3%)" in said[0]
    empty = pd.DataFrame()
    assert len(story.simulation_verdicts(empty)) == 1
    assert len(story.ladder_verdicts(empty, empty)) == len(story.kernel_verdicts(empty, empty)) == 1


def test_the_longest_sequence_is_that_of_the_last_row_that_fits(recorded):
    rows = recorded(experiments.checkpointing)
    rows.loc[rows["sequence"] > 8192, "status"] = "out of memory"
    assert set(story.longest(rows)["sequence"]) == {8192}


def test_losses_are_compared_with_one_process(recorded):
    rows = recorded(experiments.distributed)
    assert "is other, to the six digits recorded, than one rank's" in story.same_losses(rows)[0]
    rows.loc[rows["strategy"] == "tp", "last_loss"] = 5.6
    assert story.same_losses(rows) == [
        "NVIDIA Test: on 2 and 4 ranks no strategy's last loss is further than 1.0e-01 from one rank's"
    ]


def test_the_figures_can_be_drawn(recorded):
    assert plots.ladder(story.ladder(recorded(experiments.ladder))).axes
    assert plots.batches(recorded(experiments.batch)).axes
    assert plots.checkpointing(recorded(experiments.checkpointing)).axes
    assert plots.memory(recorded(experiments.memory_plan)).axes
    assert plots.scaling(recorded(experiments.scaling)).axes
