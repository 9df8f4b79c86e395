import fake_records
import pandas as pd
import pytest

from helpers.compilers import experiments, plots, story
from helpers.lab.notebook import recorded

pytestmark = pytest.mark.usefixtures("results")


def test_outcomes_are_a_table_of_functions_by_ways_and_the_silent_ones_are_named(measured):
    semantics = measured(experiments.semantics)
    table = story.outcomes(semantics).set_index("specimen")
    assert table.loc["printing", "torch.jit.trace"] == "silently wrong"
    assert "`torch.jit.trace`: silently wrong about printing" in story.semantic_verdicts(semantics)
    assert "`torch.export`: never silently wrong" in story.semantic_verdicts(semantics)
    counts = story.outcome_counts(semantics).set_index("way")
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
    begun = latency[(latency["model"] == "resnet-18") & (latency["way"] == "eager")]  # a measurement that was stopped
    assert len([a for a in plots.latency(begun).axes if a.axison]) == begun["batch"].nunique()


def test_each_question_gets_an_answer_and_devices_are_told_apart(measured, results):
    fake_records.write(results, "cpu-test", "CPU Test")
    tables = [recorded(e).measured for e in (experiments.semantics, experiments.latency, experiments.fusion)]
    said = story.headlines(*tables)
    assert "`torch.jit.trace` is silently wrong about 1; never so: `torch.export`" in said[0]
    assert said[1].startswith("NVIDIA Test: fusing by torch.compile") and "8 of 8 cases faster" in said[1]
    assert said[2].startswith("CPU Test: fusing")
    assert set(tables[1]["gpu"]) == {"NVIDIA Test", "CPU Test"}
    assert story.outcome_counts(tables[0]).set_index("way").sum(axis=1).max() == len(story.outcomes(tables[0]))


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
