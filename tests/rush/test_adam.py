"""The ways of Adam take the same step."""

import pytest
import torch

from helpers.lab.machine import NOT_INSTALLED, installed
from helpers.lab.timing import check_agreement
from helpers.rush import adam

CPU = torch.device("cpu")


def data(steps=3):
    params = [torch.randn(shape) for shape in ((5, 7), (3,), (1030,))]
    return params, [[torch.randn_like(p) for p in params] for _ in range(steps)]


def test_all_ways_compute_the_same():
    params, gradients = data()
    ways = [way for way in adam.WAYS if way != adam.APEX]  # ours leaves the work to torch's here

    def run(way):
        return lambda: adam.updated(way, params, gradients, lr=1e-2, weight_decay=0.1)

    errors = check_agreement({way: run(way) for way in ways}, 1e-6)
    assert list(errors) == ways
    assert any(not torch.equal(p, q) for p, q in zip(params, adam.updated("fused", params, gradients), strict=True))


def test_steps_work_on_the_same_parameters_with_moments_of_their_own():
    params = [p.requires_grad_() for p in data()[0]]
    for p in params:
        p.grad = torch.ones_like(p)
    ways = adam.steps(params, ("for-loop", "fused", "triton"), lr=0.5, weight_decay=0.0)
    assert list(ways) == ["for-loop", "fused"]  # ours needs CUDA to be ours
    before = [p.detach().clone() for p in params]
    for step in ways.values():
        step()
    # A first step of Adam is the learning rate.
    for p, old in zip(params, before, strict=True):
        torch.testing.assert_close(p, old - 1.0)


def test_what_a_machine_lacks_is_told():
    assert adam.obstacle("fused", CPU) == ""
    assert adam.obstacle("triton", CPU) in ("needs CUDA", NOT_INSTALLED + "triton")
    if installed("apex") is None:
        assert adam.obstacle("apex", CPU) == NOT_INSTALLED + "apex"


def test_an_unknown_way_is_named():
    with pytest.raises(ValueError, match="way is 'sgd'; allowed: 'for-loop', "):
        adam.adamw("sgd", [])
