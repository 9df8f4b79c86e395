"""What chapter 4 says of records, on records that say what they should."""

import fake_records
import pandas as pd
import pytest

from helpers.experiments import swiglu as experiments
from helpers.lab import records
from helpers.lab.notebook import Results
from helpers.swiglu import costs, peers, plots, story


@pytest.fixture
def recorded(tmp_path):
    fake_records.write(tmp_path)

    def read(experiment):
        return Results(experiment, records.read("nvidia-test", "swiglu", experiment.table, tmp_path))

    return read


def unmeasured(experiment):
    return Results(experiment, pd.DataFrame())


def compared(read):
    return story.compared(read(experiments.peers).with_missing, read(experiments.ceilings).measured)


def test_a_plan_without_records_is_all_configurations_and_says_so():
    plan = unmeasured(experiments.sweep).with_missing
    assert len(plan) == len(experiments.sweep.configurations("big-gpu"))
    assert set(plan["status"]) == {"not measured"}
    assert unmeasured(experiments.sweep).origin == "Not measured on a GPU yet."


def test_a_plan_keeps_the_order_and_fills_the_gaps(recorded):
    whole = recorded(experiments.sweep)
    part = Results(experiments.sweep, whole.rows.drop(index=[0, 5]).sample(frac=1, random_state=0))
    names = experiments.sweep.identity("full")
    assert part.with_missing[names].to_dict("records") == experiments.sweep.configurations("big-gpu")
    assert (part.with_missing["status"] == "not measured").sum() == 2


def test_the_saving_is_predicted_without_records_and_measured_with_them(recorded):
    predicted = story.savings(story.with_predictions(unmeasured(experiments.sweep).with_missing))
    assert len(predicted) == 5
    assert predicted["measured_gib"].isna().all()
    assert (predicted["predicted_gib"] > predicted["task_formula_gib"]).all()
    measured = story.savings(story.with_predictions(recorded(experiments.sweep).with_missing))
    assert measured["measured_to_predicted"].between(1.0, 1.01).all()


def test_the_time_of_level_1_is_set_beside_its_products(recorded):
    table = story.slowdown(story.task(story.with_predictions(recorded(experiments.sweep).with_missing)))
    assert table["predicted_backward"].iloc[0] == pytest.approx(8 / 6)
    assert table["backward"].tolist() == pytest.approx([8.2 / 6] * 5, rel=1e-4)
    assert story.slowdown(story.with_predictions(unmeasured(experiments.sweep).with_missing))["backward"].isna().all()


def test_growth_has_a_panel_for_each_dimension_and_all_levels_in_it():
    panels, columns = story.growth(story.with_predictions(unmeasured(experiments.sweep).with_missing))
    for title, rows in panels.items():
        assert rows[columns[title]].nunique() >= 4
        assert (rows.groupby(columns[title])["checkpoint_level"].nunique() == 4).all()


def test_goals_are_held_against_what_was_measured(recorded):
    rows = compared(recorded)
    said = story.verdicts(rows)
    assert "8 bits, bytes, d = 2048, NVIDIA Test: 0.301 (at most 0.31: reached)" in said
    assert "keeping two, bytes of liger-kernel's, d = 4096, NVIDIA Test: 0.696 (at most 1.00: reached)" in said
    slower = rows.assign(ratio_to_compiled=1.5)
    assert any("1.500 (at most 1.00: missed)" in line for line in story.verdicts(slower))
    assert len(story.verdicts(compared(unmeasured))) == 1


def test_the_bound_is_the_products_at_the_measured_rate(recorded):
    rows = compared(recorded).set_index(["hidden_dim", "way"])
    operations = 2 * 9 * 8192 * 2048 * 8192
    assert rows.loc[(2048, "level 2"), "bound_ms"] == pytest.approx(operations / 780e12 * 1e3)
    assert rows.loc[(2048, "level 1"), "bound_ms"] == pytest.approx(11 / 9 * operations / 780e12 * 1e3)
    assert (rows["share_of_bound"] == rows["bound_ms"] / rows["median_ms"]).all()


@pytest.mark.parametrize("lost", ["torch.compile", "liger-kernel", "plain module", "level 2"])
def test_a_way_that_failed_leaves_a_gap_and_no_verdict(recorded, lost):
    results = recorded(experiments.peers)
    measured = [c for c in results.rows.columns if c.startswith(("ratio", "saved", "median", "p20", "p80"))]
    results.rows.loc[results.rows["way"] == lost, measured] = None
    ratios = {"torch.compile": "ratio_to_compiled", "liger-kernel": "ratio_to_liger", "plain module": "saved_ratio"}
    if lost in ratios:
        results.rows[ratios[lost]] = None
    results.rows.loc[results.rows["way"] == lost, "status"] = "failed: no compiler"
    rows = story.compared(results.with_missing, recorded(experiments.ceilings).measured)
    assert not any("nan" in line for line in story.verdicts(rows))
    assert any("not measured" in line for line in story.verdicts(rows))
    assert plots.pareto(rows).axes


def test_a_gpu_with_gaps_shows_them_beside_a_complete_one(tmp_path):
    fake_records.write(tmp_path)
    fake_records.write(tmp_path, "nvidia-other", "NVIDIA Other")
    tables = [records.read(gpu, "swiglu", "sweep", tmp_path) for gpu in ("nvidia-other", "nvidia-test")]
    rows = pd.concat([tables[0], tables[1].iloc[5:]], ignore_index=True)
    plan = Results(experiments.sweep, rows).with_missing
    missing = plan[plan["status"] == "not measured"]
    assert missing["gpu"].tolist() == ["NVIDIA Test"] * 5


def test_the_headline_lists_every_way_with_or_without_records(recorded):
    for read in (unmeasured, recorded):
        assert story.headline(compared(read))["way"].tolist() == list(peers.WAYS)


@pytest.mark.parametrize("source", ["unmeasured", "recorded"])
def test_every_figure_can_be_drawn_in_either_state(recorded, source):
    read = recorded if source == "recorded" else unmeasured
    plan = story.with_predictions(read(experiments.sweep).with_missing)
    assert plots.saving(story.savings(plan)).axes
    assert plots.growth(*story.growth(plan)).axes
    assert len(plots.pareto(compared(read)).axes) == (3 if source == "recorded" else 1)


def test_predictions_are_those_of_costs():
    row = story.with_predictions(unmeasured(experiments.sweep).with_missing).iloc[0]
    assert row["predicted_saved_gib"] == 2 * costs.kept_bytes(0, 16 * 128, 512, 2048, 4) / 2**30
