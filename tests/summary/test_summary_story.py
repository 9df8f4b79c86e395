import pandas as pd
import pytest

from helpers.experiments.summary import stages
from helpers.summary import plots, story
from helpers.training.stages import MIXED, STAGES

SECONDS = {"none": 100.0} | {name: 100.0 * 0.5**place for place, name in enumerate(STAGES, 1)}


def runs(gpu="NVIDIA Test", apart=0.0):
    rows = []
    for config in stages.configurations("big-gpu"):
        seconds = SECONDS[config["stage"]] if config["way"] != "alone" else 80.0
        loss = 5.0 + 0.01 * config["seed"] + (apart if config["stage"] == list(STAGES)[-1] else 0.0)
        row = {"train_s": seconds, "peak_gib": seconds / 10, "validation_loss": loss, "gpu": gpu, "status": "ok"}
        rows.append(config | row)
    return pd.DataFrame(rows)


def test_gains_are_told_alone_beside_the_stages_before_and_in_all():
    told = story.stages(runs()).set_index("stage")
    assert list(told.index) == ["start", *(f"+ {name}" for name in STAGES)]
    assert told["gain beside"].dropna().tolist() == pytest.approx([2.0] * len(STAGES))
    assert told.iloc[-1]["gain in all"] == pytest.approx(2.0 ** len(STAGES))
    assert told.loc[f"+ {MIXED}", "gain alone"] == pytest.approx(2.0)
    assert told.iloc[-1]["gain alone"] == pytest.approx(1.25)
    assert told["seeds"].tolist() == [3] * len(told)


def test_the_answer_names_the_whole_gain_the_best_stage_and_the_loss():
    said = " ".join(story.answer(story.stages(runs())))
    assert "100 s at the start and 3.12 s with all stages, 32.00× as fast" in said
    assert "within twice the deviation" in said
    assert "Peak memory was 10.0 GiB and falls to 0.3." in said
    assert "more than twice the deviation" in " ".join(story.answer(story.stages(runs(apart=0.5))))


def test_a_stage_that_gains_nothing_is_named():
    slower = runs()
    last = list(STAGES)[-1]
    slower.loc[(slower["stage"] == last) & (slower["way"] == "cumulative"), "train_s"] = 20.0
    said = " ".join(story.answer(story.stages(slower)))
    assert f"Slower with *{last}* (0.31×)" in said
    assert f"Fastest up to *{list(STAGES)[-2]}*: 16.00× the start" in said
    same = runs()
    same.loc[(same["stage"] == last) & (same["way"] == "cumulative"), "train_s"] = 6.25
    assert f"No difference (less than 3 %) with *{last}*" in " ".join(story.answer(story.stages(same)))


def test_what_is_measured_in_part_is_told_in_part():
    first = runs()
    first = first[(first["stage"].isin(["none", MIXED])) & (first["way"] != "alone")]
    plan = pd.concat([first, runs().drop(columns=["train_s"]).assign(status="not measured").query("stage != @MIXED")])
    said = " ".join(story.answer(story.stages(plan.drop_duplicates(["way", "stage", "seed"]))))
    assert f"up to *{MIXED}* (1 of 5 stages), 2.00× as fast" in said
    no_start = runs()
    no_start.loc[no_start["stage"] == "none", ["train_s", "status"]] = [None, "out of memory"]
    assert story.answer(story.stages(no_start)) == []
    few = runs()
    few = few[few["stage"].isin(["none", list(STAGES)[2]]) & (few["way"] != "alone")]
    assert "8.00× as fast" in " ".join(story.answer(story.stages(few)))


def test_nothing_measured_gives_rows_without_figures_and_no_answer():
    plan = pd.DataFrame([c | {"status": "not measured"} for c in stages.configurations("big-gpu")])
    told = story.stages(plan)
    assert len(told) == len(STAGES) + 1
    assert not story.answer(told)


def test_the_waterfall_has_a_bar_for_each_stage():
    drawn = plots.waterfall(story.stages(runs()))
    assert len(drawn.axes[0].get_yticklabels()) == len(STAGES) + 1
