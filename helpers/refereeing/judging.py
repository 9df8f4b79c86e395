"""A submission's case judged: whole runs of it and of the original observed, then both timed in turns at the same step.

An edited script does as many steps with as many parameters as the original, and gives its modules no less than the
original or the reference does, whichever is less. Losses and evaluations are held to the notion of `try`; what is exact
in both has to write the same bytes, too. Of a case that takes S seconds for a run, the first submission costs four
runs, two trials and their starts; the next ones a run and a trial.
"""

import contextlib
import functools
import json
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..lab import files
from ..lab.arguments import has_form
from ..lab.estimate import FASTER
from ..trying import try_edited
from ..trying.same_training import ALLOWED, EQUAL, compare, course, is_same, same_text
from ..trying.search import CannotTry
from .audit import Audit, audit
from .cases import BATCHES, BITWISE, FIX, Case, Refused, WrongCase, submitted

Row = dict[str, Any]
Tell = Callable[[str], None]
LEAST_ELEMENTS = 0.95  # of the original's or the reference's: lengths differ with the seed
MOVED = 0.1  # parameters may have moved farther or less far than the original's by this share
LONGER, LONGER_S = 1.3, 2.0  # a whole run may take so much longer, as a compilation does


@dataclass(frozen=True)
class Runs:
    """The original, the same with another seed, and the reference."""

    base: Audit
    twin: Audit
    reference: Audit
    fixed: str  # the reference's script


@contextlib.contextmanager
def workspace() -> Iterator[Callable[[], Path]]:
    """A function that names new folders, which are gone in the end."""
    with tempfile.TemporaryDirectory(prefix="dlspeed-referee-") as folder:
        names = iter(range(1000))
        yield lambda: Path(folder, str(next(names)))


@functools.cache
def runs(case: Case) -> Runs:
    """Whole runs of what a case's submissions are compared with."""
    with workspace() as new:
        fixed = case.patched(case.folder / FIX, new())
        base = audit(case, case.prepare(case.script, new()))
        twin = audit(case, case.prepare(case.script, new()), seed=1)
        return Runs(base, twin, audit(case, case.prepare(fixed, new())), fixed)


def broken_rules(case: Case, known: Runs, other: Audit) -> list[str]:
    """Why a run isn't the same training as the original's; nothing if it is."""
    base, reference = known.base, known.reference
    if other.error:
        return [other.error]
    broken = list(other.broke)
    for name in ("steps", "parameters"):
        if getattr(other, name) != getattr(base, name):
            broken.append(f"{getattr(other, name):,} {name} in place of {getattr(base, name):,}")
    for name, part in (("rows", 1.0), ("elements", LEAST_ELEMENTS), ("eval_rows", 1.0)):
        least = min(getattr(base, name), getattr(reference, name))
        if getattr(other, name) < part * least:
            broken.append(f"{getattr(other, name):,} {name.replace('_', ' ')} in place of {least:,}")
    each_step = [run.losses for run in (base, other, known.twin)]
    judged = compare(*(map(course, each_step) if case.same == BATCHES else each_step))
    broken += [] if is_same(judged) else [f"losses {judged}"]
    apart, of_seeds = (_apart(base.moved, run.moved) for run in (other, known.twin))
    if apart > max(MOVED, ALLOWED * of_seeds if known.twin.moved else 0):
        broken.append(f"the parameters move by {_percent(apart)} more or less")
    evaluation = compare(base.numbers, other.numbers, known.twin.numbers)
    if len(other.numbers) != len(base.numbers):
        broken.append(f"{len(other.numbers)} evaluations in place of {len(base.numbers)}")
    elif not is_same(evaluation):
        broken.append(f"evaluation {evaluation}")
    exact = judged.startswith(EQUAL) and base.numbers == other.numbers
    for name in sorted(base.files | other.files):
        texts = [run.files.get(name, "") for run in (base, other, known.twin)]
        broken += [] if same_text(exact, *texts) else [f"{name} differs"]
    return broken


