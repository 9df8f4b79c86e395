import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from profiling_cases import VirtualClock, plan, spend, spend_in_backward
from torch import nn
from torch.utils.checkpoint import checkpoint

from helpers.profiling import module_profiler
from helpers.profiling.module_profiler import ModuleProfiler


@pytest.fixture(autouse=True)
def _time_stands_still_unless_spent(monkeypatch):
    monkeypatch.setattr(module_profiler, "clock", VirtualClock)


WARMED = plan(0, 1, 1)


class Tree(nn.Module):
    """Runs a plan: a number spends that many milliseconds, in forward and backward; a tree is a module that is called.

    What comes back is added to what went in now and then, so that gradients flow around modules.
    """

    def __init__(self, plan, checkpointed=False):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.plan, self.checkpointed = plan, checkpointed
        self.children_ = nn.ModuleList(Tree(part[1], part[0]) for part in plan if not isinstance(part, int))

    def forward(self, x):
        children = iter(self.children_)
        x = x * self.weight
        for place, part in enumerate(self.plan):
            if isinstance(part, int):
                spend(part)
                x = spend_in_backward(x, 2 * part)
            else:
                child = next(children)
                y = checkpoint(child, x, use_reentrant=False) if child.checkpointed else child(x)
                x = x + y if place % 2 else y
        return x

    def total_ms(self):
        """What it spends in forward, with what it calls."""
        return sum(part for part in self.plan if isinstance(part, int)) + sum(c.total_ms() for c in self.children_)

    def computed_again_ms(self, checkpoints=0):
        """At most what checkpointing computes again in it, as `checkpoint` stops at the last tensor that it needs."""
        checkpoints += self.checkpointed
        own = sum(part for part in self.plan if isinstance(part, int))
        return checkpoints * own + sum(child.computed_again_ms(checkpoints) for child in self.children_)


plans = st.recursive(
    st.lists(st.integers(1, 9), max_size=3),
    lambda inner: st.lists(st.integers(1, 9) | st.tuples(st.booleans(), inner), max_size=4),
    max_leaves=8,
)


@settings(deadline=None, max_examples=40)
@given(plan=plans, leaf=st.booleans())
def test_spans_nest_and_times_are_exact_whatever_calls_what(plan, leaf):
    model, x = Tree(plan), torch.ones(2, requires_grad=True)
    x = x if leaf else x.exp()
    with ModuleProfiler(model, "net", WARMED) as profiler:
        for _ in range(2):
            spend(3)
            model(x).sum().backward(retain_graph=not leaf)
            spend(4)
            profiler.step()
    table = profiler.summary().set_index("module")
    above = {"net": 0}  # checkpointed modules around each
    for name, module in model.named_modules():
        path = f"net.{name}" if name else "net"
        if isinstance(module, Tree):
            checkpoints = above[path]
            above |= {f"{path}.children_.{n}": checkpoints + module.checkpointed for n in range(len(module.children_))}
            row = table.loc[path]
            assert row.calls == 1
            assert row.forward_ms == pytest.approx(module.total_ms())
            again = row.backward_ms - 2 * module.total_ms()
            assert -1e-6 <= again <= module.computed_again_ms(checkpoints) + 1e-6
    assert table.self_ms.drop("step").sum() == pytest.approx(table.self_ms["step"])
    assert table.total_ms["outside"] == pytest.approx(7)
