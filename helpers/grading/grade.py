"""Submissions graded: each runs in a process of its own, two or more side by side, and is judged here."""

import contextlib
import csv
import io
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import cached_property, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from ..checks import Check
from ..checks.check import RAISES, Line, judged
from ..script import landlock
from .apart import Limits, Ran, get_ready, run_apart
from .cells import Handed, read
from .exercises import EXERCISES, Exercise

NEVER_LIMITED = "UDP", "disk space", "the number of processes"


@dataclass(frozen=True)
class Graded:
    """An exercise of a submission; without a check it wasn't handed in. `equal` are files with the same solution."""

    exercise: Exercise
    check: Check | None
    parts: list[Line]
    seconds: float
    equal: list[str]

    @property
    def verdict(self) -> str:
        if self.check is None:
            return "not handed in"
        if not self.check.attempted:
            return "not attempted"
        return "passed" if self.check.passed else "failed"

    @cached_property
    def held(self) -> list[bool]:
        """Which parts have their points: a conditional one needs all that are not."""
        held = [verdict == "holds" for verdict, _ in self.check.lines] if self.verdict in ("passed", "failed") else []
        firm = all(holds for holds, part in zip(held, self.parts, strict=False) if not part.conditional)
        return [holds and (firm or not part.conditional) for holds, part in zip(held, self.parts, strict=False)]

    @property
    def points(self) -> float:
        return round(self.exercise.points * sum(self.held) / len(self.parts), 2)

    @property
    def failures(self) -> list[str]:
        return [about for verdict, about in self.check.lines if verdict == "FAILS"] if self.check else []

    def message(self) -> str:
        """The verdict; of a failed one which parts held, which failed and how."""
        if not self.failures:
            return self.verdict
        held = [part.about for part, holds in zip(self.parts, self.held, strict=True) if holds]
        return "; ".join([f"holds: {', '.join(held)}"] * bool(held) + [f"fails: {each}" for each in self.failures])

    def row(self) -> dict[str, Any]:
        facts = {"chapter": self.exercise.chapter, "exercise": self.exercise.name, "verdict": self.verdict}
        facts |= {"points": self.points, "of": self.exercise.points, "seconds": round(self.seconds, 1)}
        each = round(self.exercise.points / len(self.parts), 2)
        held = zip(self.parts, self.held or [False] * len(self.parts), strict=True)
        facts |= {"parts": [{"part": part.about, "points": each * holds, "of": each} for part, holds in held]}
        hint = self.check.hint if self.failures else ""
        return facts | {"failures": self.failures, "hint": hint, "equal": self.equal}


@dataclass(frozen=True)
class Submission:
    """A file's exercises; `faults` are what of it can't be read, and what its cells raised."""

    path: Path
    handed: Handed
    graded: list[Graded]
    faults: list[str]

    @property
    def points(self) -> float:
        return round(sum(each.points for each in self.graded), 2)

    @property
    def most(self) -> float:
        return sum(each.exercise.points for each in self.graded)

    def row(self) -> dict[str, Any]:
        totals = {"file": self.path.name, "points": self.points, "of": self.most}
        return totals | {"faults": self.faults, "exercises": [each.row() for each in self.graded]}

    def text(self) -> str:
        lines = []
        for each in self.graded:
            exercise = each.exercise
            lines.append(f"{exercise.name:<20}{each.verdict:<16}{each.points:g} of {exercise.points:g}")
            lines += [f"  {failure}" for failure in each.failures[:3]]  # the others often follow from these
            lines += [f"  hint: {each.check.hint}"] if each.failures and each.check.hint else []
        return "\n".join([*lines, *self.faults, f"{self.path.name}: {self.points:g} of {self.most:g} points"])


def table(submissions: Sequence[Submission]) -> str:
    """A line a submission: its points by chapter, and what failed. Below, solutions that are equal but for names."""
    chapters = sorted({each.exercise.chapter for one in submissions for each in one.graded})
    width = max(len(one.path.name) for one in submissions) + 2
    lines = [f"{'file':<{width}}{''.join(f'{chapter:>6}' for chapter in chapters)}  points  failed"]
    for one in submissions:
        points = [sum(each.points for each in one.graded if each.exercise.chapter == chapter) for chapter in chapters]
        failed = ", ".join([each.exercise.name for each in one.graded if each.failures] + one.faults)
        columns = "".join(f"{round(n, 2):>6g}" for n in points)
        lines.append(f"{one.path.name:<{width}}{columns}{one.points:>8g}  {failed}")
    for name in EXERCISES:
        groups = {(*each.equal, "") for one in submissions for each in one.graded if each.exercise.name == name}
        lines += [f"equal but for names: {name} in {', '.join(group[:-1])}" for group in sorted(groups) if group[:-1]]
    return "\n".join(lines)


def write_csv(submissions: Iterable[Submission], path: Path) -> None:
    """A row an exercise of a student, who has the file's name; the message says which parts held, and what failed."""
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["student", "exercise", "points", "of", "seconds", "message"])
        for one in submissions:
            for each in one.graded:
                message = each.message()
                facts = f"{each.points:g}", f"{each.exercise.points:g}", f"{each.seconds:.1f}", message
                rows.writerow([one.path.stem, each.exercise.name, *facts])


