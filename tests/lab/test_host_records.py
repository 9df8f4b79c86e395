"""What a CPU's record counts for: nothing where a GPU's is asked for, a result where the host's work is."""

import pytest

from helpers.lab import records
from helpers.lab.experiment import Experiment
from helpers.lab.notebook import results

ORIGIN = {"status": "ok", "preset": "full", "driver": "none", "torch": "2.13.0+cpu", "cuda": "none"}
ORIGIN |= {"date": "2026-01-02", "commit": "0123456789", "method": 1}


def sorting(size):
    """Sorts."""
    return {"sort_ms": 1.0}


def make(host: bool) -> Experiment:
    presets = {"small": [{"size": 1}], "full": [{"size": 2}]}
    return Experiment("chapter", "sorting", sorting, presets, version=1, host=host)


@pytest.fixture
def record(tmp_path, monkeypatch):
    monkeypatch.setenv("HELPERS_RESULTS", str(tmp_path))

    def write(folder: str, name: str, **origin) -> None:
        row = {"size": 2, "sort_ms": 3.0} | ORIGIN | {"gpu": name} | origin
        records.replace(records.path(folder, "chapter", "sorting"), [row], ["size", "preset"])

    return write


def test_a_cpus_record_is_a_result_of_the_hosts_work_only(record):
    record("cpu-test", "CPU Test")
    assert results(make(host=True)).measured["gpu"].tolist() == ["CPU Test"]
    assert not len(results(make(host=False)).measured)
    assert results(make(host=True)).origin == "CPU Test, torch 2.13.0+cpu, 2026-01-02."
    assert results(make(host=False)).origin == "Not measured on a GPU yet."


def test_where_a_gpus_machine_has_a_record_it_is_that_one(record):
    record("cpu-test", "CPU Test")
    record("nvidia-test", "NVIDIA Test", cuda="13.0", driver="1.2")
    found = results(make(host=True))
    assert found.measured["gpu"].tolist() == ["NVIDIA Test"]
    assert found.origin == "NVIDIA Test, torch 2.13.0+cpu, CUDA 13.0, driver 1.2, 2026-01-02."


def test_what_stands_beside_is_shown_of_both(record):
    both = Experiment("chapter", "sorting", sorting, make(True).presets, version=1, host=True, beside=True)
    record("cpu-test", "CPU Test")
    record("nvidia-test", "NVIDIA Test", cuda="13.0", driver="1.2")
    assert results(both).measured["gpu"].tolist() == ["NVIDIA Test", "CPU Test"]


def test_records_of_the_small_preset_are_no_results(record):
    record("cpu-test", "CPU Test", preset="small")
    found = results(make(host=True))
    assert not len(found.measured)
    assert found.plan["status"].tolist() == ["not measured"]
    assert found.origin == "Not measured yet."
