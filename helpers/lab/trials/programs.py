"""Two programs in processes of their own take turns.

Each lives from its start on and has the machine for itself while it has the turn: the other one is stopped as a whole,
loader workers and ranks included, whose prefetching would else work for the next turn. The turns go A B B A.
"""

import contextlib
import json
import math
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

from ..estimate import LEAST_PAIRS, LUCK, PRECISION, Estimate, estimate
from ..machine import OthersLoad, device
from . import trees, turns

# What a start of two equal programs adds to the ratio of their times, the standard deviation of its logarithm: from
# recorded trials of a program against itself on two cores of an EPYC, which `tests/lab/trials` keeps: 40 of programs
# that keep the pages of freed memory, 15 of such that return them, and get others back in each step.
KEPT, RETURNED = 0.034, 0.044

LOADED = 0.3  # cores that others use: a pair beside more is dropped
ALIKE = 2.0  # times as long as the shortest: turns are alike up to that
AGREE = 2.0  # standard errors of the ratio of whole times, within which the mean of pairs is taken for it
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


def start_noise(kept: bool) -> float:
    """What a trial assumes of programs that keep the pages of freed memory, or return them."""
    if device().type != "cpu":
        return LUCK
    return KEPT if kept else RETURNED


def log_ratios(before: list[float], after: list[float]) -> list[float]:
    return [float(np.log(second / first)) for first, second in zip(before, after, strict=True)]


def stretch_ratios(before: list[float], after: list[float]) -> list[float]:
    """The log ratios of pairs of equal work: of turns of the same steps, or of as many as it takes to be alike.

    Where an epoch ends, an evaluation comes or a rare step is slow, a turn tells the ratio of its own steps alone, and
    the mean of the pairs isn't the ratio of the whole times: then a pair is a stretch that holds some of everything.
    """
    pairs = log_ratios(before, after)
    typical = estimate([pairs], luck=0.0)
    if typical is None:
        return pairs
    total = sum(after) / sum(before)
    error = np.std(np.array(after) - total * np.array(before), ddof=1) * math.sqrt(len(pairs)) / sum(after)
    if abs(math.log(total / typical.ratio)) <= AGREE * error:
        return pairs
    size = stretch(before, after)
    return log_ratios(_sums(before, size), _sums(after, size))


def stretch(before: list[float], after: list[float]) -> int:
    """The turns of a stretch that is like the next one on both sides, or of the longest of which there are enough."""
    most = max(len(before) // LEAST_PAIRS, 1)
    return next((size for size in range(1, most) if alike(before, size) and alike(after, size)), most)


def alike(seconds: list[float], size: int = 1) -> bool:
    """Whether stretches of so many turns take about as long, but for one that others may have disturbed."""
    sums = sorted(_sums(seconds, size))
    return len(sums) < 2 or sums[-2] <= ALIKE * sums[0]


def _sums(seconds: list[float], size: int) -> list[float]:
    """Over stretches of so many turns, or one more."""
    return [float(part.sum()) for part in np.array_split(seconds, max(len(seconds) // size, 1))]


def take_pairs(
    first: "Living",
    second: "Living",
    turn: dict,
    deadline: float,
    loaded: float = LOADED,
    precise: Callable[[Estimate], bool] = lambda alone: alone.half_width <= PRECISION / 2,
    ratios: Callable[[list[float], list[float]], list[float]] = log_ratios,
    least: int = 0,
) -> tuple[list[float], list[float], int]:
    """Let two living programs take turns, A B B A: the seconds of each one's steps, pair by pair, and the lost pairs.

    It ends at the deadline (a monotonic time) or when these pairs alone, of which there are at least so many, are
    precise, by their `log_ratios` or others.
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
        alone = estimate([ratios(ours, theirs)], luck=0.0)
        if alone and len(ours) >= max(2 * LEAST_PAIRS, least) and precise(alone):
            break
    return ours, theirs, dropped


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
