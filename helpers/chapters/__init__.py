"""What each chapter measures: a table a file, in `chapters/<chapter>`, and in `experiments` those that have not moved.

    from helpers import chapters

    chapters.rush.without("small")                     # measured here and now: a DataFrame
    chapters.rush.without.on("nvidia-h200").table      # a number or frame of what that machine recorded

Nothing here prints, draws or saves. A new folder is a new chapter, a function that its `__init__.py` imports a table.
"""

import importlib
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from .. import experiments
from ..lab.records.experiment import Experiment


class UnknownName(ValueError):
    """A chapter or table that doesn't exist; the message lists the ones that do."""


def chapters() -> list[str]:
    here = {path.parent.name for path in Path(__file__).parent.glob("*/__init__.py")}
    return sorted(here | set(experiments.chapters()))


def tables_of(chapter: str) -> list[Experiment]:
    """A chapter's tables, in the order of its folder's imports."""
    if chapter not in chapters():
        raise UnknownName(f"unknown chapter {chapter!r}; valid: {', '.join(chapters())}")
    modules = [_module(chapter)] if _has(chapter) else []
    if chapter in experiments.chapters():
        modules.append(getattr(experiments, chapter))
    found = [value for module in modules for value in vars(module).values() if isinstance(value, Experiment)]
    return list({table.name: table for table in found}.values())


def select(targets: Iterable[str]) -> list[Experiment]:
    """The tables that `CHAPTER` or `CHAPTER/TABLE` names, each once; for no names all of them."""
    chosen: dict[str, Experiment] = {}
    for target in list(targets) or chapters():
        chapter, _, table = target.partition("/")
        tables = {e.table: e for e in tables_of(chapter)}
        if table and table not in tables:
            raise UnknownName(f"unknown table {table!r} in chapter {chapter}; valid: {', '.join(tables)}")
        chosen |= {e.name: e for e in ([tables[table]] if table else tables.values())}
    return list(chosen.values())


def _has(chapter: str) -> bool:
    return (Path(__file__).parent / chapter / "__init__.py").exists()


def _module(chapter: str) -> ModuleType:
    return importlib.import_module(f"{__name__}.{chapter}")


def __getattr__(name: str) -> ModuleType:
    if not name.startswith("_") and _has(name):
        return _module(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
