"""Submissions graded: their solutions run side by side in processes of their own, and judged here."""

import io
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from ..lab.checks import Check
from ..lab.checks.check import RAISES, judged
from ..lab.process import end_with_parent
from .apart import Limits, run_apart
from .exercises import EXERCISES, Exercise
from .slices import Slices, Unreadable

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
        hint = self.check.hint if self.failures else ""
        return facts | {"points": self.points, "of": self.exercise.points, "failures": self.failures, "hint": hint}


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
        rows = [each.row() for each in self.graded]
        return {"file": self.path.name, "points": self.points, "of": self.most, "faults": self.faults, "exercises": rows}

    def text(self) -> str:
        lines = []
        for each in self.graded:
            exercise = each.exercise
            lines.append(f"{exercise.name:<20}{each.verdict:<16}{each.points} of {exercise.points}")
            lines += [f"  {failure}" for failure in each.failures]
            lines += [f"  hint: {each.check.hint}"] if each.failures and each.check.hint else []
        return "\n".join([*lines, *self.faults, f"{self.path.name}: {self.points} of {self.most} points"])


def table(submissions: Sequence[Submission]) -> str:
    """A line a submission: its points by chapter, and what failed."""
    chapters = sorted({each.exercise.chapter for one in submissions for each in one.graded})
    width = max(len(one.path.name) for one in submissions) + 2
    lines = [f"{'file':<{width}}" + "".join(f"{chapter:>5}" for chapter in chapters) + "  points  failed"]
    for one in submissions:
        by_chapter = [sum(each.points for each in one.graded if each.exercise.chapter == c) for c in chapters]
        failed = ", ".join([each.exercise.name for each in one.graded if each.failures] + one.faults)
        lines.append(f"{one.path.name:<{width}}" + "".join(f"{n:>5}" for n in by_chapter) + f"{one.points:>8}  {failed}")
    return "\n".join(lines)


def grade(
    paths: Iterable[Path],
    chapter: int | None = None,
    limits: Limits = Limits(),  # noqa: B008
    tell: Callable[[str], None] = lambda line: None,
) -> list[Submission]:
    """Grade files: the exercises of a chapter, or of all chapters of which a file has one."""
    files = [(path, *_chosen(path, chapter)) for path in paths]
    workers = max(1, min(len(os.sched_getaffinity(0)), sum(len(chosen) for *_, chosen in files)))
    pool, graded = _pool(workers), []
    try:
        running = [
            [pool.submit(run_apart, each.name, slices.source(each.name), limits) if each.name in slices else None for each in chosen]
            for _, slices, chosen in files
        ]
        for (path, slices, chosen), futures in zip(files, running, strict=True):
            checks = [
                None if future is None else _check(each, _answers(future.result, each, slices, limits))
                for each, future in zip(chosen, futures, strict=True)
            ]
            graded.append(Submission(path, [Graded(*pair) for pair in zip(chosen, checks, strict=True)], slices.faults))
            tell(f"{path.name}: {graded[-1].points} of {graded[-1].most} points")
    finally:
        for process in list((pool._processes or {}).values()):
            process.kill()  # idle, or not to be waited for
        pool.shutdown(cancel_futures=True)
    return graded


def _chosen(path: Path, chapter: int | None) -> tuple[Slices, list[Exercise]]:
    slices = Slices.of(path)
    chapters = {chapter} if chapter else {each.chapter for each in EXERCISES.values() if each.name in slices}
    return slices, [each for each in EXERCISES.values() if each.chapter in chapters]


def _pool(workers: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(workers, get_context("spawn"), end_with_parent)


def _answers(result: Callable[[], Answers], exercise: Exercise, slices: Slices, limits: Limits) -> Answers:
    """A task's result; where its pool's process was ended, by this or another solution, it runs again alone."""
    for _ in range(2):
        try:
            return result()
        except BrokenProcessPool:
            with _pool(1) as alone:
                result = alone.submit(run_apart, exercise.name, slices.source(exercise.name), limits).result
    return [], "the process that started it was ended"


def _check(exercise: Exercise, answers: Answers) -> Check:
    given, ended = answers
    return judged(exercise.name, exercise.lines(), [*map(_read, given), *([(RAISES, ended)] if ended else [])])


def _read(data: bytes) -> tuple[str, Any]:
    try:
        kind, value = torch.load(io.BytesIO(data), weights_only=True)
        return str(kind), value
    except Exception:
        return RAISES, "an answer that can't be read"
