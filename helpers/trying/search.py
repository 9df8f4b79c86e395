"""The order of trials within the seconds: the base, each change beside it, the best ones together, their total.

The base lives throughout. Each change lives beside it for its share of the time, in turns. Then changes that made the
script faster are added one by one to those kept so far, if a pair beside these says so, and the last is tried against
the base as a pair of its own.

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

from helpers.lab.arguments import check_choice
from helpers.lab.cpu import KEPT
from helpers.lab.estimate import FASTER, LUCK, LUCK_RETURNED, Estimate, estimate
from helpers.lab.memory import AVAILABLE, GIB, system_bytes
from helpers.lab.trials import Program, ProgramError
from helpers.lab.trials.programs import STARTS, Living, living, log_ratios, take_pairs
from helpers.profiling.run_script import ROOT

from . import changes, child, losses, table
from .edits import Shell
from .probes import COUNTED
from .table import Result, Tried

TURN = {"drop": 1, "seconds": 0.25, "steps": 4}
LONG_S = 0.5  # a turn of longer steps has fewer, down to one, of which none is left out
HOPELESS = 1.5  # a change that takes so many times as long gets the fewest turns
PATIENCE_S = 10.0  # without an answer, beyond twice the seconds of a start
PAIRS = 8  # that are waited for
WIDE = 0.3  # an interval of this width decides nothing
LEAST_STEPS = 20  # of the base, before facts are read
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


class Search:
    """One search: the script, the clock, and what was found; once the script runs, its process and report, too."""

    base: Living
    report: Path

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
        self.turn, self.turn_s = dict(TURN), TURN["seconds"]
        self.start_s = 0.0
        self.result = Result(" ".join(self.command))

    @property
    def left(self) -> float:
        return self.until - time.monotonic()

    @property
    def least_s(self) -> float:
        """The seconds that one trial beside a living process takes at least."""
        return self.start_s + PAIRS * 2 * self.turn_s

    @property
    def patience_s(self) -> float:
        return 2 * self.start_s + PATIENCE_S

    @contextmanager
    def process(
        self, names: Sequence[str], silence_s: float, seed: int = 0, kept: bool = True
    ) -> Iterator[tuple[Living, Path]]:
        """A process that runs the script under these changes, and the file of its report."""
        home = tempfile.mkdtemp(dir=self.workspace)
        script, folders = self.command[0], [os.getcwd()]
        if not self.module:
            script = os.path.realpath(script)
            folders.append(os.path.dirname(script))
        order = child.Order([script, *self.command[1:]], self.module, home, folders, seed, list(names), self.facts)
        environment = QUIET | {"TORCHINDUCTOR_CACHE_DIR": os.path.join(self.workspace, "inductor")}
        environment |= self.kept if kept else {}
        for name in names:
            environment |= changes.ALL[name].environment
        command = [sys.executable, "-c", child.BOOT.format(root=str(ROOT)), json.dumps(asdict(order))]
        program = Program(" + ".join(names) or "the script", command, environment=environment)
        try:
            with living(program, silence_s) as process:
                yield process, Path(home, "report")
        finally:
            shutil.rmtree(home, ignore_errors=True)

    def pairs(self, first: Living, second: Living, seconds: float) -> list[float]:
        """The log ratios of two living processes, from turns for so long."""
        second.take(self.turn)
        if second.take(self.turn) > HOPELESS * first.take(self.turn):
            seconds = 0.0
        ours, theirs, _ = take_pairs(first, second, self.turn, time.monotonic() + seconds, loaded=math.inf)
        return log_ratios(ours, theirs)

    def beside(self, names: Sequence[str], process: Living, seconds: float) -> Estimate | None:
        """The effect of a process with these changes: beside the base, which started before it, and one started after.

        That of kept pages: beside starts that return them.
        """
        until, of_pages = time.monotonic() + seconds, changes.KeptPages.name in names
        wanted = STARTS if of_pages else 1
        if wanted == 1 and self.facts["device"] == "cpu" and seconds > 2 * self.least_s:
            wanted += system_bytes(AVAILABLE) > 2 * self.result.peak_gib * GIB
        starts = [] if of_pages else [self.pairs(self.base, process, seconds / wanted)]
        while not starts or (len(starts) < wanted and until - time.monotonic() > self.least_s):
            with self.process((), self.patience_s, kept=not of_pages) as (before, _):
                share = (until - time.monotonic()) / (wanted - len(starts)) - self.start_s * bool(starts)
                starts.append(self.pairs(before, process, share))
        return estimate(starts, LUCK_RETURNED if of_pages else LUCK)


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
        check_choice([*changes.ALL, *COUNTED.values()], change=name)
    with _base(script, arguments, module, seconds, tell) as search:
        _try_all(search, only)
        _combine(search)
        search.result.tried += _counted(read(search.report).facts, only)
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
    with _base(script, arguments, False, seconds, tell) as search:
        search.twin = _other_seed(search) if judged else Seen()
        search.command = [str(edited), *map(str, edited_arguments)]
        search.result.tried = [_try(search, (), search.left)]
    return search.result


@contextmanager
def _base(
    script: str | Path, arguments: Sequence[str], module: bool, seconds: float, tell: Callable
) -> Iterator[Search]:
    """The unchanged script, running and observed."""
    with tempfile.TemporaryDirectory(prefix="dlspeed-try-", ignore_cleanup_errors=True) as workspace:
        search = Search(script, arguments, module, seconds, workspace, tell)
        began = time.monotonic()
        try:
            with search.process((), seconds) as (search.base, search.report):
                search.start_s = time.monotonic() - began
                _observe(search)
                yield search
                search.result.redirected = read(search.report).redirected
        except ProgramError as error:
            raise CannotTry(str(error)) from None


def _observe(search: Search) -> None:
    """Let the base run alone until its facts are there."""
    step_s = search.base.take({"drop": 1, "seconds": 0.0, "steps": 2})
    steps = max(1, min(TURN["steps"], round(LONG_S / step_s)))
    search.turn = TURN | {"steps": steps, "drop": int(steps > 1)}
    until = time.monotonic() + search.seconds / 8
    times = []
    while len(times) < 3 or (len(read(search.report).losses) < LEAST_STEPS and time.monotonic() < until):
        times.append(search.base.take(search.turn))
    seen = read(search.report)
    if not seen.facts:
        raise CannotTry(f"{search.command[0]} ends too early, or its steps of {step_s:.2g} s are too long")
    search.facts = seen.facts
    search.result.pages_kept = bool(search.kept) and search.facts["device"] == "cpu"
    search.turn_s = max(TURN["seconds"], (steps + search.turn["drop"]) * step_s)
    search.result.step_ms = sorted(times)[len(times) // 2] * 1e3
    search.result.peak_gib = seen.peak / GIB
    search.tell(f"base: {search.result.step_ms:.4g} ms a step, started in {search.start_s:.0f} s")


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
        tried = _try(search, (name,), max(left * share, search.least_s))
        result.tried.append(tried)
        search.tell(table.row(tried))


def _other_seed(search: Search) -> Seen:
    """The base with another seed."""
    try:
        with search.process((), search.patience_s, seed=1) as (twin, report):
            until = time.monotonic() + 0.05 * search.seconds
            while len(read(report).losses) < 3 * LEAST_STEPS and time.monotonic() < until:
                twin.take(search.turn)
            return read(report)
    except ProgramError as error:
        search.result.notes.append(f"the script with another seed: {error}")
        return Seen()


def _try(search: Search, names: Sequence[str], seconds: float) -> Tried:
    """Changes, or a script edited by hand, beside the base for so long, start included."""
    began = time.monotonic()
    parts = [changes.ALL[name] for name in names]
    edits = [edit for part in parts for edit in part.edits(search.facts)]
    row: dict[str, Any] = {"change": " + ".join(names) or search.command[0], "edit": "; ".join(map(str, edits))}
    row["kind"] = parts[0].kind if parts else "change"
    try:
        with search.process(names, max(search.patience_s, seconds)) as (process, report):
            took = search.beside(names, process, max(seconds - (time.monotonic() - began), 1.0))
            seen = read(report)
    except ProgramError as error:
        return Tried(**row, verdict="failed", same=False, seconds=time.monotonic() - began, reason=str(error))
    row |= {"seconds": time.monotonic() - began, "peak_gib": seen.peak / GIB}
    if took is None:
        return Tried(**row, verdict="undecided", reason=f"too few turns in {seconds:.0f} s")
    wide = took.verdict.startswith("no ") and took.high - took.low > WIDE
    row |= {"gain_share": 1 - took.ratio, "low": 1 - took.high, "high": 1 - took.low}
    row["verdict"] = "undecided" if wide else took.verdict
    if row["kind"] == "probe":
        return Tried(**row, losses="another training")
    judged = losses.compare(read(search.report).losses, seen.losses, search.twin.losses)
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
        result.together = _try(search, result.kept, max(search.left, search.least_s))
    edits = [edit for name in result.kept for edit in changes.ALL[name].edits(search.facts)]
    shell = dict(pair for edit in edits if isinstance(edit, Shell) for pair in edit.variables.items())
    result.edits = [edit for edit in edits if not isinstance(edit, Shell)] + ([Shell(shell)] if shell else [])


def _on_top(search: Search, name: str, seconds: float) -> Estimate | None:
    """The effect of a change beside a process with those that are kept."""
    began, kept, silence_s = time.monotonic(), search.result.kept, max(search.patience_s, seconds)
    try:
        # What starts second is a little faster on a CPU: that counts against the change.
        with search.process([*kept, name], silence_s) as (after, _), search.process(kept, silence_s) as (before, _):
            before.take(search.turn)
            return estimate([search.pairs(before, after, max(seconds - (time.monotonic() - began), 1.0))])
    except ProgramError:
        return None


def _counted(facts: dict[str, Any], only: Sequence[str]) -> list[Tried]:
    """What rarely happens: its share of the unchanged script's time."""
    rows = []
    for call, name in COUNTED.items():
        seen = facts["calls"].get(call)
        if not seen or not seen["count"] or (only and name not in only):
            continue
        reason = f"{seen['count']} times, {seen['seconds']:.2g} s of {facts['elapsed']:.3g} s"
        share = seen["seconds"] / facts["elapsed"]
        rows.append(Tried(name, "probe", gain_share=share, verdict="counted", same=False, reason=reason))
    return rows
