"""What each way of capturing makes of functions that are hard to capture. The outcomes hold for torch 2.11 and 2.13."""

import inspect
import logging
import os
import sys

import pytest
import torch

from helpers.compilers import capture, semantics, specimens, successor
from helpers.compilers.backends import inductor
from helpers.compilers.capture import COMPILE, EXPORT, FULLGRAPH, FX, INDUCTOR, REPAIRED, SCRIPT, STRICT, TRACE
from helpers.compilers.semantics import BREAKS, RECOMPILES, REFUSES, RIGHT, SILENT, WARNED, measure_semantics, same
from helpers.compilers.specimens import SPECIMENS
from helpers.experiments import compilers as experiments

EXPECTED = {
    "branch on data": {TRACE: WARNED, SCRIPT: RIGHT, FX: REFUSES, EXPORT: REFUSES, REPAIRED: RIGHT},
    "branch on shape": {TRACE: WARNED, SCRIPT: RIGHT, FX: REFUSES, EXPORT: REFUSES, REPAIRED: RIGHT},
    "branch on dtype": {TRACE: SILENT, SCRIPT: RIGHT, FX: REFUSES, EXPORT: SILENT},
    "loop on data": {TRACE: WARNED, SCRIPT: RIGHT, FX: REFUSES, EXPORT: REFUSES, REPAIRED: RIGHT},
    "assertion on data": {TRACE: WARNED, SCRIPT: RIGHT, FX: REFUSES, EXPORT: REFUSES},
    "size as a number": {TRACE: WARNED, SCRIPT: RIGHT, FX: REFUSES, EXPORT: REFUSES, REPAIRED: RIGHT},
    "item": {TRACE: WARNED, SCRIPT: RIGHT, FX: RIGHT, EXPORT: RIGHT},
    "printing": {TRACE: SILENT, SCRIPT: RIGHT, FX: SILENT, EXPORT: SILENT},
    "appending to a list": {TRACE: SILENT, SCRIPT: REFUSES, FX: SILENT, EXPORT: SILENT},
    "counting in an attribute": {TRACE: REFUSES, SCRIPT: RIGHT, FX: SILENT, EXPORT: SILENT, REPAIRED: RIGHT},
    "reading a setting": {TRACE: SILENT, SCRIPT: REFUSES, FX: SILENT, EXPORT: SILENT},
    "changing its input": {TRACE: RIGHT, SCRIPT: RIGHT, FX: RIGHT, EXPORT: RIGHT},
    "numpy call": {TRACE: WARNED, SCRIPT: REFUSES, FX: REFUSES, EXPORT: REFUSES},
    "c call": {TRACE: WARNED, SCRIPT: REFUSES, FX: REFUSES, EXPORT: REFUSES, REPAIRED: RIGHT},
    "dropout mode": {TRACE: WARNED, SCRIPT: RIGHT, FX: RIGHT, EXPORT: REFUSES},
    "random numbers": {TRACE: RIGHT, SCRIPT: RIGHT, FX: RIGHT, EXPORT: RIGHT},
    "dict output": {TRACE: REFUSES, SCRIPT: RIGHT, FX: RIGHT, EXPORT: RIGHT},
    "dataclass output": {TRACE: REFUSES, SCRIPT: REFUSES, FX: RIGHT, EXPORT: REFUSES},
    "string argument": {TRACE: REFUSES, SCRIPT: RIGHT, FX: REFUSES, EXPORT: REFUSES},
}
BY_DYNAMO = {
    ("branch on data", COMPILE): BREAKS,
    ("branch on data", FULLGRAPH): REFUSES,
    ("branch on shape", COMPILE): RECOMPILES,
    ("printing", COMPILE): RIGHT,
    ("printing", FULLGRAPH): REFUSES,
    ("numpy call", FULLGRAPH): RIGHT,
    ("reading a setting", FULLGRAPH): RECOMPILES,
    ("appending to a list", STRICT): WARNED,
}


@pytest.mark.parametrize("specimen", SPECIMENS)
def test_a_way_is_right_or_wrong_about_a_specimen(specimen):
    found = {way: measure_semantics(specimen, way)["outcome"] for way in EXPECTED[specimen]}
    assert found == EXPECTED[specimen]


@pytest.mark.parametrize(("specimen", "way"), BY_DYNAMO)
def test_dynamo_goes_on_in_python_where_it_may(specimen, way):
    assert measure_semantics(specimen, way)["outcome"] == BY_DYNAMO[specimen, way]


@pytest.mark.parametrize("lacking", ["C++ compiler", "Python.h"])
def test_what_a_machine_lacks_is_not_held_against_a_specimen(lacking, monkeypatch):
    monkeypatch.setattr(inductor, "installed", lambda name: None if name == lacking else "1")
    row = measure_semantics("printing", INDUCTOR)
    assert row == {"specimen": "printing", "way": INDUCTOR, "status": f"not installed: {lacking}"}
    rows = experiments.semantics.rows({"specimen": "printing"})
    statuses = {row["way"]: row["status"] for row in rows}
    assert statuses.pop(INDUCTOR) == f"not installed: {lacking}"
    assert set(statuses.values()) == {"ok"}


