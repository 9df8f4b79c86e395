"""What each variant makes of functions that are hard to capture. The outcomes hold for torch 2.11 and 2.13."""

import logging
import os
import sys

import pytest
import torch

from helpers.compilers import capture_cases, semantics
from helpers.compilers.capture import COMPILE, EXPORT, FULLGRAPH, FX, INDUCTOR, REPAIRED, SCRIPT, STRICT, TRACE
from helpers.compilers.capture_cases import CASES
from helpers.compilers.semantics import BREAKS, RECOMPILES, REFUSES, RIGHT, SILENT, WARNED, measure_semantics, same
from helpers.experiments import compilers as experiments
from helpers.lab import machine

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


@pytest.mark.parametrize("case", CASES)
def test_a_variant_is_right_or_wrong_about_a_case(case):
    assert {variant: measure_semantics(case, variant)["outcome"] for variant in EXPECTED[case]} == EXPECTED[case]


@pytest.mark.parametrize(("case", "variant"), BY_DYNAMO)
def test_dynamo_goes_on_in_python_where_it_may(case, variant):
    assert measure_semantics(case, variant)["outcome"] == BY_DYNAMO[case, variant]


@pytest.mark.parametrize("lacking", ["C++ compiler", "Python.h"])
def test_what_a_machine_lacks_is_not_held_against_a_case(lacking, monkeypatch):
    monkeypatch.setattr(machine, "installed", lambda name: None if name == lacking else "1")
    status = {row["variant"]: row["status"] for row in experiments.semantics.rows({"case": "printing"})}
    assert status.pop(INDUCTOR) == f"not installed: {lacking}"
    assert set(status.values()) == {"ok"}


@pytest.mark.parametrize(
    ("case", "variant", "counts"),
    [("branch on data", COMPILE, (2, 1, 0)), ("string argument", FULLGRAPH, (1, 0, 1))],
)
def test_breaks_and_recompilations_are_counted(case, variant, counts):
    row = measure_semantics(case, variant)
    assert (row["graphs"], row["breaks"], row["recompiles"]) == counts
    assert row["line"] == "if x.sum() < 0:" if variant == COMPILE else "how ==" in row["message"], "the guard"


@pytest.mark.parametrize(
    ("case", "variant", "line"),
    [
        ("branch on data", EXPORT, "if x.sum() < 0:"),
        ("branch on data", FX, "if x.sum() < 0:"),
        ("branch on data", FULLGRAPH, "if x.sum() < 0:"),
        ("loop on data", EXPORT, "while x.abs().max() > 1:"),
        ("c call", SCRIPT, "return len(zlib.compress(x.numpy().tobytes()))"),
        ("c call", EXPORT, "return len(zlib.compress(x.numpy().tobytes()))"),
    ],
)
def test_a_refusal_names_the_line_of_code(case, variant, line):
    row = measure_semantics(case, variant)
    assert (row["outcome"], row["when"], row["line"]) == (REFUSES, "capture", line)
    assert row["message"]
    assert "\n" not in row["message"]


def test_a_graph_of_one_size_refuses_another_when_it_is_called():
    assert measure_semantics("branch on shape", EXPORT)["when"] == "call"


def test_a_row_is_the_same_when_measured_again():
    for case, variant in (("branch on data", TRACE), ("dataclass output", TRACE), ("c call", FX), ("item", EXPORT)):
        assert measure_semantics(case, variant) == measure_semantics(case, variant)


def test_measuring_leaves_nothing_behind(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    state = sys.stdout, logging.root.manager.disable
    random = torch.get_rng_state()
    for variant in (TRACE, EXPORT, COMPILE):
        measure_semantics("branch on data", variant)
    assert os.listdir(tmp_path) == []
    assert (sys.stdout, logging.root.manager.disable) == state
    assert torch.equal(torch.get_rng_state(), random)
    assert tuple(capfd.readouterr()) == ("", "")
    assert torch._dynamo.utils.get_compilation_metrics() == []


@pytest.mark.parametrize("name", CASES)
def test_a_cases_second_call_differs_from_its_first_and_its_repaired_version_from_neither(name):
    """A case whose calls were the same could not tell a frozen example from the function."""
    case = CASES[name]()
    calls = semantics._calls(case, case.fn)
    assert calls[0].same(calls[1]) == (name == "random numbers")  # which are the same after the same seed
    if case.repaired:
        case = CASES[name]()
        assert all(r.same(c) for r, c in zip(semantics._calls(case, case.repaired), calls, strict=True))


def test_sameness_asks_for_kind_and_values():
    one = torch.ones(2)
    assert same({"a": [one, 1]}, {"a": [one.clone(), 1]})
    assert same(torch.tensor(float("nan")), torch.tensor(float("nan")))
    statistics = capture_cases.Statistics
    for other, than in (
        ((one,), [one]),
        (one, one.double()),
        (one, one[None]),
        ({"a": one}, {"a": one, "b": one}),
        (statistics(one, one), statistics(one, -one)),
    ):
        assert not same(other, than)


def test_the_unknown_is_named():
    with pytest.raises(ValueError, match=r"case is 'nothing'; valid: 'branch on data'"):
        measure_semantics("nothing", TRACE)
    with pytest.raises(ValueError, match=r"variant is 'torch.jit'; valid: 'torch.jit.trace'"):
        measure_semantics("item", "torch.jit")
    assert REPAIRED not in semantics.variants("item")
    assert REPAIRED in semantics.variants("loop on data")


def test_torchscript_announces_its_end_in_every_call_and_what_is_not_announced_is_not_deprecated(monkeypatch):
    rows = semantics.deprecations()
    assert {row["call"] for row in rows} == set(semantics.SUCCESSORS)
    assert all(row["deprecated"] == "yes" and row["call"] in row["message"] for row in rows)
    monkeypatch.setattr(semantics, "_ANNOUNCE", ())
    assert {row["deprecated"] for row in semantics.deprecations()} == {"no"}


def test_an_exported_program_survives_its_bytes_with_both_branches_and_any_batch():
    rows = semantics.round_trip(batches=(1, 5))
    assert [(row["batch"], row["branch"]) for row in rows] == [(1, "h * 2"), (1, "-h"), (5, "h * 2"), (5, "-h")]
    assert all(row["agrees"] for row in rows)
