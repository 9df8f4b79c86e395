"""Planted inefficiencies as named switches, so that any subset of the fixes can be run.

A pipeline has a tuple of `Switch`, and what it runs with is a frozenset of the names of those that are fixed: empty is
the slow pipeline. `alone` and `cumulative` are the two ways to account for what each fix brings.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from helpers.lab.arguments import check_at_least, check_positive

Fixes = frozenset[str]


@dataclass(frozen=True, kw_only=True)
class Switch:
    """One inefficiency: what is slow, what mends it, and what else the fix changes."""

    name: str
    where: str  # "data", "model", "training loop" or "validation"
    slow: str
    fixed: str
    changes: str | None = None  # in the function or in the data; None: the same numbers, but for rounding
    cuda_only: bool = False  # on the CPU it changes nothing
    optional: bool = False  # not an inefficiency of the loop but a further step; left out of `fixed`

    @property
    def kind(self) -> str:
        return "speed only" if self.changes is None else f"changes {self.changes}"


def fixed(switches: Iterable[Switch]) -> Fixes:
    """All fixes but the optional ones."""
    return frozenset(switch.name for switch in switches if not switch.optional)


def alone(switches: Iterable[Switch]) -> list[Fixes]:
    """The slow pipeline, then each fix on its own."""
    return [frozenset(), *(frozenset([switch.name]) for switch in switches)]


def cumulative(switches: Iterable[Switch]) -> list[Fixes]:
    """The slow pipeline, then one fix more each time, in the table's order."""
    steps: list[Fixes] = [frozenset()]
    for switch in switches:
        steps.append(steps[-1] | {switch.name})
    return steps


def check_fixes(fixes: Iterable[str], switches: Iterable[Switch]) -> Fixes:
    """The names as a frozenset, if all of them are known."""
    if isinstance(fixes, str):
        raise ValueError(f"fixes is {fixes!r}; it must be a set of names, such as {{{fixes!r}}}")
    known = [switch.name for switch in switches]
    chosen = frozenset(fixes)
    if unknown := sorted(chosen.difference(known), key=str):
        raise ValueError(f"unknown fix {unknown[0]!r}; valid: {', '.join(known)}")
    return chosen


def choose(presets: Mapping[str, dict[str, Any]], preset: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The preset of that name, with changes of values that it has."""
    if preset not in presets:
        raise ValueError(f"unknown preset {preset!r}; valid: {', '.join(presets)}")
    chosen = presets[preset]
    if unknown := sorted(set(changes) - set(chosen)):
        raise ValueError(f"the preset has no {unknown[0]!r} to change; it has {', '.join(chosen)}")
    chosen = chosen | changes
    check_positive(batch_size=chosen["batch_size"])
    check_at_least(0, workers=chosen["workers"])
    return chosen
