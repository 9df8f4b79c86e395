"""The experiments themselves, on the small preset: what they measure is what they say."""

import pytest
import torch

from helpers.chapters import swiglu
from helpers.chapters.swiglu import derived_costs as costs
from helpers.chapters.swiglu import layers as variants
from helpers.chapters.swiglu.ceilings import LAUNCH, PAGEABLE, PINNED
from helpers.lab import Disagreement
from helpers.lab.machine import installed
from helpers.swiglu import MemoryOptimizedSwigluMLPFunction


def test_the_sweep_measures_each_level():
    for config in swiglu.sweep.configurations("small")[:4]:
        (row,) = swiglu.sweep.rows(config)
        assert row["n"] >= 20 and row["peak_gib"] > 0
        assert 0 < row["forward_p20_s"] <= row["forward_s"] <= row["forward_p80_s"]


def test_a_level_that_computes_something_else_is_not_timed(monkeypatch):
    right = MemoryOptimizedSwigluMLPFunction.backward

    def wrong(ctx, l):
        dx, *others = right(ctx, l)
        return dx * 1.01, *others

    monkeypatch.setattr(MemoryOptimizedSwigluMLPFunction, "backward", staticmethod(wrong))
    with pytest.raises(Disagreement):
        variants.check_layer(16, 32, "float32", level=1)


def test_peers_are_compared_in_one_run_and_a_missing_one_says_so(monkeypatch):
    def broken(module):
        raise RuntimeError("cannot compile\nbecause")

    monkeypatch.setitem(variants.VARIANTS, variants.CHECKPOINT, broken)
    monkeypatch.setattr(variants, "compiled_apart", lambda module: module)
    config = swiglu.peers.configurations("small")[0]
    rows = {row["variant"]: row for row in swiglu.peers.rows(config)}
    assert list(rows) == list(variants.VARIANTS)
    assert rows[variants.CHECKPOINT]["status"] == "failed: RuntimeError: cannot compile"
    if installed(variants.LIGER) is None:
        assert rows[variants.LIGER]["status"] == "not installed: liger-kernel"
    assert rows[variants.PLAIN]["ratio_to_plain"] == 1.0
    hidden, intermediate = config["hidden_dim"], config["intermediate_size"]
    for variant in (variants.PLAIN, *(f"{variants.OURS}{level}" for level in range(4))):
        derived = costs.derived(variant, hidden, intermediate, 4)
        assert rows[variant]["saved_ratio"] == pytest.approx(derived.saved_ratio, rel=1e-3)


@pytest.mark.long
def test_an_error_of_ours_is_not_hidden_in_a_row(monkeypatch):
    def broken(module):
        raise RuntimeError("ours")

    for name in (variants.COMPILED, variants.BUDGET, f"{variants.OURS}2"):
        monkeypatch.setitem(variants.VARIANTS, name, broken)
    with pytest.raises(RuntimeError, match="ours"):
        swiglu.peers.measure(**swiglu.peers.configurations("small")[0])


def test_each_kind_of_ceiling_has_its_rate_and_a_type_that_the_machine_lacks_says_so():
    kinds = {config["ceiling"]: config for config in swiglu.ceilings.configurations("big-gpu")}
    sizes = {"matmul": 64, "copy": 1, PINNED: 1, PAGEABLE: 1, LAUNCH: 8}
    for name in kinds.keys() - ({PINNED} if not torch.cuda.is_available() else set()):
        (row,) = swiglu.ceilings.rows(kinds[name] | {"size": sizes[name], "dtype": "float32"})
        rate = {"matmul": "tflops", LAUNCH: "median_ms"}.get(name, "gb_per_s")
        assert row["status"] == "ok" and row[rate] > 0
    if not torch.cuda.is_available():
        (row,) = swiglu.ceilings.rows({"ceiling": "matmul", "dtype": "tf32", "size": 64})
        assert "CUDA" in row["status"]
