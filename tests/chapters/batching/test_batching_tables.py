"""Chapter 2's tables on the small preset."""

import time
from importlib import import_module

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F

from helpers.batching import PackedLayout, packed_attention
from helpers.batching.attention import causal_attention
from helpers.chapters import batching
from helpers.chapters.batching import inputs, step_times
from helpers.chapters.batching.attention import both_ways, pad, unpad
from helpers.chapters.batching.feeds import BALANCED, SPREADS
from helpers.chapters.batching.throughput import DENSE_BATCHES, NO_PADDING
from helpers.chapters.batching.training import BY_TOKENS
from helpers.models import GPT2LikeModel
from helpers.training.task import Batch


@pytest.fixture
def never_cudnns(monkeypatch):
    """Attention is computed, never by cuDNN, which is enabled afterwards if it was before."""
    enabled, product, met = torch.backends.cuda.cudnn_sdp_enabled, F.scaled_dot_product_attention, []
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda *x, **how: met.append(enabled()) or product(*x, **how)
    )
    before = enabled()
    yield
    assert met and not any(met) and enabled() == before


def test_padding_falls_with_k_and_candidates_grow():
    rows = batching.padding("small").set_index("variant")
    ks = rows.loc[[f"k = {k}" for k in SPREADS]]
    assert ks["padding_share"].is_monotonic_increasing
    assert ks["candidate_share"].is_monotonic_increasing
    assert rows.loc["BRAIN", "padding_share"] > rows.loc["BIG BRAIN", "padding_share"] > ks["padding_share"].iloc[1]
    assert rows.loc["k = 640", "padding_share"] == pytest.approx(rows.loc["BIG BRAIN", "padding_share"], abs=0.03)
    assert rows.loc["k = 640", "candidate_share"] == 1


@pytest.mark.long
def test_samplers_are_timed_beside_torchtexts():
    pytest.importorskip("torchtext", exc_type=ImportError)
    rows = batching.sampler_scaling("small")
    assert rows["variant"].nunique() == 2
    assert (rows["batch_us"] > 0).all() and (rows["init_s"] > 0).all()


@pytest.mark.usefixtures("never_cudnns")
def test_an_epoch_of_batches_is_timed():
    rows = batching.batch_time("small").set_index("variant")
    assert (rows["min_ms"] <= rows["median_ms"]).all() and (rows["median_ms"] <= rows["max_ms"]).all()
    assert rows.loc["BRAIN", "padding_share"] > 0.8 > rows.loc["k = 5", "padding_share"]
    real = rows["real_tokens_per_s"] * rows["epoch_s"]
    assert real.to_numpy() == pytest.approx(real.iloc[0])  # all see the same tokens
    turns = rows["us_per_token"].str.split()
    assert turns.map(len).nunique() == 1  # any two have pairs
    mean_us = turns.map(lambda of: sum(map(float, of)) / len(of))
    assert (mean_us * rows["real_tokens_per_s"] / 1e6).between(0.3, 3).all()


def test_the_time_of_a_batch_begins_when_others_lie_on_the_device_already(monkeypatch):
    monkeypatch.setattr(step_times, "QUEUED", 3)
    seen = []

    def batches():
        for number in range(4):
            seen.append(f"made {number}")
            yield number

    times_ms = step_times.device_ms(batches(), lambda number: seen.append(f"ran {number}"))
    chunks = [range(0, 3), range(3, 4)]
    assert seen == [f"{what} {number}" for chunk in chunks for what in ("made", "ran") for number in chunk]
    assert len(times_ms) == 4


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_gpus_epochs_begin_when_their_batches_lie_on_the_device(monkeypatch, kind):
    monkeypatch.setattr(step_times, "device", lambda: torch.device(kind))
    order = []

    def batches():
        for number in range(3):
            order.append(f"made {number}")
            time.sleep(0.02)
            yield Batch(torch.zeros(1, 4), torch.zeros(1, 4), real=4)

    epoch = step_times.Epoch()
    epoch.go_on(batches(), lambda batch: order.append("ran"))
    row = epoch.row(lambda batch: None)
    if kind == "cuda":
        assert order == ["made 0", "made 1", "made 2", "ran", "ran", "ran"]
        assert row["loader_s"] > 0.06 > 0.02 > row["epoch_s"]
    else:
        assert order == ["made 0", "ran", "made 1", "ran", "made 2", "ran"]
        assert row["epoch_s"] > 0.06 and "loader_s" not in row


