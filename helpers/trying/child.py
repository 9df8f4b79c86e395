"""One process of a search: runs the script under the changes that it was given, and takes turns at its steps.

What it sees goes line by line, as JSON, to a report: the loss of each iteration, facts that decide which changes apply,
where files were redirected, and the peak of memory. A script that ends before its trial does begins anew; the time in
between doesn't count.
"""

import gc
import json
import os
import signal
import time
import traceback
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from ..lab.memory import PEAK, system_bytes
from ..lab.trials.turns import Turns
from ..script import running, sandbox
from ..script.recording import NothingRecorded, record_script
from ..script.run_facts import RunFacts
from ..script.scratch import Scratch
from ..script.windows import Plan
from . import changes

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
            return
        self._left_out -= 1
        if not self._left_out:
            self._began += time.perf_counter() - self._ended
            self._ended = 0.0


def main(order_text: str) -> None:
    """Run what a `Side` says, with `facts` of the script and the user's `folders`, in the scratch `root`."""
    order = SimpleNamespace(**json.loads(order_text))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's to handle
    report = open(os.path.join(order.root, "report"), "w", buffering=1)  # noqa: SIM115 (it lives as long as this process)

    def tell(**line: Any) -> None:
        report.write(json.dumps(line) + "\n")

    folder = sandbox.enter(order.root, order.folders, order.seed)
    turns = Steps()
    try:
        if order.profile_s:
            _profile(order, tell)
            turns.step_done()  # there is no next turn
        _run_again_and_again(order, folder, turns, tell)
    except BaseException as error:
        sandbox.end(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}{_where(error, folder)}")


def _run_again_and_again(order: SimpleNamespace, folder: Scratch, turns: Steps, tell: Callable[..., None]) -> None:
    """Run the script under its changes, anew whenever it has ended; of its first run the losses and facts are told."""
    facts, ends_iteration = RunFacts(tell), running.end_of_iteration()
    iterations, first_run, peak = 0, True, 0

    def stepped(optimizer: torch.optim.Optimizer | None) -> None:
        nonlocal iterations, peak
        if optimizer is not None and not ends_iteration(optimizer):
            return
        iterations += 1
        if first_run:
            facts.iteration_ended()
        if iterations % 8 == 1:
            peak = max(peak, torch.cuda.max_memory_allocated() or system_bytes(PEAK))
            tell(peak=peak, redirected=list(folder.redirected)[:20])
        turns.step_done()

    facts.install()
    for name in order.names:
        changes.ALL[name].apply(order.facts)
    script = order.command[0]
    while True:
        program = script if order.module else running.compiled(script)
        sandbox.begin_seeds()
        before = iterations
        with running.counted_steps(stepped):
            code = running.run_script(program, order.command)
        if iterations == before:
            sandbox.end(
                f"{script} ended with code {code}"
                if code
                else f"ended without a step: {running.UNSEEN.format('a process')}"
            )
        first_run = False
        turns.run_ended()
        facts.forget()
        gc.collect()
        ends_iteration = running.end_of_iteration()


def _where(error: BaseException, folder: Scratch) -> str:
    """The innermost line of the user's folders that an error passed."""
    where = ""
    for frame, line in traceback.walk_tb(running.script_frames(error.__traceback__)):
        file = frame.f_code.co_filename
        if folder.user_path(file).startswith(tuple(folder.folders)):
            where = f" ({os.path.basename(file)}:{line})"
    return where


def _profile(order: SimpleNamespace, tell: Callable[..., None]) -> None:
    """Profile the script into the folder `profile` of the scratch."""
    script, *arguments = order.command
    output = os.path.join(order.root, "profile")
    try:
        record_script(script, arguments, Plan(limit=order.profile_s), module=order.module, output=output)
    except NothingRecorded as error:
        tell(missing=str(error))
