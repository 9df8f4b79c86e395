"""Of a stack: the user's lines, and whether a checkpoint or a backward pass is around them."""

import sys

import torch
from torch.utils.checkpoint import checkpoint

from helpers.guard.places import walk


def test_lines_in_a_checkpoint_and_in_a_backward_pass_are_told_from_those_around_them():
    walked = []

    def layer(x):
        walked.append(walk(sys._getframe()))
        return x.sin()

    def names(chain):
        return [line - layer.__code__.co_firstlineno for file, line in chain if file == __file__]

    x = torch.randn(4, requires_grad=True)
    layer(x)
    checkpoint(layer, x, use_reentrant=False).sum().backward()
    plain, forward, again = walked
    assert names(plain[0])[-1] == 1 and plain[1] == plain[0] and plain[2:4] == (False, False)
    assert names(forward[0])[-1] == 1 and len(forward[1]) < len(forward[0]) and forward[2:4] == (False, True)
    assert names(again[0])[-1] == 1 and len(again[1]) < len(again[0]) and again[2:4] == (True, True)
