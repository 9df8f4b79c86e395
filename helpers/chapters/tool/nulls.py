"""Trials of a program against itself: do their intervals hold the truth on this machine?"""

import contextlib
import dataclasses
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import numpy as np
import pandas as pd
import torch
from torch import nn

from ...book import Worth
from ...book.table import table
from ...book.values import PERCENT, Number, derived, lacking, over_runs, share_of
from ...lab.cpu import ALLOCATORS
from ...lab.rows import Row
from ...lab.trials import FASTER, SLOWER, Program, trial
from ...lab.trials.start_noise import of_null_trials
from .cases import counted, percents

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


@table(
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
    program = Program(
        "one", function=f"{__name__}:step_of", arguments={"training": training}, environment=ALLOCATORS[allocator]
    )
    with _load(others):
        return trial(program, dataclasses.replace(program, name="same"), seconds=trial_s, wanted=2)


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


def step_of(training: str) -> Callable[[], None]:
    """A step of a small training, some 5 ms on a CPU."""
    torch.manual_seed(0)
    model, batch = TRAININGS[training]()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        optimizer.zero_grad()
        output = model(batch)
        (output[0] if isinstance(output, tuple) else output).square().mean().backward()
        optimizer.step()

    return step


# Numbers


@nulls.numbers()
def _(rows: pd.DataFrame) -> SimpleNamespace:
    """Trials of a program against itself beside others' load: verdicts, and intervals that leave 1 out."""
    wrong, excluded = rows["verdict"].isin([FASTER, SLOWER]), (rows["low"] > 1) | (rows["high"] < 1)
    reach, kept = np.sqrt(rows["high"] / rows["low"]) - 1, rows[rows["allocator"] == "kept"]
    cells = rows.assign(trials=1, verdicts=wrong, excluded=excluded, reach=reach).groupby(["allocator", "others"])
    shown = cells.agg({"trials": "sum", "verdicts": "sum", "excluded": "sum", "reach": "median"})
    heads = {
        "others": "load of others",
        "excluded": "intervals without 1",
        "reach": "median half width of the interval",
    }
    return SimpleNamespace(
        table=shown.assign(reach=percents(shown["reach"])).reset_index().rename(columns=heads),
        trials=counted(len(rows)),
        seconds=derived(rows["trial_s"].iloc[0], "chosen", "s", 0),
        wrong=share_of(wrong.sum(), len(rows)),
        excluded=share_of(excluded.sum(), len(rows)),
        leaning=over_runs(kept["median_ms"], kept["baseline_ms"]),
        farthest=Number((rows["ratio"] - 1).abs().max(), PERCENT),
        luck=_luck(rows),
    )


def _luck(rows: pd.DataFrame) -> Number:
    if not (noise := of_null_trials(rows, kept=True)):
        return lacking("enough null trials", PERCENT)
    return Number(noise.value, PERCENT, noise.low, noise.high, decimals=2)
