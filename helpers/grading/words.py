"""Answers in words, which nobody grades here: a page a student for the teacher, with the rubric beside."""

import contextlib
import functools
import tomllib
from collections.abc import Iterable
from pathlib import Path

from ..checks.numbers import ANSWERS
from .grade import Submission


@functools.cache
def questions() -> dict[str, str]:
    """What is asked, by the name of the text."""
    table = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    return {name: question["asks"] for name, question in table.items()}


def write_pages(submissions: Iterable[Submission], folder: Path) -> None:
    """STUDENT.md for each: question, answer, and the rubric's points, with a box each. In a handout without rubric."""
    folder.mkdir(parents=True, exist_ok=True)
    rubric: dict[str, list[str]] = {}
    with contextlib.suppress(OSError):
        rubric = tomllib.loads(ANSWERS.with_name("rubric.toml").read_text(encoding="utf-8"))
    for one in submissions:
        parts = [f"# {one.path.stem}"]
        for name, asked in questions().items():
            if (answer := one.handed.text(name)) is not None:
                boxes = [f"- [ ] {point}" for point in rubric.get(name, [])]
                quoted = [f"> {line}" for line in answer.strip().splitlines() or ["(empty)"]]
                parts.append("\n".join([f"## {asked}", "", *quoted, "", *boxes]))
        (folder / f"{one.path.stem}.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")
