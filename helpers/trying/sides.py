"""The processes of a search: a script as it is or under changes, alone or in pairs that take turns at the same step.

All processes keep the pages of freed memory: where these are returned, one start of a training on a CPU can be a tenth
faster than the next, which would pass for the effect of a change. What keeping them gains is a change, too, and tried
beside starts of the script that return them.
"""

import json
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .. import boot
from ..lab.cpu import KEPT
from ..lab.estimate import AT_A_LOOK, LEAST_PAIRS, MOST_LOOKS, PRECISION, UNDECIDED, Estimate, estimate, verdict_class
from ..lab.trials import Program, ProgramError
from ..lab.trials.programs import Living, alike, living, start_noise, stretch, stretch_ratios, take_pairs
from ..script.running import QUIET
from . import changes

PROGRAM = boot.program("trying.child")

TURN_S, TURN_STEPS = 0.25, 4  # a turn's least length; one more step is left out before, where turns are alike
LONG_S = 0.5  # a turn of longer steps has fewer, down to one, of which none is left out
HOPELESS = 1.2  # a change that takes so many times as long beyond doubt gets no more turns
CLEAR, NARROW = 2, 10  # half an interval's width is known to so small a part of the effect: for a verdict, for a ratio
PATIENCE_S = 10.0  # without an answer, beyond twice the seconds of a start
PAIRS = 8  # that are waited for, or more where turns are unlike one another


@dataclass
class Seen:
    """What a process told in its report."""

    losses: list[float | None] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    peak: float = math.nan  # bytes
    redirected: list[str] = field(default_factory=list)
    missing: str = ""  # why there is no profile


def read(report: Path) -> Seen:
    seen = Seen()
    for line in report.read_text().splitlines():
        told = json.loads(line)
        seen.losses += told.pop("losses", [])
        vars(seen).update(told)
    return seen


@dataclass(frozen=True)
class Side:
    """A process: the script's command, under these changes, with this seed, freed pages kept or not.

    `python` is another environment's; one that is watched for `profile_s` takes no turns.
    """

    command: Sequence[str]
    names: Sequence[str] = ()
    seed: int = 0
    kept: bool = True
    python: str = sys.executable
    profile_s: float = 0.0


