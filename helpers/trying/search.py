"""The order of trials within the seconds: the script alone, each change beside it, the best ones together, their total.

A change is tried in two new processes, one with it and one without, which start at once and take turns: both are always
at the same step, since steps may take longer as a training goes on. Then changes that made the script faster are added
one by one to those kept so far, if a pair beside these says so, and the last is tried as a pair of its own.

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..lab.arguments import check_choice
from ..lab.cpu import KEPT
from ..lab.estimate import FASTER, Estimate, estimate
from ..lab.memory import GIB
from ..lab.trials import Program, ProgramError
from ..lab.trials.luck import luck
from ..lab.trials.programs import SILENCE_S, STARTS, Living, living, log_ratios, take_pairs
from . import changes, child, losses, probes, table
from .edits import Shell
from .table import Result, Tried

TURN_S, TURN_STEPS = 0.25, 4  # a turn's least length; one more step is left out before
LONG_S = 0.5  # a turn of longer steps has fewer, down to one, of which none is left out
OBSERVED, OBSERVED_S = 1 / 6, 30.0  # of the seconds, and seconds at most, in which the script runs alone
HOPELESS = 1.5  # a change that takes so many times as long gets the fewest turns
PATIENCE_S = 10.0  # without an answer, beyond twice the seconds of a start
PAIRS = 8  # that are waited for
LEAST_STEPS = 60  # of the script with another seed
QUIET = {
    "WANDB_MODE": "disabled",
    "WANDB_DISABLED": "true",
    "MLFLOW_TRACKING_URI": "file:./mlruns",
    "COMET_MODE": "DISABLED",
    "NEPTUNE_MODE": "debug",
    "CLEARML_OFFLINE_MODE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",
}


class CannotTry(Exception):
    """The script can't be tried; the message says why in one line."""


@dataclass
class Seen:
    """What a process told in its report."""

    losses: list[float | None] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    peak: float = math.nan  # bytes
    redirected: list[str] = field(default_factory=list)


def read(report: Path) -> Seen:
    seen = Seen()
    for line in report.read_text().splitlines():
        told = json.loads(line)
        seen.losses += told.pop("losses", [])
        vars(seen).update(told)
    return seen


@dataclass(frozen=True)
class Side:
    """A process of a trial: the script's command, under these changes, with this seed, freed pages kept or not."""

    command: Sequence[str]
    names: Sequence[str] = ()
    seed: int = 0
    kept: bool = True


class Search:
    """One search: the script, the clock, and what was found."""

    def __init__(
        self, script: str | Path, arguments: Sequence[str], module: bool, seconds: float, workspace: str, tell: Callable
    ) -> None:
        self.command, self.module = [str(script), *map(str, arguments)], module
        self.seconds, self.until = seconds, time.monotonic() + seconds
        self.workspace, self.tell = workspace, tell
        chosen = any(name in os.environ for name in (*KEPT, "LD_PRELOAD"))
        self.kept = {} if chosen else KEPT
        self.facts: dict[str, Any] = {}
        self.twin = Seen()  # the base with another seed
        self.turn: dict[str, float] = {}
        self.turn_s = TURN_S
        self.start_s = 0.0
        self.result = Result(" ".join(self.command))

    @property
    def left(self) -> float:
        return self.until - time.monotonic()

    @property
    def pairs_s(self) -> float:
        """The seconds that the fewest pairs take."""
        return PAIRS * 2 * self.turn_s

    @property
    def least_s(self) -> float:
        """The seconds that one trial takes at least."""
        return self.start_s + self.pairs_s

    @contextmanager
    def running(self, *sides: Side, silence_s: float = 0.0) -> Iterator[list[tuple[Living, Path]]]:
        """Processes that run the script, started at once, and the files of their reports."""
        homes = [tempfile.mkdtemp(dir=self.workspace) for _ in sides]
        programs = [self._program(side, home) for side, home in zip(sides, homes, strict=True)]
        try:
            with living(programs, silence_s or 2 * self.start_s + PATIENCE_S) as processes:
                yield [(process, Path(home, "report")) for process, home in zip(processes, homes, strict=True)]
        finally:
            for home in homes:
                shutil.rmtree(home, ignore_errors=True)

    def _program(self, side: Side, home: str) -> Program:
        script, folders = side.command[0], [os.getcwd()]
        if not self.module:
            script = os.path.realpath(script)
            folders.append(os.path.dirname(script))
        command = [script, *side.command[1:]]
        order = child.Order(command, self.module, home, folders, side.seed, list(side.names), self.facts)
        environment = QUIET | {"TORCHINDUCTOR_CACHE_DIR": os.path.join(self.workspace, "inductor")}
        environment |= self.kept if side.kept else {}
        for name in side.names:
            environment |= changes.ALL[name].environment
        command = [sys.executable, "-c", child.BOOT, json.dumps(asdict(order))]
        return Program(" + ".join(side.names) or side.command[0], command, environment=environment)

    def compare(self, one: Side, other: Side, seconds: float, wanted: int) -> tuple[Estimate | None, Seen, Seen]:
        """How one side's time compares to the other's, from up to so many starts, and what both told in the last."""
        until, starts = time.monotonic() + seconds, []
        while not starts or (len(starts) < wanted and until - time.monotonic() > self.least_s):
            with self.running(one, other, silence_s=max(seconds, 2 * self.start_s + PATIENCE_S)) as running:
                left = until - time.monotonic()
                more = min(wanted - len(starts) - 1, max(int((left - self.pairs_s) / self.least_s), 0))
                (first, _), (second, _) = running
                starts.append(self._pairs(first, second, (left - more * self.start_s) / (more + 1)))
                seen = [read(report) for _, report in running]
        return estimate(starts, luck(one.kept and other.kept)), seen[0], seen[1]

    def _pairs(self, first: Living, second: Living, seconds: float) -> list[float]:
        """The log ratios of two living processes, from turns for so long."""
        for side in (first, second):
            side.take(self.turn)
        if second.take(self.turn) > HOPELESS * first.take(self.turn):
            seconds = 0.0
        ours, theirs, _ = take_pairs(first, second, self.turn, time.monotonic() + seconds, loaded=math.inf)
        return log_ratios(ours, theirs)


