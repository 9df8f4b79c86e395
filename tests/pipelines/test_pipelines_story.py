import pandas as pd
import pytest

from helpers.experiments import pipelines as experiments
from helpers.experiments import tables_of
from helpers.pipelines import plots, story

pytestmark = pytest.mark.usefixtures("results")


def test_formats_are_held_against_small_files_and_against_their_bare_files(measured):
    formats = measured(experiments.formats)
    said = story.format_verdicts(formats)
    assert "images" not in said[0]
    assert "webdataset is read 4.0× as fast as small files" in said[0]
    assert "(reached: at least 3); the bare files, without any reader, 4.0×" in said[0]
    assert story.best_gain(formats, story.SHARDS) == pytest.approx(5.0)
    assert story.best_gain(formats, story.MAPPED) == pytest.approx(9.0)
    headline = "shards 5.0× (webdataset by index, image); a mapped file 9.0× (mapped, image)"
    assert headline in story.format_headline(formats)
    assert "webdataset by index, image: its bare files are read 5.0× as fast" in story.shards_between(formats)
    assert "missed" in " ".join(story.format_verdicts(formats.assign(samples_per_s=1000.0)))
    sizes = story.sizes(formats)
    assert len(sizes) == 2 * 6 and sizes["to the data"].iloc[0] == pytest.approx(1.25)


def test_what_the_loader_needs_is_told_with_the_predictions_error(measured):
    said = story.loader_verdicts(measured(experiments.loader))
    assert "takes 20 ms a step is idle for less than 5 % from 4 workers on; with 0 workers for 90%" in said[0]
    assert "off by at most 1%" in said[0]


def test_points_lost_are_means_over_seeds_and_held_against_the_goal(measured):
    told = story.choice(measured(experiments.forgetting))
    epochs = told[(told["data"] == "digits") & (told["budget"] == "epochs")]
    least = epochs[epochs["variant"] == "least forgotten"].set_index("share")
    assert least.loc[0.0, "lost_points"] == 0 and least.loc[0.3, "lost_points"] == pytest.approx(0.06)
    assert least.loc[0.3, "seeds"] == 10
    said = " ".join(story.choice_verdicts(told))
    assert "without the least forgotten 30%, -0.06 ± 0.00 points (reached: at most 0.5 lost)" in said
    assert story.lost_points(measured(experiments.forgetting)) == pytest.approx(0.06)


def test_what_a_gpu_has_a_part_in_is_measured_before_what_only_the_host_does():
    tables = [e.table for e in tables_of("pipelines")]
    assert tables.index("formats") > max(map(tables.index, ("loader", "decoding", "metrics_cost", "metrics_growth")))
    where = [config["where"] for config in experiments.loader.configurations("big-gpu")]
    assert where[:6] == ["cuda"] * 6 and "cuda" not in where[6:]
    (live,) = experiments.loader.configurations("small")
    assert live["where"] == "simulated"


def test_with_one_seed_there_is_no_error_to_tell(measured):
    one = measured(experiments.forgetting)
    one = one[one["seed"] == 0].assign(unforgettable_share=0.9)
    assert "nan" not in " ".join(story.choice_verdicts(story.choice(one)))
    assert "garments: 90% are never forgotten, yet leaving out any 30% costs" in story.choice_between(
        one.assign(lost_points=one["lost_points"].where(one["data"] != "garments", 3.0))
    )


def test_the_other_verdicts_quote_their_records(measured):
    assert "1 ms a step at first, 201 ms at last, 2 s" in story.metric_verdicts(measured(experiments.metrics_growth))[0]
    assert "50.0× as fast once compiled" in story.jit_verdicts(measured(experiments.jit))[0]
    assert "60% had wrong labels" in story.noise_verdicts(measured(experiments.wrong_labels))[0]
    assert list(story.decoder_faults(measured(experiments.decoder_faults)).columns) == ["fault", "Pillow", "OpenCV"]


def test_without_records_each_verdict_says_so():
    nothing = pd.DataFrame()
    for verdict in ("format", "loader", "metric", "choice", "noise", "jit"):
        (said,) = getattr(story, f"{verdict}_verdicts")(nothing)
        assert "not" in said
    assert not len(story.choice(nothing)) and not len(story.sizes(nothing))


def test_figures_have_a_panel_for_each_case(measured):
    assert len(plots.formats(measured(experiments.formats)).axes) == 4
    assert len(plots.choice(story.choice(measured(experiments.forgetting))).axes) == 2
    assert len(plots.jit(measured(experiments.jit)).axes) == 4
    assert len(plots.metrics(measured(experiments.metrics_cost)).axes[0].lines) == 3


@pytest.mark.parametrize("name", ["formats", "decoding", "decoder_faults", "metrics_growth", "forgotten", "jit"])
def test_each_table_is_measured_small(name):
    table = getattr(experiments, name)("small")
    assert len(table) and (table["status"].eq("ok") | table["status"].str.match("not installed|needs CUDA")).all()