def _apart(base: Sequence[float], other: Sequence[float]) -> float:
    """How far two courses are apart at their ends, as a share of the first."""
    first, second = (sum(values[len(values) // 2 :]) for values in (base, other))
    return abs(second - first) / first if first and math.isfinite(second) else math.inf if second != first else 0.0


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if math.isfinite(share) else "without limit"


def judge(case: Case, script: str, seconds: float) -> Row:
    """The row of an edited script: its speedup with an interval, memory, and why it is another training, if it is."""
    row = _unchanged(case) | {"changed": script != case.script}
    if not row["changed"]:
        return row
    known = runs(case)
    if known.base.error or known.reference.error:
        raise WrongCase(f"{case.name} itself fails: {known.base.error or known.reference.error}")
    with workspace() as new:
        before, after = case.prepare(case.script, new()), case.prepare(script, new())
        other = known.reference if script == known.fixed else audit(case, after)
        row |= {"whole_s": [known.base.seconds, other.seconds], "evaluation": [known.base.numbers, other.numbers]}
        row["broken"] = broken_rules(case, known, other)
        if row["broken"]:
            return row
        try:
            with contextlib.chdir(before.parent):
                result = try_edited(before, case.arguments, after, case.arguments, seconds=seconds)
        except CannotTry as error:
            return row | {"broken": [str(error)]}
    tried = result.tried[0]
    if tried.reason or not math.isfinite(tried.gain_share):
        return row | {"broken": [tried.reason or tried.verdict]}
    low, speedup, high = (1 / (1 - share) for share in (tried.low, tried.gain_share, tried.high))
    row |= {"speedup": speedup, "low": low, "high": high, "losses": tried.losses, "verdict": tried.verdict}
    row["peak_gib"] = [result.peak_gib, tried.peak_gib]
    if case.same != BATCHES and not tried.same:
        row["broken"] = [f"losses of the trial {tried.losses}"]
    if other.seconds > LONGER * known.base.seconds + LONGER_S:
        row["note"] = "a whole run takes longer"
    return row


def _unchanged(case: Case) -> Row:
    row = {"case": case.name, "changed": False, "speedup": 1.0, "low": 1.0, "high": 1.0}
    return row | {"broken": [], "losses": "", "verdict": "", "note": ""}


def judge_all(cases: Sequence[Case], submission: Path, seconds: float, tell: Tell) -> list[Row]:
    """The rows of a submission, each with its reference's. What is in SUBMISSION.referee.json isn't judged again."""
    path = Path(f"{submission.resolve()}.referee.json")
    try:
        known: dict[str, Row] = json.loads(path.read_text()) if path.is_file() else {}
        if not has_form(known, {str: dict}):
            raise ValueError("it holds no rows")
    except ValueError as error:
        raise WrongCase(f"{path} can't be read ({error}): delete it to have all judged anew") from None

    def once(case: Case, script: str) -> Row:
        key = f"{case.digest(script)} {seconds:g}"
        if key not in known:
            known[key] = judge(case, script, seconds)
            files.write(path, json.dumps(known, indent=1))
        return known[key]

    rows = []
    for case in cases:
        with workspace() as new:
            fixed = case.patched(case.folder / FIX, new())
            try:
                row = once(case, submitted(case, submission, new))
            except Refused as error:
                row = _unchanged(case) | {"changed": True, "broken": [str(error)]}
        row = row | ({"reference": once(case, fixed)} if row["changed"] and not row["broken"] else {})
        outcome = "; ".join(row["broken"]) or f"{row['speedup']:.2f}x"
        tell(f"{case.name}: {outcome}")
        rows.append(row)
    return rows


def check(case: Case, seconds: float, tell: Tell) -> list[str]:
    """What is wrong with a case: its fix isn't the same training, or isn't faster beyond doubt."""
    with workspace() as new:
        try:
            row = judge(case, case.patched(case.folder / FIX, new()), seconds)
        except Refused as error:
            return [f"{case.name}: {error}"]
    known = runs(case)
    tell(f"{case.name}: {row['speedup']:.2f}x ({row['low']:.2f} to {row['high']:.2f}), losses {row['losses']}")
    tell(f"    {known.base.steps} steps of {known.base.rows:,} rows, a run takes {known.base.seconds:.1f} s")
    broken = row["broken"] + ([] if row["verdict"] == FASTER else [f"not faster: {row['verdict']}"])
    broken += [f"the original itself: {rule}" for rule in known.base.broke]
    if case.same == BITWISE and not row["losses"].startswith(EQUAL):
        broken.append(f"not exact: losses {row['losses']}")
    broken += [row["note"]] if row["note"] else []
    return [f"{case.name}: {'; '.join(broken)}"] if broken else []
