"""What each chapter measures: a file or a folder a chapter, a function for each table, from a configuration to rows.

    from helpers import experiments

    experiments.swiglu.peers("small")        # a DataFrame

Nothing here prints, draws or saves. A new file here is a new chapter; nothing has to be registered. A folder's
`__init__.py` imports its tables.
"""

import importlib
from collections.abc import Iterable
from pathlib import Path

from ..lab.records.experiment import Experiment


class UnknownName(ValueError):
    """A chapter or table that doesn't exist; the message lists the ones that do."""


def chapters() -> list[str]:
    here = Path(__file__).parent
    return sorted(
        [path.stem for path in here.glob("[a-z]*.py")] + [path.parent.name for path in here.glob("*/__init__.py")]
    )


def tables_of(chapter: str) -> list[Experiment]:
    """A chapter's experiments, in the order of its file."""
    if chapter not in chapters():
        raise UnknownName(f"unknown chapter {chapter!r}; valid: {', '.join(chapters())}")
    module = importlib.import_module(f"{__name__}.{chapter}")
    return [value for value in vars(module).values() if isinstance(value, Experiment)]


def select(targets: Iterable[str]) -> list[Experiment]:
    """The experiments that `CHAPTER` or `CHAPTER/TABLE` names, each once; for no names all of them."""
    chosen: dict[str, Experiment] = {}
    for target in list(targets) or chapters():
        chapter, _, table = target.partition("/")
        tables = {e.table: e for e in tables_of(chapter)}
        if table and table not in tables:
            raise UnknownName(f"unknown table {table!r} in chapter {chapter}; valid: {', '.join(tables)}")
        chosen |= {e.name: e for e in ([tables[table]] if table else tables.values())}
    return list(chosen.values())


def __getattr__(name: str):
    if not name.startswith("_") and name in chapters():
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
