"""Chapter 5's tables of one file each: from configurations to rows, and from rows to numbers."""

import dataclasses
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

from helpers.chapters.rush.checkpointing import checkpointing
from helpers.chapters.rush.device_time import IDLE, KINDS, PRODUCTS, device_time, profiled
from helpers.chapters.rush.without import without
from helpers.rush import Setup
from helpers.rush.rates import flops_per_token
from helpers.rush.setup import START


def test_full_checkpointing_is_compared_at_the_longest_length_that_most_kinds_fit():
    sizes = {("none", 512): 4.0, ("full", 512): 2.0, ("none", 2048): 8.0, ("full", 2048): 4.0, ("full", 8192): 9.0}
    rows = [{"checkpointing": k, "sequence": n, "tokens_per_s": 10 * g, "peak_gib": g} for (k, n), g in sizes.items()]
    named = checkpointing.of_rows(pd.DataFrame(rows))
    assert (named.length, f"{named.memory}") == (2048, "50%")
    assert named.lengths["tokens/s at 8192"].isna().tolist() == [True, False]
    assert f"{named.short} at {named.shortest}" == "50% at 512" and not named.selective.measured
    selective = {"checkpointing": "selective", "sequence": 2048, "tokens_per_s": 60.0, "peak_gib": 4.0}
    among = checkpointing.of_rows(pd.DataFrame([*rows, selective]))
    assert f"{among.selective:bare} {among.selective_memory}" == "1.50× 1.00×"
    rows[3] |= {"baseline": "none", "ratio": 1.25, "low": 1.2, "high": 1.3, "pairs": 16}
    assert f"{checkpointing.of_rows(pd.DataFrame(rows)).speed}" == "80% (77 to 83, 16 pairs)"


ROW = {"model": "tiny", "sequence": 64, "batch": 8, "mfu": 0.5, "matmul_share": 0.7, "peak_gib": 10.0, "loss": 8.44}
TRIAL = {"low": 1.4, "high": 1.6, "pairs": 8}


def test_a_changes_gain_is_what_the_best_setup_loses_without_it():
    rows = [
        ROW | {"without": "the best setup", "tokens_per_s": 100.0, "ratio": None, "seed_loss": 8.5},
        ROW | {"without": "fused attention", "tokens_per_s": 66.0, "ratio": 1.5, "peak_gib": 30.0} | TRIAL,
        ROW | {"without": "a CUDA graph", "tokens_per_s": 90.0, "ratio": 1.1} | TRIAL | {"low": 0.9},
    ]
    numbers = without.of_rows(pd.DataFrame(rows))
    assert f"{numbers.gains['fused attention']}" == "1.50× (1.40 to 1.60, 8 pairs)"
    assert (numbers.largest, numbers.memory_of, float(numbers.memory)) == ("fused attention", "fused attention", 3.0)
    assert (float(numbers.undecided), float(numbers.tried)) == (1, 2)
    assert "batch" not in numbers.rows and numbers.job == "tiny, 8 × 64 tokens"


def test_a_variant_with_another_loss_is_no_gain():
    rows = [
        ROW | {"without": "the best setup", "tokens_per_s": 100.0, "ratio": None, "seed_loss": 8.5},
        ROW | {"without": "fused attention", "tokens_per_s": 60.0, "ratio": 1.6, "loss": 9.91} | TRIAL,
    ]
    numbers = without.of_rows(pd.DataFrame(rows))
    assert not numbers.gains and not numbers.largest_gain.measured


def test_what_does_not_fit_is_a_row_and_both_sides_then_have_a_smaller_batch(monkeypatch):
    def run(setup, baseline=None, **options):
        if setup.batch > 4 and setup.attention == "eager":
            raise torch.OutOfMemoryError("CUDA out of memory")
        assert baseline is None or baseline.batch == setup.batch
        return {"ratio": 1.5} if baseline else {}

    module = without.measure.__globals__
    best = Setup(model="tiny", sequence=64, precision="amp-bf16", attention="flash", batch=8)
    monkeypatch.setitem(module, "run_apart", run)
    monkeypatch.setitem(module, "setup_of", lambda *_: best)
    rows = without.measure(model="tiny", sequence=64, without="fused attention", trial_s=1.0)
    assert rows[0] == {"batch": 8, "status": "out of memory"}
    assert rows[1] == {"ratio": 1.5, "batch": 4, "baseline": "the best setup"}


def test_a_profiled_step_has_all_kinds_and_the_operations_of_all_its_products(monkeypatch):
    module = device_time.measure.__globals__
    monkeypatch.setitem(module, "product_rate", lambda _: SimpleNamespace(tflops=1.0))
    setup = Setup(model="tiny", sequence=64)
    rows = pd.DataFrame(profiled(setup))
    kinds = {"attention forward", "attention backward", "optimizer", "loss", PRODUCTS, IDLE}
    assert kinds <= set(rows["kind"]) <= set(KINDS)
    products = rows[rows["kind"] == PRODUCTS]
    counted = products["least_ms"].sum() * 1e9  # at the test's rate of 1 TFLOP/s
    at_most = flops_per_token("tiny", 64) * 64  # with attention, whose products are not in these
    assert 0.7 * at_most < counted < at_most


@pytest.mark.long
def test_the_least_time_grows_with_the_batch_but_not_the_optimizers():
    least = device_time.measure.__globals__["_least_ms"]
    setup = Setup(model="tiny", sequence=64)
    one, two = least(setup, 1e9), least(dataclasses.replace(setup, batch=2), 1e9)
    assert two["attention forward"] == pytest.approx(2 * one["attention forward"])
    assert two["loss"] / one["loss"] == pytest.approx(2, rel=0.5)  # the copy's bandwidth is measured anew
    assert two["optimizer"] == pytest.approx(one["optimizer"], rel=0.5)


def test_numbers_of_a_step_name_the_largest_part_beside_the_products():
    about = {"model": "tiny", "sequence": 64, "batch": 1, "step_ms": 10.0}
    pieces = [
        (PRODUCTS, 2.0, 1.5),
        (PRODUCTS, 4.0, 3.0),  # of another shape
        ("optimizer", 2.0, 1.0),
        ("loss", 1.0, 0.5),
        (IDLE, 1.0, 0.0),
    ]
    rows = [
        about | {"step": step, "kind": kind, "ms": ms, "least_ms": least}
        for step in (START, "batch 8")
        for kind, ms, least in pieces
    ]
    numbers = device_time.of_rows(pd.DataFrame(rows))
    assert f"{numbers.products}" == "60%"
    assert (numbers.largest_other, f"{numbers.largest_share}") == ("optimizer", "20%")
    kinds = numbers.kinds.set_index("kind")
    assert f"{kinds.loc[PRODUCTS, 'best: least / measured']} {kinds.loc[IDLE, 'plain: share of step']}" == "75% 10%"