def gradescope(submissions: Sequence[Submission]) -> dict[str, Any]:
    """What Gradescope reads from /autograder/results/results.json of one student's files: a test an exercise."""
    best: dict[str, Graded] = {}
    for each in (each for one in submissions for each in one.graded):
        if each.points >= best.get(each.exercise.name, each).points:
            best[each.exercise.name] = each
    tests = [
        {
            "name": name,
            "number": str(each.exercise.chapter),
            "score": each.points,
            "max_score": each.exercise.points,
            "status": "passed" if each.verdict == "passed" else "failed",
            "output": each.message(),
        }
        for name, each in best.items()
    ]
    faults = [f"{one.path.name}: {fault}" for one in submissions for fault in one.faults]
    output = "\n".join(faults if tests else [*faults, "no exercise was handed in"])
    score = round(sum(each.points for each in best.values()), 2)
    return {"score": score, "output": output, "visibility": "visible", "tests": tests}


def not_limited() -> list[str]:
    """What of a submission this machine can't limit."""
    return [*landlock.unlimited(), *NEVER_LIMITED]


def grade(
    paths: Iterable[Path], chapter: int | None = None, limits: Limits | None = None, seed: int | None = None
) -> list[Submission]:
    """Grade files: the exercises of a chapter, or of all chapters of which a file has one.

    The checks' inputs are drawn from a seed, by default another one each time.
    """
    seed = int.from_bytes(os.urandom(3), "big") if seed is None else seed
    files = [(path, read(path)) for path in paths]
    steps = [_steps(handed, chapter) for _, handed in files]
    equal = _equal(files)
    secret = [str(path.resolve()) for path, _ in files]
    pool = _pool(max(1, min(os.cpu_count() or 1, len(files) // 2)))  # a process takes seconds to start
    submissions = []
    try:
        works = [partial(run_apart, each, secret, seed, limits or Limits()) for each in steps]
        running = [_submitted(pool, work) for work in works]
        for (path, handed), future, work in zip(tqdm(files, unit="file", disable=None), running, works, strict=True):
            ran = _result(future, work)
            chosen = _chosen(handed, chapter)
            graded = [_judged(each, handed, ran, seed, equal.get((path, each.name), [])) for each in chosen]
            faults = handed.faults + [f"{place}: {why}" for place, why in ran.faults.items()]
            submissions.append(Submission(path, handed, graded, faults))
    finally:
        for process in list((pool._processes or {}).values()):
            process.kill()  # idle, or not to be waited for
        pool.shutdown(cancel_futures=True)
    return submissions


def _chosen(handed: Handed, chapter: int | None) -> list[Exercise]:
    chapters = {chapter} if chapter else {each.chapter for each in EXERCISES.values() if each.name in handed}
    return [each for each in EXERCISES.values() if each.chapter in chapters]


def _steps(handed: Handed, chapter: int | None) -> dict[str, str]:
    """The cells up to the last exercise, each by its place, and after the last that names it each exercise."""
    last = {each.name: handed.last(each.name) for each in _chosen(handed, chapter) if each.name in handed}
    steps = {}
    for at, cell in enumerate(handed.cells[: max(last.values(), default=-1) + 1]):
        steps[cell.place] = cell.source
        steps |= {name: "" for name, place in last.items() if place == at}
    return steps


def _judged(exercise: Exercise, handed: Handed, ran: Ran, seed: int, equal: list[str]) -> Graded:
    name, parts = exercise.name, exercise.lines(seed=seed)
    if name not in handed:
        return Graded(exercise, None, parts, 0.0, [])
    given = [_read(data) for data in ran.answers.get(name, [])]
    given += [(RAISES, ran.ended[name])] if ran.ended.get(name) else []
    check = judged(name, parts, given)
    return Graded(exercise, check, parts, ran.seconds.get(name, 0.0), equal if check.attempted else [])


def _equal(files: Sequence[tuple[Path, Handed]]) -> Mapping[tuple[Path, str], list[str]]:
    """By file and exercise the names of the files, itself among them, whose solution is equal but for names."""
    groups = defaultdict(list)
    for path, handed in files:
        for name in EXERCISES:
            if tree := handed.normalised(name):
                groups[name, tree].append(path)
    same = {key: paths for key, paths in groups.items() if len(paths) > 1}
    return {(path, name): [each.name for each in paths] for (name, _), paths in same.items() for path in paths}


def _pool(workers: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(workers, get_context("spawn"), get_ready)


def _submitted(pool: ProcessPoolExecutor, work: partial[Ran]) -> Future[Ran] | None:
    with contextlib.suppress(BrokenProcessPool):
        return pool.submit(work)
    return None


def _result(running: Future[Ran] | None, work: partial[Ran]) -> Ran:
    """A task's result; where its pool's process was ended, by this or another submission, it runs again alone."""
    with contextlib.suppress(BrokenProcessPool):
        if running:
            return running.result()
    with _pool(1) as alone, contextlib.suppress(BrokenProcessPool):
        return alone.submit(work).result()
    return Ran(ended=dict.fromkeys(EXERCISES, "the process that started it was ended"))


def _read(data: bytes) -> tuple[str, Any]:
    with contextlib.suppress(Exception):
        if data.startswith(b"PK"):  # as torch.save writes it
            kind, value = torch.load(io.BytesIO(data), weights_only=True)
            return str(kind), value
    return RAISES, "an answer that can't be read"
