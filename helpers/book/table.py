"""A table in one file: its configurations, the function that measures one, and the function from rows to numbers.

@table(gpu=[…], cpu=[…], small=[…], columns="…", worth=Worth(…))
def ladder(model, sequence, step) -> Row: …          # one configuration, measured

@ladder.numbers(needs=[ceilings], beside=[pairs])
def _(rows, ceilings, pairs) -> Ladder: …            # a small dataclass, or a namespace, of numbers and frames

numbers = ladder.on("nvidia-h200")                   # those of one machine; nothing chooses a machine

Numbers that belong to no table alone are declared as `@numbers_of([ceilings, modules])` and read by `.on`, too.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import Any

import numpy as np
import pandas as pd

from ..lab.estimate import todays
from ..lab.rows import STATUS, Row
from . import store
from .experiment import ColumnError, Experiment, Worth
from .values import is_noisy, lacking

Tables = Sequence[Experiment]
NO_WORTH = Worth(1, "")


@dataclass(frozen=True)
class Results:
    """What a machine, the name of its folder, has recorded of an experiment at the sizes of its class."""

    experiment: Experiment
    rows: pd.DataFrame

    @property
    def measured(self) -> pd.DataFrame:
        """The rows that hold figures."""
        return self.rows[self.rows[STATUS] == "ok"] if len(self.rows) else self.rows

    @property
    def runs(self) -> int:
        """How many processes measured the rows that hold figures; older rows count by their day and commit."""
        return len(set(map(store.run_of, self.measured.to_dict("records"))))

    @property
    def origin(self) -> str:
        """For a caption: the machine, and whether its rows are of several runs or older methods, or mostly noisy."""
        if not len(self.rows):
            return ""
        notes = [f"Machine: {self.rows['gpu'].iloc[0]}."]
        if old := int((self.rows["method"] != str(self.experiment.version)).sum()):
            notes.append(f"{old} rows by an older method.")
        busy = sum(map(is_noisy, self.measured.to_dict("records")))
        if 2 * busy > len(self.measured):
            notes.append(f"†: {busy} of {len(self.measured)} rows.")
        if self.runs > 1:
            notes.append(f"Rows of {self.runs} runs.")
        return " ".join(notes)


def recorded(experiment: Experiment, machine: str) -> Results:
    """The rows of a machine; those of the small preset are no results."""
    rows = store.read(machine, experiment.chapter, experiment.table)
    if len(rows):
        rows = rows[rows["preset"] != "small"]
    if not len(rows):
        return Results(experiment, pd.DataFrame())
    rows = with_declared(experiment, rows)
    if "verdict" in rows:
        rows = rows.assign(verdict=rows["verdict"].map(todays, na_action="ignore"))
    return Results(experiment, _in_order(experiment, rows["preset"].iloc[0], rows))


def with_declared(experiment: Experiment, rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with all declared columns: an optional one that no row has is empty, another one raises."""
    required, optional = experiment.declared
    if (rows[STATUS] == "ok").any() and (absent := [name for name in required if name not in rows]):
        raise ColumnError(f"{experiment.name}: the records lack {', '.join(absent)}: measure the table again")
    return rows.assign(**{name: np.nan for name in optional if name not in rows})


def _in_order(experiment: Experiment, preset: str, rows: pd.DataFrame) -> pd.DataFrame:
    """Rows in the order of their configurations: in a file, one that was measured again stands at the end."""
    identity, configs = experiment.identity(preset), experiment.configurations(preset)
    position = {store.key(config, identity): place for place, config in enumerate(configs)}
    order = [position.get(store.key(row, identity), len(configs)) for row in rows.to_dict("records")]
    return rows.iloc[np.argsort(order, kind="stable")].reset_index(drop=True)


@dataclass(frozen=True)
class View:
    """A function from the measured rows of tables to numbers.

    Without rows of a table that it `needs` nothing is computed; those `beside` it may be empty.
    """

    of_rows: Callable[..., Any]  # of the tables, in this order
    needs: Tables
    beside: Tables = ()

    def on(self, machine: str) -> "OnMachine":
        """The numbers of the rows that a machine, the name of a folder of records, has recorded."""
        needed, others = (tuple(recorded(table, machine) for table in tables) for tables in (self.needs, self.beside))
        return OnMachine(self.of_rows, needed, others)


