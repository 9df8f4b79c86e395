"""What is worked out on paper: a number for each question of `numbers.toml`, with the slips that lead to others."""

import functools
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .check import Check, Checker, Line

TOLERANCE = 0.005  # where a question names no other


@functools.cache
def questions() -> dict[int, dict[str, dict[str, Any]]]:
    """By chapter and name: about, right, hint, and maybe slips and tolerance."""
    table = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    return {int(chapter): entries for chapter, entries in table.items()}


@Checker
def number(given: Any, name: str) -> Iterator[Line]:
    """A number by its name among the questions; None is not attempted."""
    question = next(entries[name] for entries in questions().values() if name in entries)

    def value() -> float:
        if given is None:
            raise NotImplementedError
        return float(given)

    def is_(value: float, formula: str, tolerance: float) -> bool:
        right = eval(formula)  # arithmetic of numbers.toml
        return abs(value - right) <= tolerance * abs(right)

    def judge(value: float) -> tuple[bool, str]:
        if is_(value, question["right"], question.get("tolerance", TOLERANCE)):
            return True, f"{value:g}"
        slips = question.get("slips", {}).items()
        slip = next((f": {why}" for wrong, why in slips if is_(value, wrong, TOLERANCE)), "")
        right = eval(question["right"])
        return False, f"{value:g} is {'too small' if value < right else 'too large'}{slip}"

    yield Line(question["about"], value, judge, question["hint"])


def numbers(chapter: int, names: Mapping[str, Any]) -> Check:
    """The numbers of a chapter among these names, such as `globals()`: what is right of those that aren't None."""
    checks = [number(names.get(name), name) for name in questions()[chapter]]
    tried = [check for check in checks if check.attempted]
    lines = [line for check in tried for line in check.lines]
    return Check(f"numbers of chapter {chapter}", lines, bool(tried), next((c.hint for c in tried if c.hint), ""))
