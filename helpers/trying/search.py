"""The order of trials within the seconds: the base, each change beside it, the best ones together, their total.

The base lives throughout. Each change lives beside it for its share of the time, in turns. Then changes that made the
script faster are added one by one to those kept so far, if a pair beside these says so, and the last is tried against
the base as a pair of its own.
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

from helpers.lab.estimate import FASTER, Estimate, estimate
from helpers.lab.trials import Program, ProgramError
from helpers.lab.trials.programs import Living, living, log_ratios, take_pairs
from helpers.profiling.run_script import ROOT

from . import changes, child, losses, table
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


class UnknownChange(Exception):
    """There is no change of this name."""


class CannotTry(Exception):
    """The script can't be tried; the message says why in one line."""


@dataclass
class Seen:
    """What a process told in its report."""

    losses: list[float | None] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    peak_gib: float = math.nan
    redirected: list[str] = field(default_factory=list)


class Search:
    """One search: its workspace, the script, and the clock."""

    def __init__(
        self, script: str, arguments: Sequence[str], module: bool, seconds: float, workspace: str, tell: Callable
    ) -> None:
        self.module, self.folders = module, [os.path.realpath(os.getcwd())]
        self.run(script, arguments)
        self.until, self.seconds = time.monotonic() + seconds, seconds
        self.workspace, self.tell = Path(workspace), tell
        self.facts: dict[str, Any] = {}
        self.base = self.twin = Seen()
        self.turn, self.turn_s = dict(TURN), TURN["seconds"]
        self.start_s = 0.0
        self._count = 0

    def run(self, script: str, arguments: Sequence[str]) -> None:
        """What the next processes run."""
        self.script, self.arguments = script, list(map(str, arguments))
        folder = os.path.dirname(os.path.realpath(script))
        if not self.module and folder not in self.folders:
            self.folders.append(folder)

    @property
    def left(self) -> float:
        return self.until - time.monotonic()

    @property
    def least_s(self) -> float:
        """The seconds that one trial beside a living process takes at least."""
        return self.start_s + PAIRS * 2 * self.turn_s

    @contextmanager
    def process(self, names: Sequence[str], silence_s: float, seed: int = 0) -> Iterator[tuple[Living, Path]]:
        """A process that runs the script under these changes, and the file of its report."""
        from .scratch import Scratch

        self._count += 1
        home = self.workspace / str(self._count)
        home.mkdir()
        scratch, report = Scratch(str(home / "root"), self.folders), home / "report"
        folder = scratch.mirror_working_folder(os.getcwd())
        script = self.script if self.module else os.path.realpath(self.script)
        order = child.Order(
            script, self.arguments, self.module, str(report), scratch.root, self.folders, seed, list(names), self.facts
        )
        environment = QUIET | {"TORCHINDUCTOR_CACHE_DIR": str(self.workspace / "inductor")}
        for name in names:
            environment |= changes.ALL[name].environment
        command = [sys.executable, "-c", child.BOOT.format(root=str(ROOT)), json.dumps(asdict(order))]
        program = Program(" + ".join(names) or "the script", command, environment=environment, folder=folder)
        try:
            with living(program, silence_s) as process:
                yield process, report
        finally:
            shutil.rmtree(home, ignore_errors=True)

    def pair(self, first: Living, second: Living, seconds: float) -> tuple[Estimate | None, list[float]]:
        """Turns of two living processes for so long: the estimate, and the seconds of the first one's steps."""
        second.take(self.turn)
        if second.take(self.turn) > HOPELESS * first.take(self.turn):
            seconds = 0.0
        ours, theirs, _ = take_pairs(first, second, self.turn, time.monotonic() + seconds, loaded=math.inf)
        return estimate([log_ratios(ours, theirs)]), ours