def try_script(
    script: str | Path,
    arguments: Sequence[str] = (),
    *,
    module: bool = False,
    seconds: float = 300.0,
    only: Sequence[str] = (),
    tell: Callable[[str], None] = lambda line: None,
) -> Result:
    """Try changes on a training script, which stays as it is, for about so many seconds.

    `only` names the changes to try; `tell` gets a line after each trial. Needs Linux, whose processes can be stopped as
    a whole. CannotTry if the script fails as it is or never steps.
    """
    for name in only:
        check_choice([*changes.ALL, *probes.COUNTED.values()], change=name)
    with _search(script, arguments, module, seconds, tell) as search:
        _try_all(search, only)
        _combine(search)
        search.result.tried += probes.counted(search.facts, only)
    return search.result


def try_edited(
    script: str | Path,
    arguments: Sequence[str],
    edited: str | Path,
    edited_arguments: Sequence[str],
    *,
    seconds: float = 120.0,
    judged: bool = True,
    tell: Callable[[str], None] = lambda line: None,
) -> Result:
    """A script and one that was edited by hand, in turns for about so many seconds: time, losses, memory.

    `judged`: losses are compared with those of another seed, too, which takes one more start.
    """
    with _search(script, arguments, False, seconds, tell) as search:
        search.twin = _other_seed(search) if judged else Seen()
        search.result.tried = [_try(search, Side([str(edited), *map(str, edited_arguments)]), search.left)]
    return search.result


@contextmanager
def _search(
    script: str | Path, arguments: Sequence[str], module: bool, seconds: float, tell: Callable
) -> Iterator[Search]:
    """A search of which the script was observed."""
    with tempfile.TemporaryDirectory(prefix="dlspeed-try-", ignore_cleanup_errors=True) as workspace:
        search = Search(script, arguments, module, seconds, workspace, tell)
        try:
            _observe(search)
            yield search
        except ProgramError as error:
            raise CannotTry(str(error)) from None


