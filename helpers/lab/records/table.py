"""A table in one file: its configurations, the function that measures one, and the function from rows to numbers.

@table(gpu=[…], cpu=[…], small=[…], columns="…", worth=Worth(…))
def ladder(model, sequence, step) -> Row: …          # one configuration, measured

@ladder.numbers(beside=[pairs])
def _(rows, pairs) -> Ladder: …                      # a small dataclass of numbers and frames

numbers = ladder.on("nvidia-h200")                   # those of one machine; nothing chooses a machine
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from .experiment import Experiment, experiment
from .results import Named, recorded


@dataclass(frozen=True)
class Table(Experiment):
    """An experiment that knows its numbers, too."""

    # The function of the rows, and the tables whose rows it gets after them; set once, by `numbers`.
    _numbers: list[tuple[Callable[..., Any], tuple[Experiment, ...]]] = field(default_factory=list, compare=False)

    def numbers(self, *, beside: Sequence[Experiment] = ()) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Declare the function from this table's measured rows, and those of the tables beside it, to numbers."""

        def declare(compute: Callable[..., Any]) -> Callable[..., Any]:
            self._numbers[:] = [(compute, tuple(beside))]
            return compute

        return declare

    def of_rows(self, rows: pd.DataFrame, *beside: pd.DataFrame) -> Any:
        """The numbers of these rows."""
        return self._numbers[0][0](rows, *beside)

    def on(self, machine: str) -> "OnMachine":
        """The numbers of the rows that a machine, the name of a folder of records, has recorded."""
        compute, beside = self._numbers[0]
        own, *others = (recorded(table, machine=machine) for table in (self, *beside))
        return OnMachine(compute, (own,), tuple(others))


class OnMachine(Named):
    """Numbers of a machine that was named; its captions say which it is."""

    @property
    def origin(self) -> str:
        rows = self.sources[0].rows
        return f"Machine: {rows['gpu'].iloc[0]}. {self.sources[0].mixed}".strip() if len(rows) else ""


def table(**declared: Any) -> Callable[[Callable], Table]:
    """Make a `Table` of a function in `helpers/chapters/<chapter>/<table>.py`; the arguments are `experiment`'s."""

    def wrap(measure: Callable) -> Table:
        made = experiment(**declared)(measure)
        return Table(**{name: getattr(made, name) for name in Experiment.__dataclass_fields__})

    return wrap
