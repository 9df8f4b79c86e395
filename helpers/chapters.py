"""Which chapters there are and what each measures: found by looking, not listed by hand.

A chapter is a folder here with an `experiments.py`; its tables are the experiments in that file, in their order.
"""

import importlib
from collections.abc import Iterable
from pathlib import Path

from helpers.lab.experiment import Experiment


class UnknownName(ValueError):
    """A chapter or table that doesn't exist; the message lists the ones that do."""


def names() -> list[str]:
    return sorted(path.parent.name for path in Path(__file__).parent.glob("*/experiments.py"))


def experiments(chapter: str) -> list[Experiment]:
    if chapter not in names():
        raise UnknownName(f"unknown chapter {chapter!r}; valid: {', '.join(names())}")
    module = importlib.import_module(f"helpers.{chapter}.experiments")
    return [value for value in vars(module).values() if isinstance(value, Experiment)]


def select(targets: Iterable[str]) -> list[Experiment]:
    """The experiments that `CHAPTER` or `CHAPTER/TABLE` names; all of them for no names. Each once, in order."""
    chosen: list[Experiment] = []
    for target in list(targets) or names():
        chapter, _, table = target.partition("/")
        found = experiments(chapter)
        if table:
            tables = [e.table for e in found]
            if table not in tables:
                raise UnknownName(f"unknown table {table!r} in chapter {chapter}; valid: {', '.join(tables)}")
            found = [e for e in found if e.table == table]
        chosen += [e for e in found if e not in chosen]
    return chosen