def _observe(search: Search) -> None:
    """Let the script run alone: its facts, its time, and how many steps a turn has."""
    began, result = time.monotonic(), search.result
    with search.running(Side(search.command), silence_s=max(search.seconds, SILENCE_S)) as [(base, report)]:
        search.start_s = time.monotonic() - began
        times = [base.take({"drop": 1, "seconds": 0.0, "steps": 2})]
        until = time.monotonic() + min(OBSERVED * search.seconds, OBSERVED_S)
        while len(times) < 4 or time.monotonic() < until:
            steps = max(1, min(max(TURN_STEPS, math.ceil(TURN_S / times[-1])), round(LONG_S / times[-1])))
            search.turn = {"drop": int(steps > 1), "seconds": 0.0, "steps": steps}
            times.append(base.take(search.turn))
        seen = read(report)
    step_s = sorted(times)[len(times) // 2]
    if not seen.facts:
        raise CannotTry(f"{search.command[0]} ends too early, or its steps of {step_s:.2g} s are too long")
    search.facts, search.turn_s = seen.facts, max(TURN_S, (steps + search.turn["drop"]) * step_s)
    result.pages_kept = bool(search.kept) and search.facts["device"] == "cpu"
    result.step_ms, result.peak_gib, result.redirected = step_s * 1e3, seen.peak / GIB, seen.redirected
    search.tell(f"base: {result.step_ms:.4g} ms a step, started in {search.start_s:.0f} s")


def _try_all(search: Search, only: Sequence[str]) -> None:
    applying, result = [], search.result
    for name, change in changes.ALL.items():
        if only and name not in only:
            continue
        if reason := change.missing_because(search.facts):
            result.not_tried.append({"change": name, "reason": reason})
        else:
            applying.append(name)
    applying.sort(key=lambda name: -changes.ALL[name].promise(search.facts) / changes.ALL[name].patience)
    if applying:
        search.twin = _other_seed(search)
    for place, name in enumerate(applying):
        useful = sum(tried.useful for tried in result.tried)
        left = search.left - min(useful * search.least_s, 0.3 * search.seconds)  # the rest is for their combination
        if left < search.least_s and result.tried:
            result.not_tried.append({"change": name, "reason": f"the {search.seconds:.0f} s were spent"})
            continue
        share = changes.ALL[name].patience / sum(changes.ALL[waiting].patience for waiting in applying[place:])
        tried = _try(search, Side(search.command, (name,)), max(left * share, search.least_s))
        result.tried.append(tried)
        search.tell(table.row(tried))


def _other_seed(search: Search) -> Seen:
    """The script with another seed."""
    try:
        with search.running(Side(search.command, seed=1)) as [(twin, report)]:
            until = time.monotonic() + 0.05 * search.seconds
            while len(read(report).losses) < LEAST_STEPS and time.monotonic() < until:
                twin.take(search.turn)
            return read(report)
    except ProgramError as error:
        search.result.notes.append(f"the script with another seed: {error}")
        return Seen()


def _try(search: Search, side: Side, seconds: float) -> Tried:
    """Changes, or a script edited by hand, beside the script as it is for so long, start included."""
    began, names = time.monotonic(), side.names
    parts = [changes.ALL[name] for name in names]
    edits = [edit for part in parts for edit in part.edits(search.facts)]
    row: dict[str, Any] = {"change": " + ".join(names) or side.command[0], "edit": "; ".join(map(str, edits))}
    row["kind"] = parts[0].kind if parts else "change"
    of_pages = changes.KeptPages.name in names
    try:
        before = Side(search.command, kept=not of_pages)
        took, base, seen = search.compare(before, side, seconds, STARTS if of_pages else 2)
    except ProgramError as error:
        return Tried(**row, verdict="failed", same=False, seconds=time.monotonic() - began, reason=str(error))
    row |= {"seconds": time.monotonic() - began, "peak_gib": seen.peak / GIB}
    search.result.redirected = sorted({*search.result.redirected, *base.redirected})
    if took is None:
        return Tried(**row, verdict="undecided", reason=f"too few turns in {seconds:.0f} s")
    row |= {"gain_share": 1 - took.ratio, "low": 1 - took.high, "high": 1 - took.low}
    row["verdict"] = took.verdict
    if row["kind"] == "probe":
        return Tried(**row, losses="another training")
    judged = losses.compare(base.losses, seen.losses, search.twin.losses)
    return Tried(**row, losses=str(judged), same=judged.same)


def _combine(search: Search) -> None:
    """Add the useful changes one by one, the best first; each is kept if a pair beside those before says so.

    The allocator comes before all others, which were measured with its pages kept.
    """
    result, first = search.result, changes.KeptPages.name
    useful = [tried for tried in result.tried if tried.useful]
    useful.sort(key=lambda tried: (tried.change != first, -tried.gain_share))
    for tried in useful:
        name = tried.change
        group = changes.ALL[name].group
        if group and group in {changes.ALL[other].group for other in result.kept}:
            continue
        if not result.kept:
            result.kept, result.together = [name], tried
        elif search.left < 2 * search.least_s:
            result.notes.append(f"{name} wasn't tried on top: the {search.seconds:.0f} s were spent")
        else:
            share = max((search.left - search.least_s) / (2 * len(useful)), search.least_s)
            beside = _on_top(search, name, share)
            faster = beside is not None and beside.verdict == FASTER
            gain = f"{1 - beside.ratio:.0%} of the step" if faster else "left out"
            search.tell(f"  {name} on top of the others: {gain}")
            result.kept += [name] if faster else []
    if len(result.kept) > 1:
        result.together = _try(search, Side(search.command, result.kept), max(search.left, search.least_s))
    edits = [edit for name in result.kept for edit in changes.ALL[name].edits(search.facts)]
    shell = dict(pair for edit in edits if isinstance(edit, Shell) for pair in edit.variables.items())
    result.edits = [edit for edit in edits if not isinstance(edit, Shell)] + ([Shell(shell)] if shell else [])


def _on_top(search: Search, name: str, seconds: float) -> Estimate | None:
    """The effect of a change beside a process with those that are kept."""
    kept = search.result.kept
    try:
        return search.compare(Side(search.command, kept), Side(search.command, [*kept, name]), seconds, 1)[0]
    except ProgramError:
        return None
