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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from .. import ceilings
from ..estimate import LEAST_PAIRS, LUCK, Estimate, estimate
from ..machine import OthersLoad
from . import trees, turns

TURN_S, TURN_STEPS = 0.05, 4  # a turn's least length, in seconds and in steps
# As many steps are left out before: where a turn begins, queues and prefetched batches are full. Of steps so long that
# a turn would take longer than this, it has fewer.
LONG_S = 2.0
PRECISION = 0.02  # half the interval's width at which a trial ends
STARTS = 3
CLEAR = 0.05  # an effect below this needs `STARTS` starts
LOADED = 0.3  # cores that others use: a pair beside more is dropped
TOGETHER = 0.45  # share of the free memory that two programs may take; above it they live one after the other
APART = 0.03  # luck of programs that didn't live at the same time, beside the machine's drift
SILENCE_S = 120.0


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
        return [sys.executable, turns.__file__, self.function, json.dumps(dict(self.arguments))]


@dataclass(frozen=True)
class Trial:
    """What a trial of a program against its baseline gave.

    `ended` says why it ended: at the precision that was asked for, or when its seconds were spent. `dropped` pairs were
    measured beside others' work. `matmul_tflops` is the rate of the machine's fp32 products before and after. Without
    an estimate, `reason` says why there is none.
    """

    name: str
    baseline: str
    estimate: Estimate | None
    ended: str = ""
    dropped: int = 0
    seconds: float = 0.0
    reason: str = ""
    baseline_ms: float = float("nan")
    median_ms: float = float("nan")
    matmul_tflops: tuple[float, float] = (float("nan"), float("nan"))

    def row(self) -> dict[str, object]:
        """The columns of a record."""
        if self.estimate is None:
            return {"status": self.reason}
        times = {"median_ms": self.median_ms, "baseline": self.baseline, "baseline_ms": self.baseline_ms}
        before, after = self.matmul_tflops
        machine = {"dropped": self.dropped, "matmul_before": before, "matmul_after": after}
        return times | self.estimate.row() | {"ended": self.ended} | machine


def trial(
    baseline: Program,
    program: Program,
    *,
    seconds: float = 60.0,
    precision: float = PRECISION,
    turn_s: float = TURN_S,
    turn_steps: int = TURN_STEPS,
    drop: int | None = None,
    wanted: int = STARTS,
    silence_s: float = SILENCE_S,
    loaded: float = LOADED,
) -> Trial:
    """Let two programs take turns until the interval is narrow enough or `seconds` are spent.

    The first `drop` steps of a turn don't count; as many as `turn_steps` unless given. Programs that prefetch and queue
    nothing need none. The seconds are divided among `wanted` starts: one, where few pairs fit into them. A pair during
    which others used more than `loaded` cores is dropped. A program that ends no turn in `silence_s` is taken to hang.
    Whatever happens, no process of theirs is left.
    """
    rate_before = ceilings.rate_beside()
    began = time.monotonic()
    starts: list[list[float]] = []
    times: dict[str, list[float]] = {baseline.name: [], program.name: []}
    dropped, reason, luck = 0, "", LUCK
    turn = {"drop": turn_steps if drop is None else drop, "seconds": turn_s, "steps": turn_steps}
    while True:
        left = seconds - (time.monotonic() - began)
        share = left / max(wanted - len(starts), 1)
        try:
            pairs, lost, apart = _one_start(baseline, program, share, turn, silence_s, times, precision, loaded)
        except ProgramError as error:
            reason = str(error)
            break
        dropped += lost
        luck = max(luck, APART) if apart else luck
        starts.append(pairs)
        now, spent = estimate(starts, luck), time.monotonic() - began
        took = spent / len(starts)
        if now and now.half_width <= precision and (abs(now.ratio - 1) > CLEAR or len(starts) >= wanted):
            break
        if spent + took > seconds:
            break
    result = estimate(starts, luck)
    if result is None and not reason:
        why = f"{dropped} pairs beside others' work" if dropped else f"turns too long for {seconds:.0f} s"
        reason = f"too few pairs, {LEAST_PAIRS} are needed: {why}"
    narrow = result is not None and result.half_width <= precision
    return Trial(
        program.name,
        baseline.name,
        None if reason else result,
        f"±{precision:.0%}" if narrow else "time",
        dropped,
        time.monotonic() - began,
        reason,
        _median_ms(times[baseline.name]),
        _median_ms(times[program.name]),
        (rate_before, ceilings.rate_beside()),
    )


def _median_ms(seconds: list[float]) -> float:
    return float(np.median(seconds)) * 1e3 if seconds else float("nan")


def _one_start(
    baseline: Program,
    program: Program,
    seconds: float,
    turn: dict,
    silence_s: float,
    times: dict[str, list[float]],
    precision: float,
    loaded: float,
) -> tuple[list[float], int, bool]:
    """The log ratios of one life of both, how many pairs others disturbed, and whether they lived apart."""
    deadline = time.monotonic() + seconds
    with living(baseline, silence_s) as first:
        whole, turn = turn, _fitted(turn, first.take(turn))
        if first.resident_bytes() > TOGETHER * _free_bytes(first):
            return (*_apart(first, program, deadline, (whole, turn), silence_s, times), True)
        with living(program, silence_s) as second:
            second.take(whole)  # as many steps to settle as the first one had
            ours, theirs, dropped = take_pairs(first, second, turn, deadline, precision, loaded)
    times[baseline.name] += ours
    times[program.name] += theirs
    return log_ratios(ours, theirs), dropped, False


