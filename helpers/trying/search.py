"""The order of trials within the seconds: the profile, each change beside the script, the best ones' total.

The profile tells how much of the time each change could take away. What addresses the largest share is tried first, by
a probe where no change does, until it is decided or its interval leaves less to hope for than another change promises;
what could take away next to nothing isn't tried. A change is tried in two new processes, one with it and one without,
which start at once and take turns: both are always at the same step, since steps may take longer as a training goes on.
"""

import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..faults import entries
from ..findings.diagnose import diagnose
from ..lab.arguments import check_choice
from ..lab.memory import GIB
from ..lab.trials import ProgramError
from ..lab.trials.programs import SILENCE_S
from . import changes
from .answer import COUNTED, LEAST, Result, Tried
from .change import diff
from .same_training import compare, is_same
from .sides import Seen, Side, Sides, Trial, read

PROFILED, PROFILED_S = 0.4, (25.0, 90.0)  # of the seconds, and seconds at least and most, after which it is cut
OBSERVED, OBSERVED_S = 1 / 16, 10.0  # the same for the length of a turn and for the losses of another seed
LEAST_STEPS = 60  # of the script with another seed
A_START = 0.5  # of the seconds that are left, for a start that isn't precise before
OUTSIDE = {"evaluation", "checkpoints", "drawing"}  # findings outside of the profile's account


class CannotTry(Exception):
    """The script can't be tried; the message says why in one line."""


class Search(Sides):
    """One search: the script's processes, the clock, and what was found."""

    def __init__(self, *of_script: Any, seconds: float, tell: Callable[[str], None]) -> None:
        super().__init__(*of_script)
        self.seconds, self.until, self.tell = seconds, time.monotonic() + seconds, tell
        self.twin = Seen()  # the script with another seed
        self.parts: dict[str, float] = {}  # of the profile's account
        self.result = Result(" ".join(self.command))

    @property
    def left(self) -> float:
        return self.until - time.monotonic()

    def trial(self, names: Sequence[str], promise: float = 1.0, most: float = 1.0) -> Trial:
        """Changes beside the script as it is, which keeps freed pages unless that is the change."""
        before = Side(self.command, kept=changes.KeptPages.name not in names)
        patience = sum(changes.ALL[name].patience for name in names)
        return Trial(before, Side(self.command, names), promise, most, patience)


def try_script(
    script: str | Path,
    arguments: Sequence[str] = (),
    *,
    module: bool = False,
    seconds: float = 300.0,
    only: Sequence[str] = (),
    tell: Callable[[str], None] = lambda line: None,
) -> Result:
    """Profile a training script, which stays as it is, and try changes on it, for about so many seconds.

    `only` names the changes to try, without a profile unless one is counted there; `tell` gets a line after each trial.
    Needs Linux, whose processes can be stopped as a whole. CannotTry if the script fails as it is or never steps.
    """
    for name in only:
        check_choice([*changes.ALL, *COUNTED.values()], change=name)
    with _search(script, arguments, module, seconds=seconds, tell=tell) as search:
        if not only or set(only) & set(COUNTED.values()):
            _profile(search)
        try:
            _observe(search)
        except ProgramError as error:  # of the other seed, perhaps
            _observe(search, judged=False)
            search.result.notes.append(f"losses aren't judged: {error}")
        _try_all(search, only)
        _combine(search)
        result = search.result
        for finding in result.findings:
            if (name := COUNTED.get(finding.finding)) and (not only or name in only):
                counted = {"gain_share": finding.gain_share, "verdict": "counted", "reason": finding.evidence}
                result.tried.append(Tried(name, "probe", same=False, **counted))
        return result