def test_padded_documents_attend_as_packed_ones_do():
    layout = PackedLayout([0, 3, 4, 9])
    generator = torch.Generator().manual_seed(0)
    packed = [torch.randn(1, 2, 9, 8, generator=generator, dtype=torch.float64) for _ in range(4)]
    padded = pad(layout, packed)
    assert padded[0].shape == (3, 2, 5, 8)
    for part in (*packed[:3], *padded[:3]):
        part.requires_grad_()
    dense = packed_attention(layout, "dense", "cpu")
    wanted = both_ways(dense, *packed)
    got = unpad(layout, lambda: both_ways(causal_attention, *padded))
    torch.testing.assert_close(got, wanted)


@pytest.mark.usefixtures("never_cudnns")
def test_variants_of_attention_agree_and_those_that_cannot_run_say_why():
    rows = batching.attention("small").set_index("variant")
    assert "FlexAttention does not support backward on CPU" in rows.loc["flex", "status"]
    timed = rows.loc[["dense", "varlen", "SDPA per document", "causal, leaking"]]
    assert timed.loc["dense", "ratio"] == 1
    assert (timed["low"] <= timed["ratio"]).all() and (timed["ratio"] <= timed["high"]).all()
    assert rows.loc[["dense", "varlen"], "build_ms"].gt(0).all()


@pytest.mark.usefixtures("never_cudnns")
def test_training_runs_say_what_they_learned():
    configs = [config | {"samples": 16, "max_length": 64} for config in batching.training.configurations("small")]
    rows = pd.DataFrame([batching.training.measure(**config) for config in configs])
    assert rows["validation_loss"].between(1, 10).all()
    assert (rows["train_s"] > 0).all() and rows["real_tokens"].nunique() == 1
    assert rows["guess_accuracy"].between(0, 1).all()


@pytest.mark.usefixtures("never_cudnns")
def test_training_steps_are_compared_and_one_that_runs_out_of_memory_is_a_row_that_says_so(monkeypatch):
    config = batching.throughput.configurations("small")[0] | {"rounds": 3}
    measured, measure, forward = [], step_times.rates, GPT2LikeModel.forward
    module = import_module("helpers.chapters.batching.throughput")
    monkeypatch.setattr(module, "rates", lambda *given: measured.extend(given) or measure(*given))

    def narrow(model, tokens, *arguments, **options):
        if len(tokens) == config["batch_size"] and tokens.shape[1] > 200:  # BRAIN, and BIG BRAIN with a long sample
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return forward(model, tokens, *arguments, **options)

    monkeypatch.setattr(GPT2LikeModel, "forward", narrow)
    rows = pd.DataFrame(batching.throughput.rows(config)).set_index("variant")
    padded = ["BRAIN", "BIG BRAIN"]
    assert rows["status"].to_dict() == {name: "out of memory" if name in padded else "ok" for name in rows.index}
    timed = rows.drop(index=padded)
    assert timed["real_tokens_per_s"].gt(0).all() and timed["n"].eq(3).all()
    assert rows.loc[NO_PADDING, "ratio_to_no_padding"] == 1
    _, batches, real_tokens, _ = measured
    assert len(batches["packed, dense"]) == DENSE_BATCHES < len(batches["packed, varlen"])  # its masks are few
    assert real_tokens["packed, dense"] == real_tokens["packed, varlen"]


def test_documents_fill_the_sequence_that_attention_is_timed_on():
    offsets = inputs.packed_offsets(2048)
    assert offsets[0] == 0 and offsets[-1] == 2048
    assert (np.diff(offsets) >= 0).all()


def test_a_loss_by_tokens_weighs_batches_of_training_alone():
    """With a learning rate of zero both end with the weights that they began with."""
    sizes = {"width": 32, "layers": 1, "words": 500, "samples": 48, "max_length": 64, "batch_size": 8, "epochs": 1}
    of = [{"data": data, **sizes, "learning_rate": 0.0, "seed": 0} for data in (BALANCED, BY_TOKENS)]
    [plain], [weighted] = map(batching.training.rows, of)
    assert plain["validation_loss"] == weighted["validation_loss"]
