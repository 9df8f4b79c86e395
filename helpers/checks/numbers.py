"""What is worked out on paper, a number for each question of `numbers.toml`; and what is read off a profile.

What is right, and the slips that lead to other numbers, are among a checkout's solutions, which no handout has.
"""

import contextlib
import functools
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..lab.files import project_root
from .check import Check, Checker, Line

TOLERANCE = 0.005  # of either end of the band, where an answer names no other
FIVE, NEAR, BAND = 5, 3.0, 8.0  # faults; points of % that order leaves open, and that a gain may be off
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

    def judge(value: float) -> tuple[bool | None, str]:
        if not answer:
            return None, f"{value:g}, judged where it is graded"
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


@Checker
def reading(given: Any) -> Iterator[Line]:
    """Five fixes of a slow loop by name, the one that gains most first: each with a faulty line and its gain.

    That is by how many % the time for a real token falls. Judged against the loop with that fault alone fixed, as
    `reading.toml` beside the answers holds it.
    """
    known: dict[str, dict[str, Any]] = {}
    with contextlib.suppress(OSError):
        known = tomllib.loads(ANSWERS.with_name("reading.toml").read_text(encoding="utf-8"))

    @functools.cache
    def listed() -> list[list]:
        if not given:
            raise NotImplementedError
        return [[str(fix), str(line), float(gain)] for fix, (line, gain) in given.items()]

    def large(rows: list[list]) -> tuple[bool, str]:
        least = sorted((fault["gain"] for fault in known.values()), reverse=True)[FIVE - 1] - NEAR
        wrong = [fix for fix, *_ in rows if fix not in known or known[fix]["gain"] < least]
        return len(rows) == FIVE and not wrong, f"not among the largest: {wrong}" if wrong else f"{len(rows)} fixes"

    def at_its_line(rows: list[list]) -> tuple[bool, str]:
        lines = {fix: ["".join(part.split()) for part in known.get(fix, {}).get("lines", [])] for fix, *_ in rows}
        wrong = [fix for fix, line, _ in rows if not any(part in "".join(line.split()) for part in lines[fix])]
        return not wrong, f"elsewhere: {wrong}" if wrong else ""

    def in_order(rows: list[list]) -> tuple[bool, str]:
        gains = [known[fix]["gain"] for fix, *_ in rows if fix in known]
        return all(a >= b - NEAR for i, a in enumerate(gains) for b in gains[i:]) and len(gains) == len(rows), ""

    def near(rows: list[list]) -> tuple[bool, str]:
        wrong = [fix for fix, _, gain in rows if abs(gain - known.get(fix, {"gain": -100})["gain"]) > BAND]
        return not wrong, f"not what fixing it alone gains: {wrong}" if wrong else ""

    for about, judge, hint in (
        ("five of the largest faults", large, "Sort a profile by its own time, then undo one suspect after the other."),
        ("each at its line", at_its_line, "`diagnose` and stacks name lines; copy the line."),
        ("the one that gains most first", in_order, "A promise is an estimate: which fix alone is worth most?"),
        (
            "each gain is that of its fix alone",
            near,
            "Time the loop with this fault alone fixed, in turns with the loop.",
        ),
    ):
        yield Line(about, listed, judge if known else lambda _: (None, "judged where it is graded"), hint)