def read(report: Path) -> Seen:
    seen = Seen()
    for line in report.read_text().splitlines() if report.exists() else ():
        try:
            told = json.loads(line)
        except ValueError:  # a line that isn't whole yet
            continue
        if "loss" in told:
            seen.losses.append(told["loss"])
        seen.batches += told.get("batches", [])
        seen.facts = told.get("facts", seen.facts)
        seen.peak_gib = max(told.get("peak", 0) / 2**30, 0 if math.isnan(seen.peak_gib) else seen.peak_gib)
        seen.redirected = told.get("redirected", seen.redirected)
    return seen


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
    valid = [*changes.ALL, *COUNTED.values()]
    unknown = [name for name in only if name not in valid]
    if unknown:
        raise UnknownChange(f"there is no change {unknown[0]!r}; valid: {', '.join(valid)}")
    result = Result(" ".join([str(script), *map(str, arguments)]), folder=os.getcwd())
    with _base(str(script), arguments, module, seconds, tell, result) as (search, base, report):
        _try_all(search, base, report, result, only)
        _combine(search, base, report, result)
        search.base = read(report)
        result.tried += _counted(search.base.facts, only)
    return result


def try_edited(
    script: str | Path,
    arguments: Sequence[str],
    edited: str | Path,
    edited_arguments: Sequence[str],
    *,
    seconds: float = 120.0,
    tell: Callable[[str], None] = lambda line: None,
) -> Result:
    """A script and one that was edited by hand, in turns for about so many seconds: time, losses, memory."""
    result = Result(" ".join([str(script), *map(str, arguments)]), folder=os.getcwd())
    with _base(str(script), arguments, False, seconds, tell, result) as (search, base, report):
        search.twin = _other_seed(search, base, result)
        search.run(str(edited), edited_arguments)
        result.tried = [_try(search, base, report, (), search.left)]
    return result


@contextmanager
def _base(
    script: str, arguments: Sequence[str], module: bool, seconds: float, tell: Callable, result: Result
) -> Iterator[tuple[Search, Living, Path]]:
    """The unchanged script, running and observed, and its report."""
    with tempfile.TemporaryDirectory(prefix="dlspeed-try-", ignore_cleanup_errors=True) as workspace:
        search = Search(script, arguments, module, seconds, workspace, tell)
        began = time.monotonic()
        try:
            with search.process((), seconds) as (base, report):
                search.start_s = time.monotonic() - began
                _observe(search, base, report, result)
                yield search, base, report
        except ProgramError as error:
            raise CannotTry(str(error)) from None
        result.redirected = search.base.redirected


