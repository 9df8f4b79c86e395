"""One process of a search: runs the script under the changes that it was given, and takes turns at its steps.

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
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from .. import boot
from ..lab.memory import PEAK, system_bytes
from ..lab.trials.turns import Turns
from ..watching import NothingRecorded, run_script, watch
from ..watching.watch import UNSEEN, counted_steps
from ..watching.windows import end_of_iteration
from . import changes, scratch, sight

BOOT = f"import runpy, sys; runpy.run_path({boot.__file__!r})['load'](); "
BOOT += "from dlspeed.trying.child import main; main(sys.argv[1])"
SETTLING = 2  # iterations after a script began anew that don't count


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
    """Run what a `Side` says, with `facts` of the script and the user's `folders`, in the scratch `root`."""
    order = SimpleNamespace(**json.loads(order_text))
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
            peak = max(peak, torch.cuda.max_memory_allocated() or system_bytes(PEAK))
            tell(peak=peak, redirected=list(folder.redirected)[:20])
        turns.step_done()

    fix_seeds(order.seed)
    shift_port()
    script = order.command[0]
    try:
        if order.profile_s:
            _watch(order, tell)
            turns.step_done()  # there is no next turn
        seeing.install()
        for name in order.names:
            changes.ALL[name].apply(order.facts)
        while True:
            program = script if order.module else run_script.compiled(script)
            for set_seed in (random.seed, np.random.seed, torch.manual_seed):  # `fix_seeds` adds the order's seed
                set_seed(0)
            before = iterations
            with counted_steps(stepped):
                code = run_script.run_script(program, order.command)
            if iterations == before:
                _end(f"{script} ended with code {code}" if code else f"ended without a step: {UNSEEN}")
            first_run = False
            turns.run_ended()
            seeing.forget()
            gc.collect()
            ends_iteration = end_of_iteration()
    except BaseException as error:
        where = ""
        for frame, line in traceback.walk_tb(run_script.script_frames(error.__traceback__)):
            file = frame.f_code.co_filename
            if folder.user_path(file).startswith(tuple(folder.folders)):
                where = f" ({os.path.basename(file)}:{line})"
        _end(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}{where}")


def _watch(order: SimpleNamespace, tell: Callable[..., None]) -> None:
    """Profile the script into the folder `profile` of the scratch."""
    script, *arguments = order.command
    folder = os.path.join(order.root, "profile")
    try:
        watch(script, arguments, module=order.module, limit=order.profile_s, output=folder)
    except NothingRecorded as error:
        tell(missing=str(error))


def _end(reason: str) -> None:
    print(f"\n{reason}", flush=True)
    sys.stderr.flush()
    os._exit(1)


def fix_seeds(seed: int) -> None:
    """Let every seed that the script sets be another one for another `seed`, and none come from the clock."""

    def reseeded(function: Callable) -> Callable:
        def set_seed(*given: Any, **named: Any) -> Any:
            value, *others = (*given, *named.values()) or (None,)
            known = value is None or isinstance(value, (int, np.integer))
            return function((value or 0) + seed if known else value, *others)

        return set_seed

    torch.manual_seed = torch.random.manual_seed = reseeded(manual_seed := torch.manual_seed)
    torch.seed = torch.random.seed = lambda: (manual_seed(seed), seed)[1]
    for holder, name in ((random, "seed"), (np.random, "seed"), (np.random, "default_rng")):
        setattr(holder, name, reseeded(getattr(holder, name)))


def shift_port() -> None:
    """Let each process rendezvous at a free port: those that live side by side can't listen on one."""
    start = torch.distributed.init_process_group

    def started(*arguments: Any, **options: Any) -> Any:
        if int(os.environ.get("WORLD_SIZE", options.get("world_size", 1))) <= 1:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                os.environ["MASTER_PORT"] = str(free.getsockname()[1])
        return start(*arguments, **options)

    torch.distributed.init_process_group = started
