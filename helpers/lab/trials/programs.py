"""Two programs in processes of their own take turns, and the ratio of their times comes out.

Each lives from its start on and has the machine for itself while it has the turn: the other one is stopped as a whole,
loader workers and ranks included, whose prefetching would else work for the next turn. The turns go A B B A.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from .. import ceilings
from ..cpu import keeps_pages
from ..estimate import AT_A_LOOK, LEAST_PAIRS, MOST_LOOKS, PRECISION, STATUS, Estimate, Row, estimate
from ..machine import OthersLoad
from . import trees, turns
from .luck import luck

TURN_S, TURN_STEPS = 0.05, 4  # a turn's least length, in seconds and in steps
# As many steps are left out before: where a turn begins, queues and prefetched batches are full. Of steps so long that
# a turn would take longer than this, it has fewer.
LONG_S = 2.0
STARTS = 4  # that the seconds of a trial are divided among
LOADED = 0.3  # cores that others use: a pair beside more is dropped
SILENCE_S = 120.0
END_S = 60.0  # at most, until processes that were killed are gone


class ProgramError(Exception):
    """A program that died, hung or ran out of memory; the message says which and with what last words."""


@dataclass(frozen=True)
class Program:
    """What is run: a command that calls `Turns.step_done`, or a function of a module with its arguments, as JSON.

    The function is called once and returns the step that is timed.
    """

    name: str
    command: Sequence[str] = ()
    function: str = ""
    arguments: Mapping[str, object] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    folder: str | None = None

    @property
    def line(self) -> list[str]:
        if self.command:
            return list(self.command)
        package = __name__.partition(".")[0]
        own = self.function.startswith(f"{package}.")  # known to the process by another name
        target = self.function.removeprefix(package) if own else self.function
        return [sys.executable, turns.__file__, target, json.dumps(dict(self.arguments))]


def trial(
    baseline: Program,
    program: Program,
    *,
    seconds: float = 60.0,
    drop: int = TURN_STEPS,
    turn_steps: int = TURN_STEPS,
    wanted: int = STARTS,
    starts: list[list[float]] | None = None,
) -> Row:
    """Let two programs take turns until it is decided or `seconds` are spent: the columns of a record.

    The first `drop` steps of a turn don't count; programs that prefetch and queue nothing need none. The seconds are
    divided among `wanted` starts, of which two take place in any case; after each it is looked whether the trial has
    `enough`, and while there are seconds an undecided one goes on, up to nine starts. A pair during which others used
    more than `LOADED` cores is dropped. A program that ends no turn in `SILENCE_S` is taken to hang. Whatever happens,
    no process of theirs is left. Both must fit into memory at once.

    `ended` says why it ended: decided, or when its seconds or starts were spent. `dropped` pairs were measured beside
    others' work. `starts` is filled with the log ratios of each start's pairs. The machine's fp32 products had the rate
    `matmul_before` and `matmul_after` (TFLOP/s). `luck` is what a start is taken to add: much on a CPU, unless both
    programs keep the pages of freed memory.
    Without an estimate there is only a `status`, which says why.
    """
    rate_before = ceilings.rate_beside()
    kept = all(keeps_pages(os.environ | dict(side.environment)) for side in (baseline, program))
    start_luck = luck(kept)
    began = time.monotonic()
    turn = {"drop": drop, "seconds": TURN_S, "steps": turn_steps}
    starts = [] if starts is None else starts
    before: list[float] = []
    after: list[float] = []
    dropped, result, enough = 0, None, False
    while not enough and len(starts) <= MOST_LOOKS:
        share = (seconds - (time.monotonic() - began)) / max(wanted - len(starts), 1)
        order = -1 if len(starts) % 2 else 1  # each of them begins every other start
        try:
            *of_sides, lost = _one_start([baseline, program][::order], share, turn)
        except ProgramError as error:
            return {STATUS: str(error)}
        ours, theirs = of_sides[::order]
        before, after, dropped = before + ours, after + theirs, dropped + lost
        starts.append(log_ratios(ours, theirs))
        result, spent = estimate(starts, start_luck, AT_A_LOOK), time.monotonic() - began
        if len(starts) < min(wanted, 2):
            continue
        enough = result is not None and result.enough
        if spent + spent / len(starts) > seconds:
            break
    if result is None:
        why = f"{dropped} pairs beside others' work" if dropped else f"turns too long for {seconds:.0f} s"
        return {STATUS: f"too few pairs, {LEAST_PAIRS} are needed: {why}"}
    ours_ms, theirs_ms = (float(np.median(seconds)) * 1e3 for seconds in (before, after))
    times = {"median_ms": theirs_ms, "baseline": baseline.name, "baseline_ms": ours_ms}
    rates = {"matmul_before": rate_before, "matmul_after": ceilings.rate_beside()}
    machine = {"luck": start_luck, "dropped": dropped} | rates
    return times | result.row() | {"ended": "decided" if enough else "time"} | machine


def _one_start(sides: Sequence[Program], seconds: float, turn: dict) -> tuple[list[float], list[float], int]:
    """One life of both: the seconds of each one's steps, pair by pair, and how many pairs others disturbed."""
    deadline = time.monotonic() + seconds
    with living(sides, SILENCE_S) as (first, second):
        steps = max(1, min(turn["steps"], round(LONG_S / first.take(turn))))  # fewer where they are long
        second.take(turn)  # as many steps to settle as the first one had
        return take_pairs(first, second, turn | {"drop": min(turn["drop"], steps), "steps": steps}, deadline)


