"""A clock that stands still unless a module moves it, for exact tests of the profiler, and modules that move it."""

import warnings

import torch
from torch import nn


class VirtualClock:
    """`lab.timing.clock` of a machine whose time stands still unless it is spent. `now` is in nanoseconds."""

    now = 0

    def __init__(self, device):
        assert device.type == "cpu"

    def __call__(self):
        return VirtualClock.now / 1e9


def spend(ms):
    VirtualClock.now += round(ms * 1e6)


class _SpendInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, ms):
        ctx.ms = ms
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        spend(ctx.ms)
        return gradient, None


class Spender(nn.Module):
    """Multiplies by a weight; takes so many milliseconds forward and backward."""

    def __init__(self, forward_ms=0.0, backward_ms=0.0):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.forward_ms, self.backward_ms = forward_ms, backward_ms

    def forward(self, x):
        spend(self.forward_ms)
        return spend_in_backward(x * self.weight, self.backward_ms)


def spend_in_backward(x, ms):
    """x, by an operation whose backward takes so long."""
    return _SpendInBackward.apply(x, ms)


def plan(wait, warmup, active, repeat=1):
    """torch's schedule, without its warning that times are off where nothing warms up."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.profiler.schedule(wait=wait, warmup=warmup, active=active, repeat=repeat)