def try_edited(
    script: str | Path,
    arguments: Sequence[str],
    edited: str | Path,
    edited_arguments: Sequence[str],
    *,
    python: str = sys.executable,
    module: bool = False,
    seconds: float = 120.0,
    judged: bool = True,
    tell: Callable[[str], None] = lambda line: None,
) -> Result:
    """A script and one that was edited by hand, or runs in another environment, in turns for about so many seconds.

    `python` is that environment's interpreter, whose own packages are used, torch too; the result tells how the two
    differ. `judged`: losses are compared with those of another seed, too, which takes one more process.
    """
    with _search(script, arguments, module, seconds=seconds, tell=tell) as search:
        _observe(search, judged)
        command = [str(edited), *map(str, edited_arguments)]
        trial = Trial(Side(search.command), Side(command, python=python), narrow=True)
        while trial.open and (not trial.starts or search.left > trial.least_s(search)):
            trial.start(search, max(A_START * search.left, trial.least_s(search)))
        search.result.tried = [_row(search, trial)]
        ours, theirs = (seen.facts.get("environment", {}) for seen in trial.seen or (Seen(), Seen()))
        both = {name: [ours.get(name, "—"), theirs.get(name, "—")] for name in ours | theirs}
        search.result.differs = {name: values for name, values in both.items() if values[0] != values[1]}
        if python != sys.executable and not search.result.differs:
            search.result.notes.append("the environments differ in nothing that was looked at")
        return search.result


@contextmanager
def _search(*of_script: Any, **limits: Any) -> Iterator[Search]:
    with tempfile.TemporaryDirectory(prefix="dlspeed-try-", ignore_cleanup_errors=True) as workspace:
        try:
            yield Search(*of_script, workspace, **limits)
        except ProgramError as error:
            raise CannotTry(str(error)) from None


def _profile(search: Search) -> None:
    """What `dlspeed profile` finds, of a process that keeps no pages."""
    least, most = PROFILED_S
    limit = min(max(PROFILED * search.seconds, least), most)
    side, result = Side(search.command, kept=False, profile_s=limit), search.result
    with search.running(side, silence_s=limit + SILENCE_S) as [(_, report)]:
        try:
            diagnosis = diagnose(report.with_name("profile"))
        except (ValueError, OSError) as error:
            result.notes.append(f"not profiled: {read(report).missing or error}")
            return
    result.findings, search.parts = diagnosis.findings, diagnosis.parts
    lines = [asdict(line) for line in diagnosis.lines]
    parts = dict(sorted(diagnosis.parts.items(), key=lambda part: -part[1]))
    rest = {"other lines": 1 - sum(line["share"] for line in lines)} if lines else parts
    lines += [{"where": where, "source": "", "activity": "", "share": share} for where, share in rest.items()]
    result.lines = [line for line in lines if line["share"] >= 0.005]
    search.tell(diagnosis.verdict)


def _observe(search: Search, judged: bool = True) -> None:
    """Let the script run, and beside it with another seed: its facts, its losses, its time, the length of a turn."""
    began, result = time.monotonic(), search.result
    both = [Side(search.command), *([Side(search.command, seed=1)] if judged else [])]
    seconds = min(OBSERVED * search.seconds, OBSERVED_S)
    with search.running(*both, silence_s=max(search.seconds, SILENCE_S)) as [(base, report), *others]:
        search.start_s = time.monotonic() - began
        step_s = search.fit_turn(base, seconds)
        seen, until = read(report), time.monotonic() + seconds
        for twin, of_twin in others:
            while len(read(of_twin).losses) < LEAST_STEPS and time.monotonic() < until:
                twin.take(search.turn)
            search.twin = read(of_twin)
    if not seen.facts:
        raise CannotTry(f"{search.command[0]} ends too early, or its steps of {step_s:.2g} s are too long")
    search.facts = seen.facts
    result.pages_kept = bool(search.kept) and seen.facts["device"] == "cpu"
    result.step_ms, result.peak_gib, result.redirected = step_s * 1e3, seen.peak / GIB, seen.redirected
    search.tell(f"base: {result.step_ms:.4g} ms a step, started in {search.start_s:.0f} s")


def _promise(search: Search, name: str, applying: Sequence[str]) -> tuple[float, float]:
    """The shares of a step that a change is likely to take away, and at most, by the findings or by its parts.

    A probe of what a change is for promises half of it: the change comes first. What is found at one line is one thing.
    """
    change, findings = changes.ALL[name], search.result.findings
    inside = max(1 - sum(finding.gain_share for finding in findings if finding.finding in OUTSIDE), 0.0)
    most = inside * sum(search.parts.get(part, 0.0) for part in change.parts) if search.parts else 1.0
    promise = change.share * most / change.patience
    at_line = {each.where: max(f.gain_share for f in findings if f.where == each.where) for each in findings}
    for finding in findings:
        if name in (tried := entries()[finding.finding].tried):
            waits = change.kind == "probe" and any(
                changes.ALL[each].kind == "change" for each in applying if each in tried
            )
            share = at_line[finding.where] if finding.where else finding.gain_share
            promise, most = max(promise, share / change.patience / (2 if waits else 1)), max(most, share)
    return promise, most