def _observe(search: Search, base: Living, report: Path, result: Result) -> None:
    """Let the base run alone until its facts are there."""
    step_s = base.take({"drop": 1, "seconds": 0.0, "steps": 2})
    steps = max(1, min(TURN["steps"], round(LONG_S / step_s)))
    search.turn = TURN | {"steps": steps, "drop": int(steps > 1)}
    until = time.monotonic() + search.seconds / 8
    times = []
    while len(times) < 3 or (len(read(report).losses) < LEAST_STEPS and time.monotonic() < until):
        times.append(base.take(search.turn))
    search.base = read(report)
    if not search.base.facts:
        raise CannotTry(f"{search.script} makes {step_s:.0f} s steps: too long for {search.seconds:.0f} s")
    search.facts = search.base.facts
    search.turn_s = max(TURN["seconds"], (steps + search.turn["drop"]) * step_s)
    result.step_ms = sorted(times)[len(times) // 2] * 1e3
    result.peak_gib = search.base.peak_gib
    search.tell(f"base: {result.step_ms:.4g} ms a step, started in {search.start_s:.0f} s")


def _try_all(search: Search, base: Living, report: Path, result: Result, only: Sequence[str]) -> None:
    applying = []
    for name, change in changes.ALL.items():
        if only and name not in only:
            continue
        if reason := change.missing_because(search.facts):
            result.not_tried.append({"change": name, "reason": reason})
        else:
            applying.append(name)
    applying.sort(key=lambda name: -changes.ALL[name].promise(search.facts) / changes.ALL[name].patience)
    if applying:
        search.twin = _other_seed(search, base, result)
    for place, name in enumerate(applying):
        waiting = applying[place:]
        total = sum(changes.ALL[each].patience for each in waiting)
        useful = sum(tried.useful for tried in result.tried)
        left = search.left - min(useful * search.least_s, 0.3 * search.seconds)  # the rest is for their combination
        if left < search.least_s and result.tried:
            result.not_tried.append({"change": name, "reason": f"the {search.seconds:.0f} s were spent"})
            continue
        share = left * changes.ALL[name].patience / total
        tried = _try(search, base, report, (name,), max(share, search.least_s))
        result.tried.append(tried)
        search.tell(table.row(tried))


def _other_seed(search: Search, base: Living, result: Result) -> Seen:
    """The base with another seed."""
    try:
        with search.process((), 2 * search.start_s + PATIENCE_S, seed=1) as (twin, report):
            until = time.monotonic() + 0.05 * search.seconds
            while len(read(report).losses) < 3 * LEAST_STEPS and time.monotonic() < until:
                twin.take(search.turn)
            return read(report)
    except ProgramError as error:
        result.notes.append(f"the script with another seed: {error}")
        return Seen()


def _try(search: Search, base: Living, base_report: Path, names: tuple[str, ...], seconds: float) -> Tried:
    """Changes, or a script edited by hand, beside the base for so long, start included."""
    began = time.monotonic()
    parts = [changes.ALL[name] for name in names]
    edits = [edit for part in parts for edit in part.edits(search.facts)]
    row: dict[str, Any] = {"change": " + ".join(names) or search.script, "kind": parts[0].kind if parts else "change"}
    row |= {"about": parts[0].about if parts else "edited by hand", "edit": "; ".join(map(str, edits))}
    patience = max(2 * search.start_s + PATIENCE_S, seconds)
    try:
        with search.process(names, patience) as (process, report):
            left = max(seconds - (time.monotonic() - began), 1.0)
            took, _ = search.pair(base, process, left)
            seen = read(report)
    except ProgramError as error:
        return Tried(**row, verdict="failed", same=False, seconds=time.monotonic() - began, reason=str(error))
    row |= {"seconds": time.monotonic() - began, "peak_gib": seen.peak_gib}
    if took is None:
        return Tried(**row, verdict="undecided", reason=f"too few turns in {seconds:.0f} s")
    wide = took.verdict.startswith("no ") and took.high - took.low > WIDE
    row |= {"gain_share": 1 - took.ratio, "low": 1 - took.high, "high": 1 - took.low}
    row["verdict"] = "undecided" if wide else took.verdict
    if row["kind"] == "probe":
        return Tried(**row, losses="another training")
    unchanged = read(base_report)
    differ = any(one != other for one, other in zip(unchanged.batches, seen.batches, strict=False))
    judged = losses.compare(unchanged.losses, seen.losses, search.twin.losses, differ)
    return Tried(**row, losses=str(judged), same=judged.same)


def _combine(search: Search, base: Living, report: Path, result: Result) -> None:
    """Add the useful changes one by one, the best first; each is kept if a pair beside those before says so."""
    useful = sorted((tried for tried in result.tried if tried.useful), key=lambda tried: -tried.gain_share)
    if not useful:
        return
    kept: list[str] = [useful[0].change]
    total = useful[0]
    for tried in useful[1:]:
        groups = {changes.ALL[name].group for name in kept} - {""}
        if changes.ALL[tried.change].group in groups:
            continue
        if search.left < 2 * search.least_s:
            result.notes.append(f"{tried.change} wasn't tried on top: the {search.seconds:.0f} s were spent")
            continue
        share = max((search.left - search.least_s) / (2 * len(useful)), search.least_s)
        beside = _on_top(search, kept, tried.change, share)
        if beside is not None and beside.verdict == FASTER:
            kept.append(tried.change)
            search.tell(f"  {tried.change} on top of the others: {1 - beside.ratio:.0%} of the step")
        else:
            search.tell(f"  {tried.change} on top of the others: left out")
    if len(kept) > 1:
        total = _try(search, base, report, tuple(kept), max(search.left, search.least_s))
    result.kept, result.together = kept, total
    result.edits = [edit for name in kept for edit in changes.ALL[name].edits(search.facts)]


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


def _on_top(search: Search, kept: Sequence[str], name: str, seconds: float) -> Estimate | None:
    began, silence = time.monotonic(), max(2 * search.start_s + PATIENCE_S, seconds)
    try:
        with search.process(kept, silence) as (before, _), search.process([*kept, name], silence) as (after, _):
            before.take(search.turn)
            return search.pair(before, after, max(seconds - (time.monotonic() - began), 1.0))[0]
    except ProgramError:
        return None
