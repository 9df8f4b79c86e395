"""The faults of a training that its profile or its watched loop shows: an entry each in `faults.toml`.

A rule of `findings.rules` names its fault, which gives the finding its remedy, and adds evidence, place and gain.
`tried` are the changes and probes of `dlspeed try` that take it away, the likeliest first. `planted` are the loops in
which it is expected, by their files' stems, and the switches of chapter 3's trainings that plant it.
"""

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Fault:
    name: str
    remedy: str = ""
    cases: Mapping[str, str] = field(default_factory=dict)  # remedies that a rule chooses instead
    tried: tuple[str, ...] = ()
    planted: tuple[str, ...] = ()


@functools.cache
def entries() -> dict[str, Fault]:
    """All faults, by name."""
    table = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    return {name: Fault(name, **entry) for name, entry in table.items()}


def remedy(name: str, case: str = "", **values: str) -> str:
    """What to do about a fault, or about one case of it; the values fill what stands in braces."""
    fault = entries()[name]
    return (fault.cases[case] if case else fault.remedy).format(**values)


def planted_by(name: str) -> list[str]:
    """The findings of which each is right for a planted loop or for a training without a fix; [] if none shows it."""
    return [fault.name for fault in entries().values() if name in fault.planted]
