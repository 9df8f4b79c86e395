"""What is worked out on paper: a number for each question of `numbers.toml`.

What is right, and the slips that lead to other numbers, are among a checkout's solutions, which no handout has.
"""

import contextlib
import functools
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..lab.machine import project_root
from .check import Check, Checker, Line

TOLERANCE = 0.005  # of either end of the band, where an answer names no other
ANSWERS = project_root() / "data" / "solutions" / "answers.toml"


@functools.cache
def questions() -> dict[int, dict[str, str]]:
    """What is asked, by chapter and name."""
    table = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    return {int(chapter): entries for chapter, entries in table.items()}


@functools.cache
def _answers() -> dict[str, dict[str, Any]]:
    """By name: `right`, `hint`, maybe `tolerance`, and by wrong number what was overlooked; empty in a handout."""
    with contextlib.suppress(OSError):
        return tomllib.loads(ANSWERS.read_text(encoding="utf-8"))
    return {}


@Checker
def number(given: Any, name: str) -> Iterator[Line]:
    """A number by its name among the questions; None is not attempted."""
    question = next(entries[name] for entries in questions().values() if name in entries)
    answer = dict(_answers().get(name, {}))

    def value() -> float:
        if given is None:
            raise NotImplementedError
        return float(given)

    def within(value: float, band: str | list[str], tolerance: float = TOLERANCE) -> bool:
        ends = [eval(end) for end in ([band] if isinstance(band, str) else band)]  # arithmetic of answers.toml
        return ends[0] - tolerance * abs(ends[0]) <= value <= ends[-1] + tolerance * abs(ends[-1])

    def judge(value: float) -> tuple[bool, str]:
        if not answer:
            return False, f"{value:g} is judged where it is graded"
        slips = dict(answer)
        if within(value, slips.pop("right"), slips.pop("tolerance", TOLERANCE)):
            return True, f"{value:g}"
        slip = next((f": {why}" for wrong, why in slips.items() if within(value, wrong)), "")
        return False, f"{value:g} is wrong{slip}"

    yield Line(question, value, judge, answer.pop("hint", ""))


def numbers(chapter: int, names: Mapping[str, Any]) -> Check:
    """The numbers of a chapter among these names, such as `globals()`: what is right of those that aren't None."""
    checks = [number(names.get(name), name) for name in questions()[chapter]]
    tried = [check for check in checks if check.attempted]
    lines = [line for check in tried for line in check.lines]
    return Check(f"numbers of chapter {chapter}", lines, bool(tried), next((c.hint for c in tried if c.hint), ""))
