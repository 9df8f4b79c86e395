"""Submissions graded: their solutions run side by side in processes of their own, and judged here."""

import contextlib
import io
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from ..lab.checks import Check
from ..lab.checks.check import RAISES, judged
from .apart import Limits, get_ready, run_apart
from .exercises import EXERCISES, Exercise
from .slices import Slices

Answers = tuple[list[bytes], str]


@dataclass(frozen=True)
class Graded:
    """An exercise of a submission; without a check it wasn't handed in."""

    exercise: Exercise
    check: Check | None

    @property
    def verdict(self) -> str:
        if self.check is None:
            return "not handed in"
        if not self.check.attempted:
            return "not attempted"
        return "passed" if self.check.passed else "failed"

    @property
    def points(self) -> int:
        return self.exercise.points if self.verdict == "passed" else 0

    @property
    def failures(self) -> list[str]:
        return [about for verdict, about in self.check.lines if verdict == "FAILS"] if self.check else []

    def row(self) -> dict[str, Any]:
        facts = {"chapter": self.exercise.chapter, "exercise": self.exercise.name, "verdict": self.verdict}
        facts |= {"points": self.points, "of": self.exercise.points, "failures": self.failures}
        return facts | {"hint": self.check.hint if self.failures else ""}


@dataclass(frozen=True)
class Submission:
    """A file's exercises; `faults` are what of it can't be read."""

    path: Path
    graded: list[Graded]
    faults: list[str]

    @property
    def points(self) -> int:
        return sum(each.points for each in self.graded)

    @property
    def most(self) -> int:
        return sum(each.exercise.points for each in self.graded)

    def row(self) -> dict[str, Any]:
        totals = {"file": self.path.name, "points": self.points, "of": self.most}
        return totals | {"faults": self.faults, "exercises": [each.row() for each in self.graded]}

    def text(self) -> str:
        lines = []
        for each in self.graded:
            exercise = each.exercise
            lines.append(f"{exercise.name:<20}{each.verdict:<16}{each.points} of {exercise.points}")
            lines += [f"  {failure}" for failure in each.failures[:3]]  # the others often follow from these
            lines += [f"  hint: {each.check.hint}"] if each.failures and each.check.hint else []
        return "\n".join([*lines, *self.faults, f"{self.path.name}: {self.points} of {self.most} points"])


def table(submissions: Sequence[Submission]) -> str:
    """A line a submission: its points by chapter, and what failed."""
    chapters = sorted({each.exercise.chapter for one in submissions for each in one.graded})
    width = max(len(one.path.name) for one in submissions) + 2
    lines = [f"{'file':<{width}}{''.join(f'{chapter:>5}' for chapter in chapters)}  points  failed"]
    for one in submissions:
        points = [sum(each.points for each in one.graded if each.exercise.chapter == chapter) for chapter in chapters]
        failed = ", ".join([each.exercise.name for each in one.graded if each.failures] + one.faults)
        lines.append(f"{one.path.name:<{width}}{''.join(f'{n:>5}' for n in points)}{one.points:>8}  {failed}")
    return "\n".join(lines)


def grade(paths: Iterable[Path], chapter: int | None = None, limits: Limits | None = None) -> list[Submission]:
    """Grade files: the exercises of a chapter, or of all chapters of which a file has one."""
    limits = limits or Limits()
    files = [(path, *_chosen(path, chapter)) for path in paths]
    handed_in = sum(each.name in slices for _, slices, chosen in files for each in chosen)
    pool, submissions = _pool(max(1, min(os.cpu_count() or 1, handed_in // 4))), []  # a process takes seconds to start
    try:
        tasks = [[_task(pool, each, slices, limits) for each in chosen] for _, slices, chosen in files]
        for (path, slices, chosen), running in zip(tqdm(files, unit="file", disable=None), tasks, strict=True):
            graded = [Graded(each, task and task()) for each, task in zip(chosen, running, strict=True)]
            submissions.append(Submission(path, graded, slices.faults))
    finally:
        for process in list((pool._processes or {}).values()):
            process.kill()  # idle, or not to be waited for
        pool.shutdown(cancel_futures=True)
    return submissions


def _task(pool: ProcessPoolExecutor, exercise: Exercise, slices: Slices, limits: Limits) -> Callable[[], Check] | None:
    """Start a solution; what is returned waits for it. None if it wasn't handed in."""
    if exercise.name not in slices:
        return None
    work = partial(run_apart, exercise.name, slices.source(exercise.name), limits)
    running = None
    with contextlib.suppress(BrokenProcessPool):
        running = pool.submit(work)

    def check() -> Check:
        given, ended = _answers(running, work)
        return judged(exercise.name, exercise.lines(), [*map(_read, given), *([(RAISES, ended)] if ended else [])])

    return check


def _chosen(path: Path, chapter: int | None) -> tuple[Slices, list[Exercise]]:
    slices = Slices.of(path)
    chapters = {chapter} if chapter else {each.chapter for each in EXERCISES.values() if each.name in slices}
    return slices, [each for each in EXERCISES.values() if each.chapter in chapters]


def _pool(workers: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(workers, get_context("spawn"), get_ready)


def _answers(running: Future[Answers] | None, work: Callable[[], Answers]) -> Answers:
    """A task's result; where its pool's process was ended, by this or another solution, it runs again alone."""
    with contextlib.suppress(BrokenProcessPool):
        if running:
            return running.result()
    with _pool(1) as alone, contextlib.suppress(BrokenProcessPool):
        return alone.submit(work).result()
    return [], "the process that started it was ended"


def _read(data: bytes) -> tuple[str, Any]:
    with contextlib.suppress(Exception):
        if data.startswith(b"PK"):  # as torch.save writes it
            kind, value = torch.load(io.BytesIO(data), weights_only=True)
            return str(kind), value
    return RAISES, "an answer that can't be read"