def take_pairs(
    first: "Living", second: "Living", turn: dict, deadline: float, precision: float = PRECISION, loaded: float = LOADED
) -> tuple[list[float], list[float], int]:
    """Let two living programs take turns, A B B A: the seconds of each one's steps, pair by pair, and the lost pairs.

    It ends at the deadline (a monotonic time) or when half the interval is half of `precision`.
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
        if alone and len(ours) >= 2 * LEAST_PAIRS and alone.half_width <= precision / 2:
            break
    return ours, theirs, dropped


def log_ratios(before: list[float], after: list[float]) -> list[float]:
    return [float(np.log(second / first)) for first, second in zip(before, after, strict=False)]


def _fitted(turn: dict, step_s: float) -> dict:
    """A turn of fewer steps where they are long."""
    steps = max(1, min(turn["steps"], round(LONG_S / step_s)))
    return turn | {"drop": min(turn["drop"], steps), "steps": steps}


def _apart(
    first: "Living",
    program: Program,
    deadline: float,
    turns: tuple[dict, dict],
    silence_s: float,
    times: dict[str, list[float]],
) -> tuple[list[float], int]:
    """Both lives one after the other, where the memory holds only one: turn by turn in the order in which they came.

    `turns` are the one to settle in, and the others.
    """
    whole, turn = turns
    until = time.monotonic() + (deadline - time.monotonic()) / 2
    ours = _turns_until(first, until, turn)
    trees.end(first.mark)
    with living(program, silence_s) as second:
        second.take(whole)
        theirs = _turns_until(second, deadline, turn)
    times[first.program.name] += ours
    times[program.name] += theirs
    return log_ratios(ours, theirs), 0


def _turns_until(side: "Living", deadline: float, turn: dict) -> list[float]:
    steps = [side.take(turn) for _ in range(LEAST_PAIRS)]
    while time.monotonic() < deadline and len(steps) < 50:
        steps.append(side.take(turn))
    return steps


def _free_bytes(process: "Living") -> float:
    """Memory that programs may take: what is available now, and what this one has taken of it."""
    with contextlib.suppress(OSError, StopIteration):
        with open("/proc/meminfo") as lines:
            kib = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
        return kib * 1024 + process.resident_bytes()
    return float("inf")


class Living:
    """A program's process and the pipes to it. Between its turns all of its tree is stopped."""

    def __init__(self, program: Program, silence_s: float):
        self.program, self._silence_s = program, silence_s
        self.mark, self._text = uuid.uuid4().hex, b""
        self._child: subprocess.Popen | None = None
        self._words = tempfile.TemporaryFile()  # noqa: SIM115 (end closes it)
        their_orders, self._orders = os.pipe()
        self._answers, their_answers = os.pipe()
        self._theirs: tuple[int, ...] = (their_orders, their_answers)
        self._guard = trees.guard(self.mark)

    def start(self) -> None:
        """Start it, wait for the end of its first step, and stop it."""
        variables = {trees.MARK: self.mark, turns.PIPES: ",".join(map(str, self._theirs))}
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
        except OSError as error:
            raise ProgramError(f"{self.program.name} does not start: {error}") from None
        for pipe in self._theirs:
            os.close(pipe)
        self._theirs = ()
        self._answer()
        trees.stop(self.mark)

    def take(self, turn: dict) -> float:
        """Give it a turn: the mean seconds of a step, of those that count."""
        trees.resume(self.mark)
        with contextlib.suppress(BrokenPipeError):  # it is dead: its answer says so
            os.write(self._orders, json.dumps(turn).encode() + b"\n")
        steps, seconds = self._answer()
        trees.stop(self.mark)
        return seconds / steps

    def resident_bytes(self) -> int:
        return trees.resident_bytes(self.mark)

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
        code = self._child.wait(timeout=trees.CHILDREN_END_S)
        size = self._words.seek(0, os.SEEK_END)
        self._words.seek(max(size - 4000, 0))
        lines = self._words.read().decode(errors="replace").strip().splitlines()
        how = "was killed, as when memory runs out" if code == -signal.SIGKILL else f"ended with code {code}"
        return f"{self.program.name} {how}" + (f": {lines[-1].strip()[:200]}" if lines else "")

    def end(self) -> None:
        """Leave nothing of it."""
        trees.end(self.mark)
        if self._child is not None:
            self._child.wait(timeout=trees.CHILDREN_END_S)
        self._guard.stdin.close()
        self._guard.wait(timeout=trees.CHILDREN_END_S)
        self._words.close()
        for pipe in (self._orders, self._answers, *self._theirs):
            os.close(pipe)


@contextlib.contextmanager
def living(program: Program, silence_s: float) -> Iterator[Living]:
    process = Living(program, silence_s)
    try:
        process.start()
        yield process
    finally:
        process.end()
