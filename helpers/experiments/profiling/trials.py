"""The trials on trial: do their intervals hold the truth, on made-up machines and on this one?"""

import contextlib
import dataclasses
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import torch
from torch import nn

from ...lab import Worth, experiment
from ...lab.cpu import ALLOCATORS
from ...lab.records import Row
from ...lab.trials import Program, trial

# Six small trainings, some 5 ms a step on a CPU: a model, and a batch for it.
TRAININGS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "mlp": lambda: (nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)), torch.randn(512, 256)),
    "convnet": lambda: (
        nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, stride=2)),
        torch.randn(16, 3, 32, 32),
    ),
    "transformer": lambda: (nn.TransformerEncoderLayer(128, 4, 256, batch_first=True), torch.randn(8, 64, 128)),
    "lstm": lambda: (nn.LSTM(64, 64, batch_first=True), torch.randn(16, 20, 64)),
    "embeddings": lambda: (nn.Sequential(nn.EmbeddingBag(5000, 64), nn.Linear(64, 64)), torch.randint(5000, (256, 32))),
    "autoencoder": lambda: (
        nn.Sequential(nn.Conv2d(1, 8, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(8, 1, 4, 2, 1)),
        torch.randn(32, 1, 32, 32),
    ),
}
# What changes on the machine while a null trial runs: a process that works for so long, every so many seconds.
LOADS = {"quiet": (0.0, 1.0), "bursts": (0.3, 3.0), "half of the time": (2.0, 4.0)}
# It is nobody's child, since what a trial's own descendants use doesn't count as others' work.
WORK = """
import os, sys, time
busy, every = map(float, sys.argv[1:])
asked = os.getppid()
if child := os.fork():
    print(child)
    sys.exit()
os.close(1)
while os.path.exists(f"/proc/{asked}"):
    began = time.monotonic()
    while time.monotonic() - began < busy:
        pass
    time.sleep(every - busy)
"""


def _nulls(count: int, seconds: float) -> list[Row]:
    """Each of the six trainings beside each load; two thirds of them keep the pages of freed memory."""
    kinds = itertools.cycle(itertools.product(("kept", "kept", "default"), LOADS, TRAININGS))
    return [
        {"number": number, "training": training, "others": others, "allocator": allocator, "trial_s": seconds}
        for number, (allocator, others, training) in zip(range(count), kinds, strict=False)
    ]


@experiment(
    small=_nulls(1, 1.5),
    cpu=_nulls(60, 10.0),
    gpu=[],  # of processes on a CPU
    columns="median_ms baseline baseline_ms",
    version=4,
    timed=False,
    worth=Worth(10, "what trials say of equal programs", cpu=10.5, gpu=11, big_gpu=0),
)
def nulls(number: int, training: str, others: str, allocator: str, trial_s: float) -> Row:
    """A program against itself for some seconds, on this machine, beside others whose load changes."""
    with _load(others):
        return _slowed(training, 0.0, allocator, trial_s)[0]


@experiment(
    small=[{"training": "mlp", "slowdown": 0.5, "trial_s": 1.5}],
    cpu=[
        {"training": training, "slowdown": slowdown, "trial_s": 30.0}
        for training in ("mlp", "convnet", "transformer")
        for slowdown in (0.0, 0.05)
    ],
    gpu=[],
    columns="median_ms baseline baseline_ms log_ratios?",
    timed=False,
    worth=Worth(10, "whether trials find a slowdown that was put in", cpu=31, gpu=32, big_gpu=0),
)
def slowdowns(training: str, slowdown: float, trial_s: float) -> Row:
    """A program against itself made slower by a known share of its step.

    `log_ratios` are those of the pairs, start by start: what the power of trials is computed from.
    """
    row, starts = _slowed(training, slowdown, "kept", trial_s)
    pairs = "; ".join(" ".join(f"{log:.4f}" for log in start) for start in starts)
    return row if "ratio" not in row else row | {"log_ratios": pairs}


@contextlib.contextmanager
def _load(others: str) -> Iterator[None]:
    busy, every = LOADS[others]
    command = [sys.executable, "-c", WORK, str(busy), str(every)]
    beside = int(subprocess.check_output(command)) if busy else 0
    try:
        yield
    finally:
        if beside:
            os.kill(beside, signal.SIGKILL)


def _slowed(training: str, slowdown: float, allocator: str, trial_s: float) -> tuple[Row, list[list[float]]]:
    """The trial's row, and the log ratios of each start's pairs."""
    starts: list[list[float]] = []
    as_it_is = {"training": training, "slowdown": 0.0}
    program = Program("one", function=f"{__name__}:step_of", arguments=as_it_is, environment=ALLOCATORS[allocator])
    other = dataclasses.replace(program, name="same", arguments=as_it_is | {"slowdown": slowdown})
    return trial(program, other, seconds=trial_s, wanted=2, starts=starts), starts


def step_of(training: str, slowdown: float) -> Callable[[], None]:
    """A step of a small training, some 5 ms on a CPU, and as much of it again as `slowdown` says."""
    torch.manual_seed(0)
    model, batch = TRAININGS[training]()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        began = time.perf_counter()
        optimizer.zero_grad()
        output = model(batch)
        (output[0] if isinstance(output, tuple) else output).square().mean().backward()
        optimizer.step()
        until = time.perf_counter() + slowdown * (time.perf_counter() - began)
        while time.perf_counter() < until:
            pass

    return step