def take_pairs(
    first: "Living",
    second: "Living",
    turn: dict,
    deadline: float,
    loaded: float = LOADED,
    precise: Callable[[Estimate], bool] = lambda alone: alone.half_width <= PRECISION / 2,
) -> tuple[list[float], list[float], int]:
    """Let two living programs take turns, A B B A: the seconds of each one's steps, pair by pair, and the lost pairs.

    It ends at the deadline (a monotonic time) or when these pairs alone are precise.
    """
    began = time.monotonic()
    sides: list[tuple[Living, list[float]]] = [(first, []), (second, [])]
    (_, ours), (_, theirs) = sides
    dropped = 0
    while time.monotonic() < deadline or len(ours) + dropped < LEAST_PAIRS:
        with OthersLoad() as load:
            steps = [side.take(turn) for side, _ in sides]
        if load.cores is not None and load.cores > loaded:
            dropped += 1
            if time.monotonic() > 2 * deadline - began:
                break
        else:
            for (_, of_side), step in zip(sides, steps, strict=True):
                of_side.append(step)
        sides.reverse()
        alone = estimate([log_ratios(ours, theirs)], luck=0.0)
        if alone and len(ours) >= 2 * LEAST_PAIRS and precise(alone):
            break
    return ours, theirs, dropped


def log_ratios(before: list[float], after: list[float]) -> list[float]:
    return [float(np.log(second / first)) for first, second in zip(before, after, strict=True)]


class Living:
    """A program's process and the pipes to it. Between its turns all of its tree is stopped."""

    def __init__(self, program: Program, silence_s: float):
        self.program, self._silence_s = program, silence_s
        self._tree, self._text = trees.Tree(uuid.uuid4().hex), b""
        self._child: subprocess.Popen | None = None
        self._words = tempfile.TemporaryFile()  # noqa: SIM115 (close closes it)
        their_orders, self._orders = os.pipe()
        self._answers, their_answers = os.pipe()
        self._theirs: tuple[int, ...] = (their_orders, their_answers)
        self._guard = trees.guard(self._tree.mark, self._answers)

    def start(self) -> None:
        variables = {trees.MARK: self._tree.mark, turns.PIPES: ",".join(map(str, self._theirs))}
        try:
            self._child = subprocess.Popen(
                self.program.line,
                env=os.environ | dict(self.program.environment) | variables,
                cwd=self.program.folder,
                pass_fds=self._theirs,
                stdin=subprocess.DEVNULL,
                stdout=self._words,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            self._tree.leader = self._child.pid
            self._guard.stdin.write(b"%d\n" % self._child.pid)
        except OSError as error:
            raise ProgramError(f"{self.program.name} does not start: {error}") from None
        for pipe in self._theirs:
            os.close(pipe)
        self._theirs = ()

    def settle(self) -> None:
        """Wait for the end of its first step, and stop it."""
        self._answer()
        self._tree.stop()

    def take(self, turn: dict) -> float:
        """Give it a turn: the mean seconds of a step, of those that count."""
        self._tree.resume()
        with contextlib.suppress(BrokenPipeError):  # it is dead: its answer says so
            os.write(self._orders, json.dumps(turn).encode() + b"\n")
        steps, seconds = self._answer()
        self._tree.stop()
        return seconds / steps

    def _answer(self) -> list[float]:
        deadline = time.monotonic() + self._silence_s
        while b"\n" not in self._text:
            ready, _, _ = select.select([self._answers], [], [], max(deadline - time.monotonic(), 0))
            if not ready:
                raise ProgramError(f"{self.program.name} hangs: no turn ended within {self._silence_s:.0f} s")
            data = os.read(self._answers, 1 << 16)
            if not data:
                raise ProgramError(self._last_words())
            self._text += data
        line, _, self._text = self._text.partition(b"\n")
        return json.loads(line)

    def _last_words(self) -> str:
        """Why it ended, and the last line that it printed."""
        code = self._child.wait(timeout=END_S)
        size = self._words.seek(0, os.SEEK_END)
        self._words.seek(max(size - 4000, 0))
        lines = self._words.read().decode(errors="replace").strip().splitlines()
        how = "was killed, as when memory runs out" if code == -signal.SIGKILL else f"ended with code {code}"
        return f"{self.program.name} {how}" + (f": {lines[-1].strip()[:200]}" if lines else "")

    def close(self) -> None:
        """Leave nothing of it: the guard ends when all of it is gone."""
        self._tree.end()
        for pipe in (self._orders, self._answers, *self._theirs):
            os.close(pipe)
        self._guard.communicate(trees.OVER, timeout=END_S)
        if self._child is not None:
            self._child.wait(timeout=END_S)
        self._words.close()


@contextlib.contextmanager
def living(programs: Sequence[Program], silence_s: float) -> Iterator[list[Living]]:
    """Started at once: of two equal programs one that is started later gets better pages, and is up to 5 % faster."""
    with contextlib.ExitStack() as until_the_end:
        processes = [until_the_end.enter_context(contextlib.closing(Living(each, silence_s))) for each in programs]
        for process in processes:
            process.start()
        for process in processes:
            process.settle()
        yield processes
