"""What the records say, by name: for each chapter, functions from a table's rows to its numbers.

    ladder = results(experiments.rush.ladder).named(claims.rush.ladder)
    ladder.total                                        # a Number, with its interval and its number of pairs

A function has the name of its table. It takes the table's measured rows (and those of others, in the order in which
`named` got them) and returns a SimpleNamespace of `Number`s and of frames that are ready for `table`. It is pure: it
reads no record and shows nothing. A row is chosen by `pick`, so that one which isn't measured becomes a number that
says so, and a column that doesn't exist raises. A ratio comes from `paired` where a trial measured it, from `over`
where the two sides were measured apart, from `derived` where it is arithmetic or a count. What is shown anywhere, a
notebook, the summary or the README, is such a number, computed once, here. `goals` holds the project's goals as data.
"""

import importlib
from pathlib import Path


def __getattr__(name: str):
    if not name.startswith("_") and name in {path.stem for path in Path(__file__).parent.iterdir()}:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
