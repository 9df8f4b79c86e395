"""Chapter 3's experiments on the small preset, and what is said of their records."""

import fake_records
import pandas as pd
import pytest

from helpers.experiments import profiling as experiments
from helpers.lab import records
from helpers.profiling import findings as finding
from helpers.profiling import plots, story


@pytest.fixture
def recorded(tmp_path):
    fake_records.write(tmp_path)
    return lambda e: records.read("nvidia-test", "profiling", e.table, tmp_path)


def test_modules_add_up_and_their_floors_are_known():
    rows = experiments.modules("small")
    for _, found in rows.groupby(["pipeline", "variant"]):
        step = found.loc[found["module"] == "step", "total_ms"].iloc[0]
        parts = found.loc[found["module"] != "step", "self_ms"].sum()
        assert parts == pytest.approx(step, rel=0.05)
        linear = found[found["type"] == "Linear"]
        assert linear["lower_bound_ms"].gt(0).all() and linear["gflop"].gt(0).all()
    told = story.parts(rows.assign(gpu="CPU"))
    assert {"embedding", "attention", "feed-forward", "normalisation", "head"} <= set(told["part"])
    slow = told[told["variant"] == "slow"]
    assert "  softmax" in set(slow["part"])  # fused attention has none


def test_fixes_are_timed_alone_and_together():
    for e in (experiments.vit_fixes, experiments.gpt_fixes):
        rows = e("small")
        assert set(rows["variant"]) == {"slow", "alone", "cumulative"}
        assert rows["iteration_mean_ms"].gt(0).all()


def test_a_whole_run_says_what_was_learned():
    (row,) = experiments.whole_runs("small").to_dict("records")
    assert row["epoch_s"] > 0
    assert 0 <= row["validation_accuracy"] <= 1


def test_the_slow_pipelines_are_diagnosed_and_the_fixed_ones_are_clean():
    rows = experiments.diagnose("small")
    for pipeline, least in (("vit", 6), ("gpt", 5)):
        found = rows[rows["pipeline"] == pipeline].groupby("variant")["finding"]
        assert found.nunique()["slow"] >= least
        assert found.unique()["fixed"].tolist() == ["nothing"]
        switches = experiments.PIPELINES[pipeline].switches
        on_gpu_only = (finding.PAGEABLE, finding.UNBENCHMARKED, finding.RETURNED, finding.FP32, finding.TINY_KERNELS)
        outside_the_steps = (finding.KEPT_GRAPH,)
        told = {story.GIVEN_AWAY[switch.name] for switch in switches} & {
            value for name, value in vars(finding).items() if name.isupper()
        }
        assert told - {*on_gpu_only, *outside_the_steps} <= set(found.unique()["slow"]) | {finding.LOADER_WAITS}
    assert not rows["where"].dropna().str.startswith("/").any()


def test_a_step_can_be_drawn_from_its_trace():
    rows = experiments.timeline("small")
    assert (rows["begin_ms"] <= rows["end_ms"]).all()
    assert "host" in set(rows["track"])
    assert rows.groupby(["pipeline", "variant"]).size().max() <= experiments.DRAWN


def test_metrics_are_timed_over_the_steps():
    rows = experiments.metrics_cost("small")
    assert rows["variant"].nunique() == 2
    assert rows["ms"].gt(0).all()


def test_fixes_are_told_with_their_gains(recorded):
    told = story.fixes(recorded(experiments.vit_fixes), "vit").set_index("fix")
    first, second = told.index[:2]
    assert told.loc[first, "gain alone"] == pytest.approx(1000 / 900)
    assert told.loc[second, "gain of the step"] == pytest.approx(1 / 0.8)
    assert told.loc[second, "gain in all"] == pytest.approx(1 / 0.64)
    assert (
        story.fixes(experiments.vit_fixes("small")[:0].reindex(columns=["variant", "fix", "status"]), "vit")["alone_ms"]
        .isna()
        .all()
    )


def test_goals_are_held_against_the_records(recorded):
    tables = [recorded(e) for e in (experiments.whole_runs, experiments.vit_fixes, experiments.gpt_fixes)]
    said = " ".join(story.verdicts(*tables))
    assert "ViT on photos: an epoch 7.5× as fast (reached: at least 5), accuracy +0.0000 (reached: no lower" in said
    assert "idle for 4.0% of a step (reached: below 5%)" in said
    slower = tables[0].assign(epoch_s=10.0)
    assert "1.0× as fast (missed" in " ".join(story.verdicts(slower, *tables[1:]))
    empty = pd.DataFrame()
    assert len(story.verdicts(empty, empty, empty)) == 1


def test_backward_is_told_against_forward_and_growth_from_first_to_last(recorded):
    said = story.backward_verdicts(recorded(experiments.modules))
    assert "NVIDIA Test, ViT on photos, slow: forward 1.00 ms, backward 2.00 ms, 2.00 times forward" in said
    assert "NVIDIA Test, collected on the CPU: 46.0 ms a step at first, 326.0 ms at last" in story.growth(
        recorded(experiments.metrics_cost)
    )


def test_floors_are_summed_over_the_layers_of_a_type(recorded):
    row = story.floors(recorded(experiments.modules)).iloc[0]
    assert row["type"] == "Linear"
    assert row["time to floor"] == pytest.approx(2.0)


def test_the_figures_can_be_drawn(recorded):
    modules = recorded(experiments.modules)
    assert plots.parts(story.parts(modules)).axes
    assert plots.roofline(story.floors(modules)).axes
    assert plots.waterfall(story.fixes(recorded(experiments.gpt_fixes), "gpt"), "GPT").axes
    assert plots.timelines(recorded(experiments.timeline)).axes
    assert plots.metrics(recorded(experiments.metrics_cost)).axes
