"""The trials on trial: do their intervals hold the truth, on made-up machines and on this one?"""

import dataclasses
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable

import torch

from ...lab import Worth, experiment
from ...lab.cpu import ALLOCATORS
from ...lab.records import Row
from ...lab.trials import Program, trial
from ...lab.trials.simulation import MACHINES
from ...lab.trials.simulation import coverage as simulated_coverage

STARTS_AND_ROUNDS = ((1, 8), (3, 4), (3, 10))
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


def _simulated(trials: int) -> list[Row]:
    return [
        {"machine": machine, "starts": starts, "rounds": rounds, "trials": trials}
        for machine in MACHINES
        for starts, rounds in STARTS_AND_ROUNDS
    ]


@experiment(
    small=_simulated(20)[:1],
    cpu=_simulated(1000),
    gpu=[],  # the machine is made up
    columns="covered false_verdicts",
    timed=False,
    worth=Worth(2, "what intervals hold, simulated", cpu=1, gpu=1, big_gpu=0),
)
def coverage(machine: str, starts: int, rounds: int, trials: int) -> Row:
    """Trials of a program against itself on a made-up machine: 95 % intervals that contain 1, and false verdicts."""
    covered, verdicts = simulated_coverage(machine, starts, rounds, trials)
    return {"covered": covered, "false_verdicts": verdicts}


def _nulls(count: int, seconds: float) -> list[Row]:
    """Two thirds of them keep the pages of freed memory."""
    kinds = itertools.cycle(itertools.product(("kept", "kept", "default"), LOADS))
    numbered = zip(range(count), kinds, strict=False)
    return [{"number": n, "others": o, "allocator": a, "trial_s": seconds} for n, (a, o) in numbered]


@experiment(
    small=_nulls(1, 1.5),
    cpu=_nulls(18, 15.0),
    gpu=[],  # of processes on a CPU
    columns="median_ms baseline baseline_ms",
    version=3,
    timed=False,
    worth=Worth(10, "what trials say of equal programs", cpu=15.5, gpu=16, big_gpu=0),
)
def nulls(number: int, others: str, allocator: str, trial_s: float) -> Row:
    """A program against itself for some seconds, on this machine, beside others whose load changes."""
    busy, every = LOADS[others]
    command = [sys.executable, "-c", WORK, str(busy), str(every)]
    beside = int(subprocess.check_output(command)) if busy else 0
    function = f"{__name__}:training_step"
    program = Program("one", function=function, environment=ALLOCATORS[allocator])
    try:
        return trial(program, dataclasses.replace(program, name="same"), seconds=trial_s, wanted=2)
    finally:
        if beside:
            os.kill(beside, signal.SIGKILL)


def training_step() -> Callable[[], None]:
    """A step of a small network, some 5 ms on a CPU."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batch = torch.randn(512, 256)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    return step
