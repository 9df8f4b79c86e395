"""What each chapter measures: a file or a folder a chapter, a function for each table, from a configuration to rows.

    from helpers import experiments

    experiments.swiglu.peers("small")        # a DataFrame

Nothing here prints, draws or saves. `helpers.chapters` selects tables by name, these and those that have moved there.
"""

import importlib
from pathlib import Path


def chapters() -> list[str]:
    here = Path(__file__).parent
    return sorted(
        [path.stem for path in here.glob("[a-z]*.py")] + [path.parent.name for path in here.glob("*/__init__.py")]
    )


def __getattr__(name: str):
    if not name.startswith("_") and name in chapters():
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
