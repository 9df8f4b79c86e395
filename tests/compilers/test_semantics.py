"""What each variant makes of functions that are hard to capture. The outcomes hold for torch 2.11 and 2.13."""

import logging
import os
import sys

import pytest
import torch

from helpers.chapters import compilers
from helpers.compilers import semantics
from helpers.compilers.capture import DYNAMO, EXPORT, FX, INDUCTOR, SCRIPT, TRACE
from helpers.compilers.capture_cases import CASES
from helpers.compilers.semantics import BREAKS, RECOMPILES, REFUSES, RIGHT, SILENT, WARNED, measure_semantics, same
from helpers.lab import machine

EXPECTED = {
    "branch on data": {TRACE: WARNED, SCRIPT: RIGHT, FX: REFUSES, EXPORT: REFUSES},
    "branch on shape": {TRACE: WARNED, SCRIPT: RIGHT, FX: REFUSES, EXPORT: REFUSES},
    "branch on dtype": {TRACE: SILENT, SCRIPT: RIGHT, FX: REFUSES, EXPORT: SILENT},
    "loop on data": {TRACE: WARNED, SCRIPT: RIGHT, FX: REFUSES, EXPORT: REFUSES},
    "item": {TRACE: WARNED, SCRIPT: RIGHT, FX: RIGHT, EXPORT: RIGHT},
    "printing": {TRACE: SILENT, SCRIPT: RIGHT, FX: SILENT, EXPORT: SILENT},
    "appending to a list": {TRACE: SILENT, SCRIPT: REFUSES, FX: SILENT, EXPORT: SILENT},
    "counting in an attribute": {TRACE: REFUSES, SCRIPT: RIGHT, FX: SILENT, EXPORT: SILENT},
    "reading a setting": {TRACE: SILENT, SCRIPT: REFUSES, FX: SILENT, EXPORT: SILENT},
    "changing its input": {TRACE: RIGHT, SCRIPT: RIGHT, FX: RIGHT, EXPORT: RIGHT},
    "numpy call": {TRACE: WARNED, SCRIPT: REFUSES, FX: REFUSES, EXPORT: REFUSES},
    "c call": {TRACE: WARNED, SCRIPT: REFUSES, FX: REFUSES, EXPORT: REFUSES},
    "dropout mode": {TRACE: WARNED, SCRIPT: RIGHT, FX: RIGHT, EXPORT: REFUSES},
    "random numbers": {TRACE: RIGHT, SCRIPT: RIGHT, FX: RIGHT, EXPORT: RIGHT},
    "string argument": {TRACE: REFUSES, SCRIPT: RIGHT, FX: REFUSES, EXPORT: REFUSES},
}
BY_DYNAMO = {
    "branch on data": BREAKS,
    "branch on shape": RECOMPILES,
    "printing": RIGHT,
    "reading a setting": RECOMPILES,
    "numpy call": RIGHT,
    "string argument": RECOMPILES,
}


@pytest.mark.parametrize("case", CASES)
def test_a_variant_is_right_or_wrong_about_a_case(case):
    assert {variant: measure_semantics(case, variant)["outcome"] for variant in EXPECTED[case]} == EXPECTED[case]


@pytest.mark.parametrize("case", BY_DYNAMO)
def test_dynamo_goes_on_in_python_where_it_may_and_captures_anew_where_a_guard_fails(case):
    assert measure_semantics(case, DYNAMO)["outcome"] == BY_DYNAMO[case]


@pytest.mark.usefixtures("compiler")
def test_inductor_generates_code_for_what_dynamo_captures():
    assert measure_semantics("branch on shape", INDUCTOR)["outcome"] == RECOMPILES


def test_what_a_machine_lacks_is_not_held_against_a_case(monkeypatch):
    monkeypatch.setattr(machine, "installed", lambda name: None if name == "Python.h" else "1")
    status = {row["variant"]: row["status"] for row in compilers.semantics.rows({"case": "printing"})}
    assert status.pop(INDUCTOR) == "not installed: Python.h"
    assert set(status.values()) == {"ok"}


def test_measuring_leaves_nothing_behind(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    state = sys.stdout, logging.root.manager.disable
    random = torch.get_rng_state()
    for variant in (TRACE, EXPORT, DYNAMO):
        measure_semantics("branch on data", variant)
    assert os.listdir(tmp_path) == []
    assert (sys.stdout, logging.root.manager.disable) == state
    assert torch.equal(torch.get_rng_state(), random)
    assert tuple(capfd.readouterr()) == ("", "")
    assert torch._dynamo.utils.get_compilation_metrics() == []


@pytest.mark.parametrize("name", CASES)
def test_a_cases_second_call_differs_from_its_first(name):
    """A case whose calls were the same could not tell a frozen example from the function."""
    case = CASES[name]()
    calls = semantics._calls(case, case.fn)
    assert same(*calls) == (name == "random numbers")  # which are the same after the same seed


def test_sameness_asks_for_kind_and_values():
    one = torch.ones(2)
    assert same([one, 1], [one.clone(), 1])
    assert same(torch.tensor(float("nan")), torch.tensor(float("nan")))
    for other, than in (((one,), [one]), (one, one.double()), (one, one[None]), ([one, one], [one, -one])):
        assert not same(other, than)


def test_the_unknown_is_named():
    with pytest.raises(ValueError, match=r"case is 'nothing'; valid: 'branch on data'"):
        measure_semantics("nothing", TRACE)
    with pytest.raises(ValueError, match=r"variant is 'torch.jit'; valid: 'torch.jit.trace'"):
        measure_semantics("item", "torch.jit")
