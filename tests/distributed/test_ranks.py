"""Every strategy on several processes against one process; ranks that fail."""

import dataclasses
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from cases import ranks as cases

from helpers.distributed import Job, RankFailed, __main__, joined, launch, measure, train
from helpers.distributed.launch import RENDEZVOUS
from helpers.models import Llama

ROOT = Path(__file__).parents[2]
# Clipping is at work, and a step is long enough for a wrong one to show.
JOB = Job(strategy="single", batch=8, sequence=32, steps=3, learning_rate=1e-2, clip=0.5)
ON_TWO = {
    "ddp": {"accumulate": 2, "bucket_mib": 0.05},
    "zero2": {"accumulate": 2, "checkpointing": "selective"},
    "zero3": {"accumulate": 2, "checkpointing": "full"},
    "tp": {"accumulate": 2, "checkpointing": "full"},
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
    norms = 4 * 64 * 5  # whole on every rank of tensor parallelism
    shares = {"ddp": whole, "zero2": whole / 2, "zero3": whole / 2, "tp": (whole - norms) / 2 + norms}
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


def test_two_nodes_print_one_row(tmp_path):
    """As torchrun starts a rank on each."""
    # A group's threads may abort an interpreter that is ending; a rank's does here each time.
    (tmp_path / "sitecustomize.py").write_text("import atexit, os\natexit.register(os.abort)")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-m", "helpers.distributed", "--strategy", "zero3", "--sequence", "16", "--steps", "2"]
    given = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
    given |= {"LOCAL_RANK": "0", "PYTHONPATH": str(tmp_path)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
    nodes = [subprocess.Popen(command, env=os.environ | given | {"RANK": rank}, **pipes) for rank in "01"]
    said = [node.communicate(timeout=900) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    row = json.loads("".join(out for out, _ in said))
    assert (row["strategy"], row["ranks"], len(row["losses"])) == ("zero3", 2, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--strategy", "zero4"], "strategy is 'zero4'; valid: 'single', 'ddp', 'zero2', 'zero3', 'tp'"),
        (["--model", "llama"], "unknown model 'llama'; valid: tiny, llama-60m, llama-3.2-1b, llama-3.1-8b"),
        (["--ranks", "2", "--strategy", "single"], "strategy 'single' has one rank, not 2"),
        (["--ranks", "4", "--strategy", "tp"], "kv_heads is 2; tensor parallelism over 4 ranks needs a multiple of 4"),
        (["--sequence", "4097"], "sequence is 4097; tiny has 4096 positions"),
        (["--clip", "0"], "clip is 0.0; it must be above 0"),
        (["--batch", "many"], "invalid int value: 'many'"),
        (["--backend", "nccl", "--ranks", "99", "--batch", "99"], "backend 'nccl' needs"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(capsys, monkeypatch, arguments, message):
    monkeypatch.setattr(__main__, "measure", lambda *_: pytest.fail("it was started"))
    assert __main__.main(arguments) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.count("\n") == 1 and not printed.out


def test_a_failed_rank_is_exit_code_1_and_its_error(capsys, monkeypatch):
    def fails(*_):
        raise RankFailed("rank 1: ValueError: no memory")

    monkeypatch.setattr(__main__, "measure", fails)
    assert __main__.main(["--ranks", "2"]) == 1
    assert capsys.readouterr().err.endswith("helpers.distributed: rank 1: ValueError: no memory\n")
