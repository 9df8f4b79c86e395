"""One process of a trial: runs the script under the changes that it was given, and takes turns at its steps.

What it sees goes line by line, as JSON, to a report: the loss of each iteration, facts that decide which changes apply,
where files were redirected, and the peak of memory. A script that ends before its trial does begins anew; the time in
between doesn't count.
"""

import gc
import json
import os
import random
import signal
import socket
import sys
import time
import traceback
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .. import boot
from ..lab.memory import PEAK, system_bytes
from ..lab.trials.turns import Turns
from ..watching.run_script import compiled, run_script, script_frames
from ..watching.watch import UNSEEN, counted_steps
from ..watching.windows import end_of_iteration
from . import changes, scratch, sight

BOOT = f"import runpy, sys; runpy.run_path({boot.__file__!r})['load'](); "
BOOT += "from dlspeed.trying.child import main; main(sys.argv[1])"
SETTLING = 2  # iterations after a script began anew that don't count


@dataclass(frozen=True)
class Order:
    """What a process runs."""

    command: list[str]  # a script or a module, and its arguments
    module: bool
    root: str  # of the scratch, and of the report
    folders: list[str]  # the user's
    seed: int
    changes: list[str]
    facts: dict[str, Any]


class Steps(Turns):
    """Turns in which the time between two runs of the script doesn't count."""

    _ended = 0.0

    def run_ended(self) -> None:
        """This turn has the fewest steps that it may have: each new run takes long beside them."""
        self._ended = time.perf_counter()
        self._order = {**self._order, "seconds": 0.0}
        self._left_out = SETTLING

    def step_done(self) -> None:
        if not self._ended:
            super().step_done()
        elif self._left_out:
            self._left_out -= 1
        else:
            self._began += time.perf_counter() - self._ended
            self._ended = 0.0


def main(order_text: str) -> None:
    order = Order(**json.loads(order_text))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's to handle
    report = open(os.path.join(order.root, "report"), "w", buffering=1)  # noqa: SIM115 (it lives as long as this process)

    def tell(**line: Any) -> None:
        report.write(json.dumps(line) + "\n")

    folder = scratch.Scratch(order.root, order.folders)
    os.chdir(folder.mirror_working_folder(os.getcwd()))
    scratch.install(folder)
    sight.user_path = folder.user_path
    turns, seeing = Steps(), sight.Sight()
    ends_iteration = end_of_iteration()
    iterations, first_run, peak = 0, True, 0

    def stepped(optimizer: torch.optim.Optimizer | None) -> None:
        nonlocal iterations, peak
        if optimizer is not None and not ends_iteration(optimizer):
            return
        iterations += 1
        if first_run:
            seeing.iteration_ended(tell)
        if iterations % 8 == 1:
            peak = max(peak, _peak_bytes())
            tell(peak=peak, redirected=list(folder.redirected)[:20])
        began = time.perf_counter()
        turns.step_done()
        seeing.waited(time.perf_counter() - began)

    _fix_seeds(order.seed)
    seeing.install()
    for name in order.changes:
        changes.ALL[name].apply(order.facts)
    _shift_port()
    try:
        while True:
            script = order.command[0]
            program = script if order.module else compiled(script)
            for set_seed in (random.seed, np.random.seed, torch.manual_seed):  # `_fix_seeds` adds the order's seed
                set_seed(0)
            before = iterations
            with counted_steps(stepped):
                code = run_script(program, order.command)
            if iterations == before:
                _end(f"{script} ended with code {code}" if code else f"ended without a step: {UNSEEN}")
            first_run = False
            turns.run_ended()
            seeing.forget()
            gc.collect()
            ends_iteration = end_of_iteration()
    except BaseException as error:
        where = ""
        for frame, line in traceback.walk_tb(script_frames(error.__traceback__)):
            file = frame.f_code.co_filename
            if folder.user_path(file).startswith(tuple(folder.folders)):
                where = f" ({os.path.basename(file)}:{line})"
        _end(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}{where}")


def _end(reason: str) -> None:
    print(f"\n{reason}", flush=True)
    sys.stderr.flush()
    os._exit(1)


def _peak_bytes() -> int:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    return system_bytes(PEAK)


def _fix_seeds(seed: int) -> None:
    """Let every seed that the script sets be another one for another `seed`, and none come from the clock."""

    def other(value: Any) -> Any:
        return (value or 0) + seed if value is None or isinstance(value, (int, np.integer)) else value

    manual_seed, python_seed = torch.manual_seed, random.seed
    numpy_seed, generator = np.random.seed, np.random.default_rng
    torch.manual_seed = torch.random.manual_seed = lambda value: manual_seed(int(value) + seed)
    torch.seed = torch.random.seed = lambda: (manual_seed(seed), seed)[1]
    np.random.seed = lambda seed=None: numpy_seed(other(seed))
    np.random.default_rng = lambda seed=None: generator(other(seed))
    random.seed = lambda a=None, version=2: python_seed(other(a), version)


def _shift_port() -> None:
    """Let each process rendezvous at a free port: those that live side by side can't listen on one."""
    start = torch.distributed.init_process_group

    def started(*arguments: Any, **options: Any) -> Any:
        if int(os.environ.get("WORLD_SIZE", options.get("world_size", 1))) <= 1:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                os.environ["MASTER_PORT"] = str(free.getsockname()[1])
        return start(*arguments, **options)

    torch.distributed.init_process_group = started
