"""Every strategy on several processes against one process; ranks that fail."""

import dataclasses
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import distributed_cases
import pytest
import torch

from helpers.distributed import Job, RankFailed, __main__, launch, measure, strategies
from helpers.models import Llama

ROOT = Path(__file__).parents[2]
STEPS = 3
# Clipping is at work, and a step is long enough for a wrong one to show.
JOB = Job(strategy="single", batch=8, sequence=32, steps=STEPS, learning_rate=1e-2, clip=0.5)
ON_TWO = {
    "ddp": JOB,
    "ddp, small buckets, 2 micro-batches": dataclasses.replace(JOB, bucket_mib=0.05, accumulate=2),
    "zero2": JOB,
    "zero3": JOB,
    "zero3, 2 micro-batches, checkpointing": dataclasses.replace(JOB, accumulate=2, checkpointing="full"),
    "zero2, 2 micro-batches, checkpointing": dataclasses.replace(JOB, accumulate=2, checkpointing="selective"),
    "tp": JOB,
    "tp, 2 micro-batches, checkpointing": dataclasses.replace(JOB, accumulate=2, checkpointing="full"),
}
ON_TWO = {name: dataclasses.replace(job, strategy=name.split(",")[0]) for name, job in ON_TWO.items()}


@pytest.fixture(scope="module")
def runs():
    """All rows, by ranks and name."""
    mixed = {
        f"{name}, bf16": dataclasses.replace(JOB, strategy=name, precision="amp-bf16") for name in ("single", "zero3")
    }
    jobs = {1: {"alone": JOB} | mixed, 2: ON_TWO}
    return {n: dict(zip(of, measure(list(of.values()), n), strict=True)) for n, of in jobs.items()}


def curves(row):
    return torch.tensor([row["losses"], row["gradient_norms"]], dtype=torch.float64)


@pytest.mark.parametrize("name", ON_TWO)
def test_a_strategy_gives_the_losses_and_gradients_of_one_process(runs, name):
    alone = curves(runs[1]["alone"])
    assert (alone[0].diff().abs() > 1e-3).all()  # training changes the loss by far more than is allowed below
    assert (curves(runs[2][name]) - alone).abs().max() < 1e-5


def test_ranks_hold_their_share_of_parameters_gradients_and_state(runs):
    whole = 4 * sum(parameter.numel() for parameter in Llama.from_name("tiny").parameters())
    norms = 4 * 64 * 5  # whole on every rank of tensor parallelism
    shares = {"ddp": whole, "zero2": whole / 2, "zero3": whole / 2, "tp": (whole - norms) / 2 + norms}
    for name, share in shares.items():
        row = runs[2][name]
        assert row["parameter_bytes"] == row["gradient_bytes"] == share, name
        counters = row["optimizer_bytes"] - 2 * share
        assert 0 < counters <= 4 * 21, name  # AdamW's step of each weight


@pytest.mark.parametrize("name", ["single, bf16", "zero3, bf16"])
def test_bf16_compute_is_near_fp32(runs, name):
    difference = (curves(runs[1][name]) - curves(runs[1]["alone"])).abs().max()
    assert 1e-5 < difference < 2e-2


def test_weights_are_those_of_the_plain_model():
    built = strategies.build_model(JOB, torch.device("cpu"), None)
    plain = Llama.from_name("tiny")
    plain.reset_parameters(torch.Generator().manual_seed(JOB.seed))
    for name, weight in plain.state_dict().items():
        assert torch.equal(built.state_dict()[name], weight), name
    assert built.head.weight is built.embedding.weight


@pytest.mark.parametrize(
    ("worker", "message"),
    [
        (distributed_cases.one_raises, "rank 1: .*RuntimeError: planted"),
        (distributed_cases.one_is_killed, "rank 1 was killed by SIGKILL"),
    ],
)
def test_a_rank_that_fails_ends_all_with_its_error(worker, message):
    began = time.monotonic()
    with pytest.raises(RankFailed, match=f"(?s)^{message}"):
        launch(worker, 2)
    assert time.monotonic() - began < 60


def test_torchrun_on_two_nodes_prints_one_row(tmp_path):
    # A group's threads may abort an interpreter that is ending; a rank's does here each time.
    (tmp_path / "sitecustomize.py").write_text("import atexit, os\n'RANK' in os.environ and atexit.register(os.abort)")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint]
    command += ["-m", "helpers.distributed", "--strategy", "zero3", "--sequence", "16", "--steps", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(tmp_path)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT, "env": environment}
    nodes = [subprocess.Popen(command, **pipes) for _ in range(2)]
    said = [node.communicate(timeout=120) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    row = json.loads("".join(out for out, _ in said))
    assert (row["strategy"], row["ranks"], len(row["losses"])) == ("zero3", 2, 2)


@pytest.mark.parametrize("local_rank", ["0", "1"])
def test_under_torchrun_one_rank_of_a_machine_says_what_is_wrong(capsys, monkeypatch, local_rank):
    waited = []
    monkeypatch.setattr(__main__.time, "sleep", waited.append)
    numbers = {"RANK": local_rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    for name, number in numbers.items():
        monkeypatch.setenv(name, number)
    assert __main__.main(["--batch", "7"]) == 2
    message = "helpers.distributed: batch is 7; it must be a multiple of 2: 2 ranks × 1 micro-batches\n"
    assert capsys.readouterr().err == (message if local_rank == "0" else "")
    assert bool(waited) == (local_rank == "1")  # for the first to end ends all


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--strategy", "zero4"], "strategy is 'zero4'; valid: 'single', 'ddp', 'zero2', 'zero3', 'tp'"),
        (["--model", "llama"], "unknown model 'llama'; valid: tiny, llama-60m, llama-3.2-1b, llama-3.1-8b"),
        (["--ranks", "3"], "batch is 8; it must be a multiple of 3: 3 ranks × 1 micro-batches"),
        (["--ranks", "2", "--strategy", "single"], "strategy 'single' has one rank, not 2"),
        (["--ranks", "4", "--strategy", "tp"], "kv_heads is 2; tensor parallelism over 4 ranks needs a multiple of 4"),
        (["--ranks", "2", "--strategy", "tp", "--sequence", "63"], "sequence is 63; tensor parallelism"),
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
