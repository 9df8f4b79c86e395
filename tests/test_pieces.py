"""A stub raises until its exercise's solution is used, and is that solution from then on."""

import pytest
import torch
from torch import nn

from helpers.pieces import cut, use


@cut("Doubled")
class Scaled:
    """What the library has."""


class Shifted(Scaled):
    def forward(self, x):
        return super().forward(x) + 1


@cut("Squared")
class Function(torch.autograd.Function):
    """A function of autograd."""


@cut("joined")
def collate(batch, pad_id=0):
    """A function."""


class Doubled(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.factor = nn.Parameter(torch.full((width,), 2.0))

    def forward(self, x):
        return self.factor * x


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * ctx.saved_tensors[0] * grad


def joined(batch):
    return batch[0] + batch[1]


def test_a_stub_raises_until_its_solution_is_used():
    x = torch.tensor([3.0], requires_grad=True)
    for name, call in {
        "Doubled": lambda: Scaled(1),
        "Squared": lambda: Function.apply(x),
        "joined": lambda: collate([[1]], pad_id=3),
    }.items():
        with pytest.raises(NotImplementedError, match=f"solve {name}, then"):
            call()
    use(Doubled, Squared, joined)
    assert Scaled(1)(x).item() == 6 and Shifted(1, seed=0)(x).item() == 7 and isinstance(Shifted(1), Doubled)
    (grad,) = torch.autograd.grad(Function.apply(x), x)
    assert grad.item() == 6
    assert collate([[1], [2]], pad_id=3) == [1, 2]


@cut("InOrder")
class Stream(torch.utils.data.IterableDataset):
    """A class whose base has an abstract method."""


class InOrder(torch.utils.data.IterableDataset):
    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return iter(range(self.count))


def test_a_solution_gives_what_is_abstract_in_the_stubs_base():
    use(InOrder)
    assert list(Stream(3)) == [0, 1, 2]
