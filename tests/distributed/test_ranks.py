"""Every strategy on several processes against one process; ranks that fail."""

import dataclasses
import re
import time

import pytest
import torch
from cases import ranks as cases

from helpers.distributed import Job, RankFailed, joined, launch, measure, train
from helpers.distributed.launch import RENDEZVOUS
from helpers.models import Llama

# Clipping is at work, and a step is long enough for a wrong one to show.
JOB = Job(strategy="single", batch=8, sequence=32, steps=3, learning_rate=1e-2, clip=0.5)
ON_TWO = {
    "ddp": {"accumulate": 2, "bucket_mib": 0.05},
    "zero2": {"accumulate": 2, "checkpointing": "selective"},
    "zero3": {"accumulate": 2, "checkpointing": "full"},
}
BF16 = "zero3, bf16"


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The row of one process, which is this one, in fp32 and in bf16."""
    store = (tmp_path_factory.mktemp("group") / "store").as_uri()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", RENDEZVOUS: store}.items():
            patch.setenv(name, value)
        with joined("gloo") as device:
            return [train(job, device) for job in (JOB, dataclasses.replace(JOB, precision="amp-bf16"))]


@pytest.fixture(scope="module")
def runs():
    """The rows of two ranks by strategy, and what their scaled steps came to."""
    jobs = {name: dataclasses.replace(JOB, strategy=name, **changes) for name, changes in ON_TWO.items()}
    jobs[BF16] = dataclasses.replace(JOB, strategy="zero3", precision="amp-bf16")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("helpers.distributed.work", cases.work_and_scaled_steps)
        *rows, scaled = measure(list(jobs.values()), 2)
    return dict(zip(jobs, rows, strict=True)) | {"scaled": scaled}


def curves(row):
    return torch.tensor([row["losses"], row["gradient_norms"]], dtype=torch.float64)


@pytest.mark.parametrize("name", ON_TWO)
def test_a_strategy_gives_the_losses_and_gradients_of_one_process(alone, runs, name):
    expected = curves(alone[0])
    assert (expected[0].diff().abs() > 1e-3).all()  # training changes the loss by far more than is allowed below
    assert (curves(runs[name]) - expected).abs().max() < 1e-5


def test_ranks_hold_their_share_of_parameters_gradients_and_state(runs):
    whole = 4 * sum(parameter.numel() for parameter in Llama.from_name("tiny").parameters())
    shares = {"ddp": whole, "zero2": whole / 2, "zero3": whole / 2}
    for name, share in shares.items():
        row = runs[name]
        assert row["parameter_bytes"] == row["gradient_bytes"] == share, name
        counters = row["optimizer_bytes"] - 2 * share
        assert 0 < counters <= 4 * 21, name  # AdamW's step of each weight


def test_bf16_compute_is_near_fp32(alone, runs):
    for row in (alone[1], runs[BF16]):
        assert 1e-5 < (curves(row) - curves(alone[0])).abs().max() < 2e-2


def test_sharded_layers_are_scaled_clipped_and_skipped_as_whole_ones(runs):
    assert runs["scaled"] == 8


@pytest.mark.parametrize(
    ("worker", "ranks", "message"),
    [(cases.one_raises, 2, "rank 1: .*RuntimeError: planted"), (cases.is_killed, 1, "rank 0 was killed by SIGKILL")],
)
def test_a_rank_that_fails_ends_all_with_its_error(worker, ranks, message):
    began = time.monotonic()
    with pytest.raises(RankFailed, match=f"(?s)^{message}"):
        launch(worker, ranks)
    assert time.monotonic() - began < 900


@pytest.mark.parametrize(
    ("job", "ranks", "message"),
    [
        ({"strategy": "zero4"}, 1, "strategy is 'zero4'; valid: 'single', 'ddp', 'zero2', 'zero3'"),
        ({"model": "llama"}, 1, "unknown model 'llama'; valid: tiny, "),
        ({"strategy": "single"}, 2, "strategy 'single' has one rank, not 2"),
        ({"sequence": 4097}, 1, "sequence is 4097; tiny has 4096 positions"),
        ({"clip": 0}, 1, "clip is 0; it must be above 0"),
        ({"backend": "nccl", "batch": 99}, 99, "backend 'nccl' needs"),
    ],
)
def test_what_cannot_work_is_refused(job, ranks, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Job(**job).check(ranks)