def _try_all(search: Search, only: Sequence[str]) -> None:
    result = search.result
    reasons = {
        name: changes.ALL[name].missing_because(search.facts) for name in changes.ALL if name in (only or changes.ALL)
    }
    applying = [name for name, reason in reasons.items() if not reason]
    trials = [search.trial([name], *_promise(search, name, applying)) for name in applying]
    while trial := _next(search, trials):
        trial.start(search, max(A_START * search.left, trial.least_s(search)))
        result.tried = [_row(search, each) for each in trials if each.seconds]
        search.tell(str(_row(search, trial)))
    for trial in trials:
        if not trial.seconds:
            little = f"could bring {trial.most:.1%} at most, by the profile" if trial.most < LEAST else ""
            reasons[trial.after.names[0]] = little or f"the {search.seconds:.0f} s were spent"
    applying = [trial.after.names[0] for trial in trials if trial.most]
    rows = [{"change": name, "reason": reason, "applies": name in applying} for name, reason in reasons.items()]
    result.not_tried = [row for row in rows if row["reason"]]


def _next(search: Search, trials: Sequence[Trial]) -> Trial | None:
    """The trial that could still bring most; None when the seconds are spent or nothing is open."""
    for_total = search.least_s if len(search.result.of("helped")) > 1 else 0.0
    left = search.left - for_total if any(trial.seconds for trial in trials) else math.inf  # one is tried in any case
    fitting = [trial for trial in trials if trial.open and trial.least_s(search) <= left]
    worth = [trial for trial in fitting if trial.seconds or trial.most >= LEAST]
    return max(worth, key=lambda trial: trial.hope, default=None)


def _row(search: Search, trial: Trial) -> Tried:
    """What a trial told of changes, or of a script that was edited by hand or runs elsewhere."""
    names, after = trial.after.names, trial.after
    elsewhere = after.python if after.python != sys.executable else after.command[0]
    row: dict[str, Any] = {"change": " + ".join(names) or elsewhere, "seconds": trial.seconds}
    row["kind"] = changes.ALL[names[0]].kind if names else "edited"
    if trial.error:
        return Tried(**row, verdict="failed", same=False, reason=trial.error)
    base, seen = trial.seen
    search.result.redirected = sorted({*search.result.redirected, *base.redirected})
    row["peak_gib"] = seen.peak / GIB
    if (took := trial.estimate) is None:
        return Tried(**row, verdict="undecided", reason=f"too few turns in {trial.seconds:.0f} s")
    row |= {"gain_share": 1 - took.ratio, "low": 1 - took.high, "high": 1 - took.low, "verdict": took.verdict}
    judged = compare(base.losses, seen.losses, search.twin.losses)
    judged = "another training" if row["kind"] == "probe" else judged
    return Tried(**row, losses=judged, same=is_same(judged))


def _combine(search: Search) -> None:
    """Keep the best useful change of each group, all together if a pair of all says that this is more than the best."""
    result, best = search.result, {}
    for tried in result.of("helped"):
        best.setdefault(changes.ALL[tried.change].group or tried.change, tried)
    names = [tried.change for tried in best.values()]
    result.kept, result.together = names[:1], next(iter(best.values()), None)
    if len(names) > 1:
        trial = search.trial(names)
        trial.start(search, max(search.left, search.least_s))
        together = _row(search, trial)
        if together.useful and together.gain_share > result.together.gain_share:
            result.kept, result.together = names, together
        else:
            result.notes.append(f"together they bring no more: {together}")
    edits = [edit for name in result.kept for edit in changes.ALL[name].edits(search.facts)]
    result.patch = diff(edits, str(Path.cwd()))
