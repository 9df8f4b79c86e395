"""What is tried first, by the profile's account and findings."""

from types import SimpleNamespace

import pytest

from helpers.trying import search
from helpers.trying.answer import Result
from helpers.trying.sides import Side, Trial

PARTS = {"operators": 0.8, "optimizer": 0.1, "Python": 0.1}
APPLYING = ("matmul-precision", "not-deterministic", "attention", "optimizer", "compile", "same-batch", "allocator")


def order(parts: dict, **found: float) -> list[str]:
    """The changes that apply, by what they promise, with these findings."""
    findings = [
        SimpleNamespace(finding=name.replace("_", " "), gain_share=share, where="") for name, share in found.items()
    ]
    one = SimpleNamespace(result=Result("train.py", findings=findings), parts=parts)
    promises = {name: search._promise(one, name, APPLYING)[0] for name in APPLYING}
    return sorted(promises, key=lambda name: -promises[name])


@pytest.mark.parametrize(
    ("finding", "first"),
    [
        ("fp32_products", "matmul-precision"),
        ("attention_from_matmul_and_softmax", "attention"),
        ("unfused_optimizer", "optimizer"),
        ("waiting_for_the_loader", "same-batch"),  # as no option of a loader applies
    ],
)
def test_what_the_largest_finding_asks_for_is_first(finding, first):
    assert order(PARTS, **{finding: 0.5, "small_operators": 0.3})[0] == first


def test_what_the_script_itself_switches_on_goes_before_what_no_finding_asks_for():
    others = order(PARTS)
    assert others.index("not-deterministic") < others.index("matmul-precision") < others.index("compile")


def test_without_a_profile_what_the_source_shows_goes_before_what_any_script_could_have():
    assert order({})[0] == "attention"


@pytest.mark.parametrize(("left", "goes_on"), [(11.0, True), (9.0, False)])
def test_a_trial_goes_on_if_another_start_can_hold_half_as_many_pairs_else_the_next_change_is_tried(left, goes_on):
    known = Trial(Side(["train.py"]), Side(["train.py"], ["attention"]), starts=[[-0.3, 0.1, -0.2, 0.2]], seconds=16.0)
    new = Trial(Side(["train.py"]), Side(["train.py"], ["optimizer"]), promise=0.1)
    one = SimpleNamespace(result=Result("train.py"), left=left, start_s=4.0, least_s=6.0)
    assert search._next(one, [known, new]) is (known if goes_on else new)
