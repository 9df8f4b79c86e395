"""Simulated ranks: memory and collectives, counted; predicted times."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.distributed import Job
from helpers.fit import CLUSTERS, Plan, count, predict, rank_memory, rank_peak, transfers
from helpers.fit.fused import Compiler
from helpers.fit.ledger import Ledger, Peak, deepened
from helpers.fit.ranks import (
    GATHER,
    REDUCE,
    SCATTER,
    Transfer,
    count_rank,
    elements,
    fake_group,
    real,
    share,
    transfer_ms,
    units,
    weightless,
)
from helpers.fit.step import count_step
from helpers.models import Llama

NVLINK4 = CLUSTERS[2]
EIGHT_B = Job(model="llama-3.1-8b", precision="amp-bf16", batch=512, sequence=2048)
# Collectives by torch's names.
KINDS = {"_allgather_base_": GATHER, "_reduce_scatter_base_": SCATTER, "allreduce_": REDUCE, "all_reduce": REDUCE}


def job(strategy, **changes):
    return Job(**{"strategy": strategy, "batch": 16, "sequence": 64} | changes)


@pytest.mark.parametrize("name", ["tiny", "llama-3.1-8b"])
def test_units_hold_each_weight_of_the_model_once(name):
    with torch.device("meta"):
        weights = [tuple(p.shape) for p in Llama.from_name(name).parameters()]
    derived = [(rows,) if columns == 1 else (rows, columns) for unit in units(name) for rows, columns in unit]
    assert sorted(derived) == sorted(weights)


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(1, 50)), min_size=1), st.integers(1, 64))
def test_shares_hold_all_and_little_more(weights, ranks):
    assert elements(weights) <= ranks * share(weights, ranks) < elements(weights) + ranks * sum(c for _, c in weights)


def test_the_ledger_counts_blocks_that_live_once_each():
    with Ledger() as ledger:
        first = torch.empty(1000)  # 4000 bytes: 8 blocks
        view = first.view(10, 100)
        second = torch.empty(1)
        assert ledger.bytes == 4096 + 512
        del first
        assert ledger.bytes == 4096 + 512  # the view holds it
        del view, second
        assert (ledger.bytes, ledger.peak.bytes) == (0, 4096 + 512)
        wide = torch.empty(1000, dtype=torch.float64)
        assert ledger.bytes == 8192
        del wide
        weight = torch.empty(256)
        ledger.name("weights", [weight])
        ledger.begin_phase(first=True)
        weight.untyped_storage().resize_(0)
        assert (ledger.bytes, ledger.peak.bytes, ledger.peak.parts["weights"]) == (0, 1024, 1024)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 1000), min_size=12, max_size=12), st.integers(4, 100))
def test_a_deep_models_peak_is_the_largest_of_its_phases_which_grow_with_each_layer(sizes, layers):
    parts = ("weights", "activations")

    def phase(number, layers):
        """Begins with some bytes, of which each layer adds as many."""
        first, second, each, other = sizes[number], sizes[number + 1], sizes[number + 2], sizes[number + 3]
        held = dict(zip(parts, (first + layers * each, second + layers * other), strict=True))
        return Peak(sum(held.values()), f"phase {number}", held)

    def phases(layers):
        middle = [phase(4, layers)] if layers > 2 else []
        return [phase(0, layers), phase(2, layers), *middle, phase(6, layers), phase(8, layers)]

    fewer, more = phases(2), phases(3)
    growths = [
        {part: after.parts[part] - before.parts[part] for part in parts}
        for before, after in ((fewer[1], more[1]), (fewer[2], more[3]))
    ]
    growth = max(growths, key=lambda grown: sum(grown.values()))
    middle = sum(more[2].parts[part] + (layers - 3) * growth[part] for part in parts)
    whole = phases(layers)
    expected = max(*(whole[number].bytes for number in (0, 1, 3, 4)), middle)
    found = deepened(phases, layers)
    assert found.bytes == sum(found.parts.values()) == expected
    assert deepened(phases, 3).bytes == max(peak.bytes for peak in more)


@pytest.mark.long
@pytest.mark.parametrize("compile", ["none", "regional"])
@pytest.mark.parametrize("change", [{}, {"checkpointing": "full"}, {"precision": "fp32", "sequence": 2}])
def test_a_deep_models_peak_follows_from_two_and_three_layers(change, compile):
    setup = Plan(**{"model": "tiny", "batch": 2, "sequence": 64} | change).setup
    setup = dataclasses.replace(setup, layers=5, compile=compile)
    whole = count_step(setup, FakeTensorMode(), Compiler())
    assert count(setup).bytes == pytest.approx(max(peak.bytes for peak in whole.peaks), rel=0.01 * (compile != "none"))


@pytest.mark.long
@pytest.mark.parametrize(
    ("strategy", "checkpointing"), [("ddp", "none"), ("ddp", "full"), ("zero2", "none"), ("zero3", "full")]
)
def test_so_does_a_ranks_and_its_parts_are_those_of_the_strategy(strategy, checkpointing):
    chosen = job(strategy, layers=5, precision="amp-bf16", checkpointing=checkpointing)
    peak = rank_peak(chosen, 8)
    assert peak.bytes == count_rank(chosen, 8).peak.bytes == sum(peak.parts.values())
    assert peak.parts["optimizer"] >= 2 * peak.parts["weights"] > 0
    assert strategy != "ddp" or peak.parts["gradients"] > 0.99 * peak.parts["weights"]  # its buckets stay
    assert peak.parts["weight copies"] > 0


def exchanged(job, ranks):
    """For each kind of collective its bytes and how many, in a step of a rank that runs without memory."""
    meter = Meter()
    with weightless(job, ranks, meter) as (trainer, tokens):
        meter.seen.clear()
        trainer.step(tokens)
    return meter.seen


class Meter(TorchDispatchMode):
    """Sees collectives go by: bytes, each counted whole, and number, by kind."""

    def __init__(self):
        super().__init__()
        self.seen = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its collectives come here as operations on local tensors
        result = function(*args, **(kwargs or {}))
        name = function._schema.name.split("::")[1]
        if function.namespace in ("c10d", "_c10d_functional") and name != "wait_tensor":
            operands = [t for t in torch.utils._pytree.tree_leaves((args, result)) if isinstance(t, torch.Tensor)]
            kind = KINDS.get(name, name)
            size, count = self.seen.get(kind, (0, 0))
            self.seen[kind] = size + max(t.nbytes for t in operands), count + 1
        return result


@pytest.mark.parametrize(
    ("strategy", "ranks", "changes"),
    [
        ("ddp", 4, {"accumulate": 2}),
        ("zero2", 4, {"precision": "amp-bf16", "accumulate": 2}),
        ("zero3", 4, {"precision": "amp-bf16", "checkpointing": "full"}),
        ("zero3", 8, {"accumulate": 2}),
    ],
)
def test_bytes_exchanged_are_those_derived(strategy, ranks, changes):
    derived = {}
    for transfer in transfers(job(strategy, **changes), ranks):
        size, count = derived.get(transfer.kind, (0, 0))
        derived[transfer.kind] = (size + transfer.bytes, count + transfer.count)
    assert derived == exchanged(job(strategy, **changes), ranks)


def test_a_rank_with_real_tensors_goes_on_step_after_step():
    chosen = job("ddp", accumulate=2)
    with real(chosen, 4, torch.device("cpu")) as (trainer, tokens):
        losses = [trainer.step(tokens) for _ in range(3)]
    assert losses[0] == pytest.approx(math.log(512), abs=0.1)
    assert losses[2] < losses[0] - 0.05  # nothing is averaged, and this rank's batch is the same each time


def test_zero3_moves_one_and_a_half_times_what_zero2_moves_of_bf16_parameters():
    sent = {}
    for strategy in ("ddp", "zero2", "zero3"):
        actual = transfers(dataclasses.replace(EIGHT_B, strategy=strategy), 8)
        sent[strategy] = sum(transfer.sent(8) for transfer in actual)
    parameters = sum(map(elements, units("llama-3.1-8b")))
    assert sent["ddp"] == 8 * parameters * 7 / 8
    assert sent["zero2"] == pytest.approx(6 * parameters * 7 / 8, rel=1e-3)
    head = 2 * 128256 * 4096  # stays between forward and backward
    assert sent["zero3"] == pytest.approx((8 * parameters - head) * 7 / 8, rel=1e-3)


def test_a_transfer_takes_its_bytes_over_the_slower_link_and_its_hops():
    gigabyte = Transfer("parameters", GATHER, 10**9, 1, "forward", alone=1)
    # 7/8 GB at 370 GB/s; 8.4 µs to start, 7 hops of 3.4 µs
    assert transfer_ms(gigabyte, 8, NVLINK4) == pytest.approx(0.875 / 370 * 1e3 + 0.0084 + 7 * 0.0034)
    # 1/8 of it for each adapter, of which 1/2 leaves for the other machine, at 47 GB/s
    hops = 0.0084 + 14 * 0.0034 + 0.014
    assert transfer_ms(gigabyte, 16, NVLINK4) == pytest.approx(max(15 / 16 / 370, 1 / 8 / 2 / 47) * 1e3 + hops)


def test_a_small_all_reduce_of_many_machines_takes_a_tree_and_a_large_one_the_rings():
    """Twice as many bytes as a gather's, and hops, of which a tree has as many as doublings of the machines."""
    small, large = (Transfer("gradients", REDUCE, size, 2, "backward", alone=1) for size in (10**6, 10**10))
    tree = 2 * 2 * (7 * 4.0 + 3 * 14.0) / 1e3  # two collectives over eight machines of eight
    rings = 2 * (8.4 + 2 * (56 * 3.4 + 7 * 14.0)) / 1e3
    for transfer, hops, rate in ((small, tree, 0.9), (large, rings, 1.0)):
        bytes_ms = max(2 * 63 / 64 / 370, 2 / 8 * 7 / 8 / 47) * transfer.bytes / 1e6
        assert transfer_ms(transfer, 64, NVLINK4) == pytest.approx(bytes_ms / rate + hops)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["ddp", "zero2", "zero3"]),
    st.sampled_from([1, 2, 8, 512]),
    st.sampled_from(CLUSTERS),
    st.floats(1, 1e5),
    st.sampled_from(["none", "full"]),
)
def test_predictions_are_consistent(strategy, ranks, cluster, compute_ms, checkpointing):
    chosen = dataclasses.replace(EIGHT_B, strategy=strategy, checkpointing=checkpointing)
    row = predict(chosen, ranks, cluster, compute_ms)
    assert 0 < row["efficiency"] <= 1
    assert row["exposed_ms"] <= row["communication_ms"] * (1 + 1e-9)
    assert row["step_ms"] == pytest.approx(compute_ms + row["exposed_ms"])
    assert (row["communication_ms"] == 0) == (ranks == 1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rank_memory(job("ddp"), 3), "batch is 16; it must be a multiple of 3"),
        (lambda: transfers(job("zero4"), 2), "strategy is 'zero4'; valid: 'single', 'ddp', 'zero2', 'zero3'"),
    ],
)
def test_what_cannot_be_simulated_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_simulation_does_not_disturb_a_group_that_is_there():
    with fake_group(2), pytest.raises(ValueError, match="in a process group already"), fake_group(2):
        pass
