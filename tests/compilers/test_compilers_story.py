import pandas as pd
import pytest

from helpers.compilers import plots, story
from helpers.compilers.backends import AUTOTUNE, COMPILE, ONNX, OVERHEAD
from helpers.compilers.latency import backends_for
from helpers.experiments import compilers as experiments
from helpers.experiments import tables_of
from helpers.lab.notebook import recorded

pytestmark = pytest.mark.usefixtures("results")


def test_outcomes_are_a_table_of_functions_by_ways_and_the_silent_ones_are_named(measured):
    semantics = measured(experiments.semantics)
    table = story.outcomes(semantics).set_index("case")
    assert table.loc["printing", "torch.jit.trace"] == "silently wrong"
    assert "`torch.jit.trace`: silently wrong about printing" in story.semantic_verdicts(semantics)
    assert "`torch.export`: never silently wrong" in story.semantic_verdicts(semantics)
    counts = story.outcome_counts(semantics).set_index("variant")
    assert counts.sum(axis=1).tolist() == [len(table)] * 2
    assert len(plots.outcomes(counts.reset_index()).axes) == 1


def test_the_goal_of_inference_is_held_against_the_mean_over_batches(measured):
    latency = measured(experiments.latency)
    assert (
        "ONNX Runtime on bert-base, mean over batches of 1, 8, 1.50× (reached: at least 1.3)"
        in story.latency_verdicts(latency)[-1]
    )
    assert story.inference_gain(latency) == pytest.approx(1.5)
    slower = latency.assign(speedup=1.1)
    assert "1.10× (missed: at least 1.3)" in story.latency_verdicts(slower)[-1]
    assert story.inference_gain(latency[latency["batch"] == 1]) is None, "one batch is no mean"
    assert len([a for a in plots.latency(latency).axes if a.axison]) == 6
    assert len([a for a in plots.latency(latency[latency["precision"] == "fp32"]).axes if a.axison]) == 5
    begun = latency[
        (latency["model"] == "resnet-18") & (latency["backend"] == "eager")
    ]  # a measurement that was stopped
    assert len([a for a in plots.latency(begun).axes if a.axison]) == begun["batch"].nunique()


def test_what_a_gpus_short_time_is_for_is_measured_first():
    tables = [e.table for e in tables_of("compilers")]
    assert tables == ["fusion", "training", "flawed", "latency", "deprecations", "semantics"]
    plan = pd.DataFrame(experiments.latency.configurations("big-gpu"))
    assert len(plan.drop_duplicates()) == len(plan)
    goal = plan[(plan["precision"] == "fp32") & plan["batch"].isin([1, 8])]
    goal = goal[goal["backend"].isin([ONNX, COMPILE, OVERHEAD])]
    assert len(goal) == 2 * 2 * 3
    assert goal.index.max() < 16
    assert set(plan["backend"][-4:]) == {AUTOTUNE}, "which takes longest to build"
    for model, rows in plan.groupby("model"):
        assert set(rows["backend"]) == set(backends_for(model))


def test_max_autotune_is_built_for_one_batch_on_a_gpu_and_for_all_on_a_cpu():
    for machine, batches in (("big-gpu", {1}), ("cpu", {1, 8, 64})):
        configs = experiments.latency.configurations(machine)
        assert {config["batch"] for config in configs if config["backend"] == AUTOTUNE} == batches


def test_a_table_shows_the_ways_of_a_shape_together_and_in_their_order(measured):
    shown = story.latency(recorded(experiments.latency).with_missing)
    assert len(shown) == len(experiments.latency.configurations("big-gpu"))
    for precision in ("fp16", "fp32"):
        for model in ("resnet-18", "bert-base"):
            of_shape = shown[(shown["precision"] == precision) & (shown["model"] == model) & (shown["batch"] == 1)]
            assert of_shape["backend"].tolist() == backends_for(model)
            assert of_shape.index.max() - of_shape.index.min() == len(of_shape) - 1
    training = measured(experiments.training)
    pd.testing.assert_frame_equal(story.latency(training), training)


def test_a_figure_shows_batches_and_ways_in_their_order_whenever_they_were_measured(measured):
    latency = measured(experiments.latency)
    last_first = latency.sort_values(["model", "backend", "batch"], ascending=False)
    assert shown_in(plots.latency(last_first)) == shown_in(plots.latency(latency))


def shown_in(figure):
    """A panel's title and the names beside it, of all panels, whichever model is drawn first."""
    return sorted((axis.get_title(), [name.get_text() for name in axis.get_yticklabels()]) for axis in figure.axes)


def test_before_anything_is_measured_the_plan_is_the_table(results):
    for e in (experiments.latency, experiments.training):
        shown = story.latency(recorded(e).with_missing)
        assert len(shown) == len(e.configurations("big-gpu"))


def test_each_question_gets_an_answer(measured):
    tables = [recorded(e).measured for e in (experiments.semantics, experiments.latency, experiments.fusion)]
    said = story.headlines(*tables)
    assert "`torch.jit.trace` is silently wrong about 1; never so: `torch.export`" in said[0]
    assert said[1].startswith("NVIDIA Test: fusing by torch.compile") and "8 of 8 cases faster" in said[1]
    assert story.outcome_counts(tables[0]).set_index("variant").sum(axis=1).max() == len(story.outcomes(tables[0]))


def test_training_has_its_goal_on_a_gpu_only(measured):
    training = measured(experiments.training)
    assert "1.30× (reached: at least 1.25)" in story.training_verdicts(training)[-1]
    assert story.training_gain(training.assign(gpu="CPU Test")) is None


def test_the_other_verdicts_quote_their_records(measured):
    assert (
        "2.20× by the lecture's timing, 1.10× by the right one"
        in story.flawed_verdicts(measured(experiments.flawed))[0]
    )
    said = story.fusion_verdicts(measured(experiments.fusion))[0]
    assert "5 → 1 kernels, 4.0 → 1.0 times the least bytes, 3.33× as fast" in said
    assert len(plots.fusion(measured(experiments.fusion)).axes) == 2


def test_without_records_each_verdict_says_so():
    nothing = pd.DataFrame()
    for verdict in ("semantic", "latency", "flawed", "training", "fusion"):
        (said,) = getattr(story, f"{verdict}_verdicts")(nothing)
        assert "not" in said


@pytest.mark.parametrize("name", ["deprecations", "fusion", "flawed", "training"])
def test_each_table_is_measured_small(name):
    table = getattr(experiments, name)("small")
    assert len(table) and (table["status"] == "ok").all()