def numbers_of(needs: Tables, beside: Tables = ()) -> Callable[[Callable[..., Any]], View]:
    """Make a `View` of a function of these tables' rows."""
    return lambda compute: View(compute, needs, beside)


@dataclass(frozen=True)
class Table(Experiment):
    """An experiment that knows its numbers, too."""

    _view: list[View] = field(default_factory=list, compare=False)  # set once, by `numbers`

    def numbers(self, *, needs: Tables = (), beside: Tables = ()) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Declare the function from this table's measured rows, and those of other tables, to numbers."""

        def declare(compute: Callable[..., Any]) -> Callable[..., Any]:
            self._view[:] = [View(compute, (self, *needs), beside)]
            return compute

        return declare

    def of_rows(self, rows: pd.DataFrame, *others: pd.DataFrame) -> Any:
        """The numbers of these rows."""
        return self._view[0].of_rows(rows, *others)

    def on(self, machine: str) -> "OnMachine":
        """The numbers of the rows that a machine, the name of a folder of records, has recorded."""
        return self._view[0].on(machine)


class OnMachine:
    """The numbers of one or several tables on a machine, by name; computed when the first is asked for.

    Of tables that aren't measured, each name is a number that says so.
    """

    def __init__(self, compute: Callable[..., Any], sources: tuple[Results, ...], beside: tuple[Results, ...] = ()):
        self._compute, self.sources, self._beside = compute, sources, beside

    @property
    def measured(self) -> bool:
        """Whether each of the tables that are needed holds figures."""
        return all(len(table.measured) for table in self.sources)

    @property
    def origin(self) -> str:
        """For a caption: the machine, and of what runs and methods the first table's rows are."""
        return self.sources[0].origin

    def number(self, name: str) -> Any:
        """A number by its name, in which a dot leads into a namespace; one that says so where nothing is measured."""
        return attrgetter(name)(self) if self.measured else lacking(name)

    @cached_property
    def _values(self) -> dict[str, Any]:
        values = vars(self._compute(*(table.measured for table in (*self.sources, *self._beside))))
        if hidden := {"measured", "number", "origin", "sources"} & values.keys():
            raise AttributeError(f"{self._compute.__module__} names {', '.join(hidden)}, which a table has itself")
        return values

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if not self.measured:
            return lacking(", ".join(table.experiment.name for table in self.sources if not len(table.measured)))
        if name not in self._values:
            names = ", ".join(sorted(self._values))
            raise AttributeError(f"{self._compute.__module__} names no {name!r}; it names: {names}")
        return self._values[name]


def table(
    *,
    small: list[Row],
    cpu: list[Row] | None = None,
    gpu: list[Row] | None = None,
    big_gpu: list[Row] | None = None,
    version: int = 1,
    same_work: bool = True,
    missing: Callable[..., str] | None = None,
    columns: str | Sequence[str] = (),
    memory_here: bool = True,
    timed: bool = True,
    worth: Worth = NO_WORTH,
) -> Callable[[Callable[..., Row | list[Row]]], Table]:
    """Make a `Table` of a function in `helpers/chapters/<chapter>/<table>.py`.

    `columns` may be one string of names: `columns="median_ms n peak_gib?"`.

    Each class of machine has its configurations. A class of GPUs without any uses the other class's, else the CPU's;
    without any for the CPU, nothing is measured there.
    """
    big = next((sizes for sizes in (big_gpu, gpu, cpu) if sizes is not None), [])
    presets = {"small": small, "cpu": cpu or [], "gpu": big if gpu is None else gpu, "big-gpu": big}
    names = tuple(columns.split()) if isinstance(columns, str) else tuple(columns)

    def wrap(measure: Callable[..., Row | list[Row]]) -> Table:
        chapter, flags = measure.__module__.split(".")[-2], (memory_here, timed, worth)
        return Table(chapter, measure.__name__, measure, presets, version, same_work, missing, names, *flags)

    return wrap
