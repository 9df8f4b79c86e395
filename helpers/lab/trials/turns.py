"""The side of a process that takes turns: it runs steps while it has the turn, tells their times, and waits.

    python turns.py module:function '{"size": 64}'     # a function that returns a step to call

A loop of one's own takes part by calling `Turns.step_done()` at the end of each step. This file needs nothing but
Python's library, so that a process that imports it is that of its program.
"""

import importlib
import json
import os
import runpy
import sys
import time
from pathlib import Path

PIPES = "HELPERS_TURNS"  # in the environment: the file descriptors to read from and to write to


class Turns:
    """Takes the turns that the process at the other end of two pipes gives.

    An order is a line of JSON, `{"drop": 2, "seconds": 0.05, "steps": 4}`: leave so many steps out, then run at least
    so long and so many. The answer is `[steps, seconds]` of those that count.
    """

    def __init__(self) -> None:
        reading, writing = (int(number) for number in os.environ[PIPES].split(","))
        self._orders = os.fdopen(reading, "r")
        self._answers = os.fdopen(writing, "w")
        self._order = {"drop": 0, "seconds": 0.0, "steps": 1}
        self._steps, self._began = 0, time.perf_counter()

    def step_done(self) -> None:
        """To be called at the end of each step. It returns at once, or when the next turn has come."""
        self._steps += 1
        order, counted = self._order, self._steps - self._order["drop"]
        if counted == 0:  # what is queued on a GPU belongs to the steps that are left out
            _synchronize()
            self._began = time.perf_counter()
        if counted < order["steps"] or time.perf_counter() - self._began < order["seconds"]:
            return
        _synchronize()
        self._answers.write(json.dumps([counted, time.perf_counter() - self._began]) + "\n")
        self._answers.flush()
        line = self._orders.readline()
        if not line:  # the other end is gone
            os._exit(0)
        self._order, self._steps, self._began = json.loads(line), 0, time.perf_counter()


def _synchronize() -> None:
    torch = sys.modules.get("torch")
    if torch and torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _main(target: str, arguments: str) -> None:
    sys.path[0] = os.getcwd()  # not this file's folder
    module, _, name = target.partition(":")
    if module.startswith("."):  # one of this package
        boot = runpy.run_path(str(Path(__file__).resolve().parents[2] / "boot.py"))
        boot["load"]()
        module = boot["NAME"] + module
    turns = Turns()
    step = getattr(importlib.import_module(module), name)(**json.loads(arguments))
    while True:
        step()
        turns.step_done()


if __name__ == "__main__":
    _main(*sys.argv[1:])
