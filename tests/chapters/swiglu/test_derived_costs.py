"""What is derived against what can be counted."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from helpers.chapters.swiglu import derived_costs as costs
from helpers.chapters.swiglu import layers as variants
from helpers.lab import saved_bytes
from helpers.swiglu import LEVELS, MemoryOptimizedSwigluMLP, SwigluMLP

UNCOMPILED = [variants.PLAIN, variants.CHECKPOINT, *(f"{variants.OURS}{level}" for level in LEVELS)]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(max_examples=10, deadline=None)
@given(tokens=st.integers(1, 50), hidden=st.integers(1, 30), intermediate=st.integers(1, 70))
def test_a_level_keeps_exactly_the_derived_bytes(level, dtype, tokens, hidden, intermediate):
    layer = MemoryOptimizedSwigluMLP(hidden, intermediate, level, dtype=dtype)
    x = torch.randn(tokens, hidden, dtype=dtype, requires_grad=True)
    counted = saved_bytes(lambda: layer(x), without=layer.parameters())
    assert counted == costs.saved_bytes(level, tokens, hidden, intermediate, dtype.itemsize)


@pytest.mark.parametrize("variant", UNCOMPILED)
def test_products_and_saved_bytes_of_a_variant_are_counted(variant):
    tokens, hidden, intermediate = 128, 6, 64
    forward, owner = variants.VARIANTS[variant](SwigluMLP(hidden, intermediate))
    x = torch.randn(tokens, hidden, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        forward(x).sum().backward()
    derived = costs.derived(variant, hidden, intermediate, 4)
    assert counter.get_total_flops() == derived.products * 2 * tokens * hidden * intermediate
    assert saved_bytes(lambda: forward(x), without=owner.parameters()) == derived.saved_per_token * tokens


@pytest.mark.parametrize(
    ("frozen", "products"), [("", 9), ("W", 8), ("WV", 7), ("U", 8), ("WVU", 6), ("x", 7), ("xW", 6), ("xWV", 4)]
)
def test_nothing_is_multiplied_for_gradients_that_nobody_needs(frozen, products):
    layer = MemoryOptimizedSwigluMLP(6, 10, 2)
    x = torch.randn(8, 6, requires_grad="x" not in frozen)
    for name in set(frozen) - {"x"}:
        getattr(layer, name).requires_grad_(False)
    with FlopCounterMode(display=False) as counter:
        layer(x).sum().backward()
    assert counter.get_total_flops() == products * 2 * 8 * 6 * 10
