import re
from pathlib import Path

import fake_records
import pytest

from helpers.experiments import select, tables_of
from helpers.lab import records
from helpers.summary import GOALS, against_records, held, story
from helpers.summary.goals import NOT_MEASURED

ROOT = Path(__file__).parents[2]


def test_without_records_every_goal_is_not_measured(tmp_path):
    found = against_records(tmp_path)
    assert len(found) == len(GOALS)
    assert set(found["verdict"]) == {NOT_MEASURED}


def test_with_records_every_goal_has_its_figure(tmp_path):
    fake_records.write(tmp_path)
    fake_records.write(tmp_path, "cpu-test", "CPU Test")
    found = against_records(tmp_path)
    lacking = found[~found["verdict"].isin(["reached", "missed"])]
    assert not len(lacking), lacking["what"].tolist()
    by = found[found["gpu"] == "NVIDIA Test"].set_index("what")
    static = by.loc["segmentation accuracy with a static scale, lowest of all seeds"]
    assert (static["reached"], static["verdict"], static["goal"]) == ("0.99", "reached", "at least 0.985")
    faster = by.loc["unscale, clip and step, times as fast as torch's"]
    assert (faster["reached"], faster["verdict"]) == ("1.444", "reached")
    idle = by.loc["the device idle in a step of the ViT with all fixes"]
    assert (idle["reached"], idle["goal"], idle["verdict"]) == ("4%", "below 5%", "reached")


def test_a_figure_beyond_its_goal_is_missed(tmp_path):
    table = next(e for e in tables_of("amp") if e.table == "autocast_overhead")
    rows = [c | fake_records.ORIGIN | {"way": "ours", "ratio_to_torch": 1.03} for c in table.configurations("big-gpu")]
    records.replace(records.path("nvidia-test", "amp", "autocast_overhead", tmp_path), rows)
    found = against_records(tmp_path).set_index("what").loc["a step under our Autocast, against torch's"]
    assert (found["reached"], found["goal"], found["verdict"]) == ("1.03", "at most 1.02", "missed")


def test_what_a_cpu_can_tell_is_taken_from_a_cpu_only_where_no_gpu_has_it(tmp_path):
    fake_records.write(tmp_path, "cpu-test", "CPU Test")
    measured = against_records(tmp_path).dropna(subset="gpu")
    assert set(measured["gpu"]) == {"CPU Test"} and 0 < len(measured) < len(GOALS)
    fake_records.write(tmp_path)
    both = against_records(tmp_path)
    packs = both[both["what"] == "how full the packs are"]
    assert packs["gpu"].tolist() == ["NVIDIA Test"]
    shards = both[both["what"].str.startswith("tar or TFRecord")]
    assert shards["gpu"].tolist() == ["NVIDIA Test"]
    on_cpu = both[both["what"].str.startswith("ONNX Runtime")]
    assert on_cpu["gpu"].tolist() == ["CPU Test"]


def test_what_stands_between_is_told_where_a_goal_is_missed(tmp_path):
    formats = next(e for e in tables_of("pipelines") if e.table == "formats")
    rows = [c | fake_records.ORIGIN | {"samples_per_s": 1e3, "raw_s": 0.1} for c in formats.configurations("big-gpu")]
    records.replace(records.path("cpu-test", "pipelines", "formats", tmp_path), rows)
    found = against_records(tmp_path)
    shards = found[found["what"].str.startswith("tar or TFRecord")].iloc[0]
    assert shards["verdict"] == "missed" and "bare files are read 1.0× as fast" in shards["between"]


@pytest.mark.parametrize("test", [test for _, _, test in held.HELD])
def test_what_a_test_holds_is_a_test(test):
    file, name = test.split("::")
    assert re.search(rf"(?m)^def {name}\(", (ROOT / "tests" / file).read_text())


def test_tables_that_wait_are_told(tmp_path):
    everything = select([])
    nothing = story.waiting(everything, tmp_path)
    assert set(nothing["measured"]) == {""}
    assert set(nothing["reasons"]) == {"no GPU at hand"}
    fake_records.write(tmp_path)
    there = story.waiting(everything, tmp_path)
    assert set(there.set_index("chapter").drop("swiglu")["waits"]) == {""}
    assert "scaler_step" in there.set_index("chapter").loc["amp", "measured"]
