"""What each variant makes of functions that are hard to capture. The outcomes hold for torch 2.11 and 2.13."""

import logging
import os
import sys

import pytest
import torch
import torch.nn.functional as F

from helpers.compilers.capture import DYNAMO, EXPORT, FX, SCRIPT, TRACE, VARIANTS
from helpers.compilers.semantics import REFUSES, RIGHT, SILENT, WARNED, Case, outcome, same


def branch(x):
    if x.sum() < 0:
        return -x
    return x * 2


def noisy(x):
    print("called")
    return x + 1


def doubled(x):
    x.mul_(2)
    return x.sum()


def noised(x):
    return x + F.dropout(torch.rand_like(x), 0.5)


CASES = {
    "branch on data": (branch, (torch.ones(3),), (-torch.ones(3),)),
    "printing": (noisy, (torch.zeros(2),), (torch.ones(2),)),
    "changing its input": (doubled, (torch.ones(2),), (torch.full((2,), 3.0),)),
    "random numbers": (noised, (torch.zeros(8),), (torch.zeros(8),)),
}
EXPECTED = {
    "branch on data": {TRACE: WARNED, SCRIPT: RIGHT, FX: REFUSES, EXPORT: REFUSES, DYNAMO: RIGHT},
    "printing": {TRACE: SILENT, SCRIPT: RIGHT, FX: SILENT, EXPORT: SILENT, DYNAMO: RIGHT},
    "changing its input": {TRACE: RIGHT, SCRIPT: RIGHT, FX: RIGHT, EXPORT: RIGHT, DYNAMO: RIGHT},
    "random numbers": {TRACE: RIGHT, SCRIPT: RIGHT, FX: RIGHT, EXPORT: RIGHT, DYNAMO: RIGHT},
}


@pytest.mark.parametrize("case", CASES)
def test_a_variant_is_right_or_wrong_about_a_case(case):
    found = {variant: outcome(lambda: Case(*CASES[case]), VARIANTS[variant]) for variant in EXPECTED[case]}
    assert found == EXPECTED[case]


def test_an_outcome_leaves_nothing_behind(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    state = sys.stdout, logging.root.manager.disable
    random = torch.get_rng_state()
    for variant in (TRACE, EXPORT, DYNAMO):
        outcome(lambda: Case(*CASES["branch on data"]), VARIANTS[variant])
    assert os.listdir(tmp_path) == []
    assert (sys.stdout, logging.root.manager.disable) == state
    assert torch.equal(torch.get_rng_state(), random)
    assert tuple(capfd.readouterr()) == ("", "")
    assert torch._dynamo.utils.get_compilation_metrics() == []


def test_sameness_asks_for_kind_and_values():
    one = torch.ones(2)
    assert same([one, 1], [one.clone(), 1])
    assert same(torch.tensor(float("nan")), torch.tensor(float("nan")))
    for other, than in (((one,), [one]), (one, one.double()), (one, one[None]), ([one, one], [one, -one])):
        assert not same(other, than)
