"""What each chapter measures and what its rows say: one file a table, in `chapters/<chapter>`.

    from helpers import chapters

    chapters.rush.without("small")                     # measured here and now: a DataFrame
    chapters.rush.without.on("nvidia-h200").table      # a number or frame of what that machine recorded

Nothing here prints, draws or saves. A new folder is a new chapter, a function that its `__init__.py` imports a table.
"""

import importlib
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from ..book.table import Table


class UnknownName(ValueError):
    """A chapter or table that doesn't exist; the message lists the ones that do."""


def chapters() -> list[str]:
    return sorted(path.parent.name for path in Path(__file__).parent.glob("*/__init__.py"))


def tables_of(chapter: str) -> list[Table]:
    """A chapter's tables, in the order of its folder's imports."""
    if chapter not in chapters():
        raise UnknownName(f"unknown chapter {chapter!r}; valid: {', '.join(chapters())}")
    return [value for value in vars(_module(chapter)).values() if isinstance(value, Table)]


def select(targets: Iterable[str]) -> list[Table]:
    """The tables that `CHAPTER` or `CHAPTER/TABLE` names, each once; for no names all of them."""
    chosen: dict[str, Table] = {}
    for target in list(targets) or chapters():
        chapter, _, table = target.partition("/")
        tables = {e.table: e for e in tables_of(chapter)}
        if table and table not in tables:
            raise UnknownName(f"unknown table {table!r} in chapter {chapter}; valid: {', '.join(tables)}")
        chosen |= {e.name: e for e in ([tables[table]] if table else tables.values())}
    return list(chosen.values())


def _module(chapter: str) -> ModuleType:
    return importlib.import_module(f"{__name__}.{chapter}")


def __getattr__(name: str) -> ModuleType:
    if not name.startswith("_") and name in chapters():
        return _module(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