def test_a_call_that_torch_does_not_warn_of_is_not_deprecated(monkeypatch):
    monkeypatch.setattr(successor, "_ANNOUNCE", ())
    (row,) = experiments.deprecations.configurations("big-gpu")
    assert {found["deprecated"] for found in experiments.deprecations.rows(row)} == {"no"}


def test_a_break_names_the_line_and_counts_the_graphs():
    row = measure_semantics("branch on data", COMPILE)
    assert (row["graphs"], row["breaks"], row["recompiles"]) == (2, 1, 0)
    assert row["line"] == "if x.sum() < 0:"


def test_a_recompilation_says_which_guard_failed():
    row = measure_semantics("string argument", FULLGRAPH)
    assert (row["graphs"], row["breaks"], row["recompiles"]) == (1, 0, 1)
    assert "how ==" in row["said"]


@pytest.mark.parametrize(
    ("specimen", "way", "line"),
    [
        ("branch on data", EXPORT, "if x.sum() < 0:"),
        ("branch on data", FX, "if x.sum() < 0:"),
        ("branch on data", FULLGRAPH, "if x.sum() < 0:"),
        ("loop on data", EXPORT, "while x.abs().max() > 1:"),
        ("c call", SCRIPT, "return len(zlib.compress(x.numpy().tobytes()))"),
        ("c call", EXPORT, "return len(zlib.compress(x.numpy().tobytes()))"),
    ],
)
def test_a_refusal_names_the_line_of_code(specimen, way, line):
    row = measure_semantics(specimen, way)
    assert (row["outcome"], row["when"], row["line"]) == (REFUSES, "capture", line)
    assert row["said"]
    assert "\n" not in row["said"]


def test_a_graph_of_one_size_is_refused_another_when_it_is_called():
    assert measure_semantics("branch on shape", EXPORT)["when"] == "call"


def test_a_row_is_the_same_when_measured_again():
    for specimen, way in (("branch on data", TRACE), ("dataclass output", TRACE), ("c call", FX), ("item", EXPORT)):
        assert measure_semantics(specimen, way) == measure_semantics(specimen, way)


def test_measuring_leaves_nothing_behind(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    state = sys.stdout, logging.root.manager.disable
    random = torch.get_rng_state()
    for way in (TRACE, EXPORT, COMPILE):
        measure_semantics("branch on data", way)
    assert os.listdir(tmp_path) == []
    assert (sys.stdout, logging.root.manager.disable) == state
    assert torch.equal(torch.get_rng_state(), random)
    assert tuple(capfd.readouterr()) == ("", "")
    assert torch._dynamo.utils.get_compilation_metrics() == []


@pytest.mark.parametrize("specimen", SPECIMENS)
def test_the_other_arguments_do_something_that_a_frozen_example_would_not(specimen):
    """Every specimen's second call differs from its first, or the specimen could tell nothing."""
    case = SPECIMENS[specimen]()
    first, second = semantics._calls(case, case.fn)
    assert first.same(second) == (specimen == "random numbers")  # which are the same after the same seed


@pytest.mark.parametrize("specimen", [name for name, make in SPECIMENS.items() if make().repaired])
def test_a_repaired_specimen_computes_the_same(specimen):
    plain, repaired = SPECIMENS[specimen](), SPECIMENS[specimen]()
    expected, found = semantics._calls(plain, plain.fn), semantics._calls(repaired, repaired.repaired)
    assert all(f.same(e) for f, e in zip(found, expected, strict=True))


def test_sameness_asks_for_kind_and_values():
    one = torch.ones(2)
    assert same({"a": [one, 1]}, {"a": [one.clone(), 1]})
    assert not same((one,), [one])
    assert not same(one, one.double())
    assert not same(one, one[None])
    assert not same({"a": one}, {"a": one, "b": one})
    assert not same(specimens.Statistics(one, one), specimens.Statistics(one, -one))
    assert same(torch.tensor(float("nan")), torch.tensor(float("nan")))


def test_the_unknown_is_named():
    with pytest.raises(ValueError, match=r"specimen is 'nothing'; there are: branch on data"):
        measure_semantics("nothing", TRACE)
    with pytest.raises(ValueError, match=r"way is 'torch.jit'; of 'item' there are: torch.jit.trace"):
        measure_semantics("item", "torch.jit")
    assert REPAIRED not in semantics.ways("item")
    assert REPAIRED in semantics.ways("loop on data")


def test_torchscript_announces_its_end_in_every_call():
    rows = successor.deprecations()
    assert {row["call"] for row in rows} == set(successor.SUCCESSORS)
    assert all(row["deprecated"] and row["call"] in row["said"] for row in rows)


def test_an_exported_program_survives_its_bytes_with_both_branches_and_any_batch():
    rows = successor.round_trip(batches=(1, 5))
    assert [(row["batch"], row["branch"]) for row in rows] == [(1, "h * 2"), (1, "-h"), (5, "h * 2"), (5, "-h")]
    assert all(row["agrees"] for row in rows)


def test_a_function_keeps_its_signature_as_a_module():
    module = capture.as_module(lambda x, how: x + how)
    assert module(1, 2) == 3
    assert list(inspect.signature(module.forward).parameters) == ["x", "how"]
    assert capture.as_module(module) is module