class Sides:
    """Starts the processes of one script, and knows what a start and a turn take."""

    def __init__(self, script: str | Path, arguments: Sequence[str], module: bool, workspace: str) -> None:
        self.command, self.module, self.workspace = [str(script), *map(str, arguments)], module, workspace
        chosen = any(name in os.environ for name in (*KEPT, "LD_PRELOAD"))
        self.kept = {} if chosen else KEPT
        self.facts: dict[str, Any] = {}
        self.turn: dict[str, float] = {}
        self.turn_s, self.pairs = TURN_S, PAIRS
        self.start_s = 0.0

    @property
    def pairs_s(self) -> float:
        """The seconds that the fewest pairs take."""
        return self.pairs * 2 * self.turn_s

    @property
    def least_s(self) -> float:
        """The seconds that one trial takes at least."""
        return self.start_s + self.pairs_s

    @contextmanager
    def running(self, *sides: Side, silence_s: float) -> Iterator[list[tuple[Living, Path]]]:
        """Processes that run the script, started at once, and the files of their reports."""
        homes = [tempfile.mkdtemp(dir=self.workspace) for _ in sides]
        programs = [self._program(side, home) for side, home in zip(sides, homes, strict=True)]
        try:
            with living(programs, silence_s) as processes:
                yield [(process, Path(home, "report")) for process, home in zip(processes, homes, strict=True)]
        finally:
            for home in homes:
                shutil.rmtree(home, ignore_errors=True)

    def _program(self, side: Side, home: str) -> Program:
        script, folders = side.command[0], [os.getcwd()]
        if not self.module:
            script = os.path.realpath(script)
            folders.append(os.path.dirname(script))
        order = asdict(side) | {"command": [script, *side.command[1:]], "module": self.module, "facts": self.facts}
        order |= {"root": home, "folders": folders}
        environment = QUIET | {"TORCHINDUCTOR_CACHE_DIR": os.path.join(self.workspace, "inductor")}
        environment |= self.kept if side.kept else {}
        for name in side.names:
            environment |= changes.ALL[name].environment
        command = [side.python, "-c", PROGRAM, json.dumps(order)]
        return Program(" + ".join(side.names) or side.command[0], command, environment=environment)

    def fit_turn(self, process: Living, seconds: float) -> float:
        """Let a process step for so long; the seconds of a step, from which a turn gets its length.

        Where turns are unlike one another none of their steps is left out, as it may be the one that takes long, and a
        trial has some stretches that are alike at least.
        """
        times, until = [process.take({"drop": 1, "seconds": 0.0, "steps": 2})], time.monotonic() + seconds
        while len(times) < 4 or time.monotonic() < until:
            steps = max(1, min(max(TURN_STEPS, math.ceil(TURN_S / times[-1])), round(LONG_S / times[-1])))
            self.turn = {"drop": int(steps > 1), "seconds": 0.0, "steps": steps}
            times.append(process.take(self.turn))
        step_s = sorted(times)[len(times) // 2]
        if not alike(times[1:]):
            self.turn["drop"], size = 0, stretch(times[1:], times[1:])
            self.pairs = max(PAIRS, LEAST_PAIRS * size) if alike(times[1:], size) else PAIRS
        self.turn_s = max(TURN_S, (steps + self.turn["drop"]) * step_s)
        return step_s


@dataclass
class Trial:
    """Two sides beside each other, start by start, and what both told in the last.

    It goes on until it is decided, or `narrow`, where the ratio itself is wanted.
    """

    before: Side
    after: Side
    promise: float = 1.0  # the share of a step that the change is likely to take away
    most: float = 1.0  # at most
    patience: float = 1.0  # how much longer than others it may take
    narrow: bool = False
    starts: list[list[float]] = field(default_factory=list)  # the log ratios of each one's pairs
    seen: list[Seen] = field(default_factory=list)
    seconds: float = 0.0
    error: str = ""

    @property
    def start_noise(self) -> float:
        return start_noise(self.before.kept and self.after.kept)

    @property
    def estimate(self) -> Estimate | None:
        return estimate(self.starts, self.start_noise, AT_A_LOOK)

    @property
    def hope(self) -> float:
        """The share of a step that it could still bring: by the account, and once it was tried by its interval."""
        return 1 - self.estimate.low if self.estimate else self.promise

    @property
    def open(self) -> bool:
        """Whether another start could tell more."""
        known = self.estimate
        decided = known and (known.enough if self.narrow else verdict_class(known.verdict) != UNDECIDED)
        return not (self.error or len(self.starts) > MOST_LOOKS or decided)

    def least_s(self, sides: Sides) -> float:
        """The seconds of another start at least: with less than half of the pairs it would blur what others told."""
        if not self.starts:
            return self.patience * sides.least_s
        return max((sides.start_s + self.seconds / len(self.starts)) / 2, sides.least_s)

    def start(self, sides: Sides, seconds: float) -> None:
        """Start both and let them take turns for so long, the start included."""
        began = time.monotonic()
        try:
            silence_s = max(seconds, 2 * sides.start_s + PATIENCE_S)
            with sides.running(self.before, self.after, silence_s=silence_s) as running:
                (first, _), (second, _) = running
                until = max(began + seconds, time.monotonic() + sides.pairs_s)
                self.starts.append(self._pairs(first, second, sides, until))
                self.seen = [read(report) for _, report in running]
        except ProgramError as error:
            self.error = str(error)
        self.seconds += time.monotonic() - began

    def _pairs(self, first: Living, second: Living, sides: Sides, until: float) -> list[float]:
        for side in (first, second, second, first):
            side.take(sides.turn)
        least = sides.pairs if sides.pairs > PAIRS else 0
        of_both = take_pairs(first, second, sides.turn, until, math.inf, self._precise, stretch_ratios, least)
        return stretch_ratios(*of_both[:2])

    def _precise(self, alone: Estimate) -> bool:
        """Whether more pairs tell nothing: what is left is what this start adds, or little beside the effect."""
        half_width = alone.half_width * min(alone.ratio, 1)  # of the time as it was
        part = NARROW if self.narrow else CLEAR
        return alone.low > HOPELESS or half_width <= max(PRECISION, self.start_noise, abs(alone.ratio - 1) / part) / 2
