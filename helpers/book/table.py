"""A table in one file: its configurations, the function that measures one, and the function from rows to numbers.

@table(gpu=[…], cpu=[…], small=[…], columns="…", worth=Worth(…))
def ladder(model, sequence, step) -> Row: …          # one configuration, measured

@ladder.numbers(needs=[ceilings], beside=[pairs])
def _(rows, ceilings, pairs) -> Ladder: …            # a small dataclass, or a namespace, of numbers and frames

rows = ladder("small")                               # all configurations of a class of machine, measured: a DataFrame
numbers = ladder.on("nvidia-h200")                   # those of one machine's records; nothing chooses a machine

Numbers that belong to no table alone are declared as `@numbers_of([ceilings, modules])` and read by `.on`, too.
"""

import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import Any

import numpy as np
import pandas as pd

from ..lab import STATUS, Row, missing_because
from ..lab.device_share import DEVICE_SHARE
from ..lab.memory import OUT_OF_MEMORY, free_memory, is_out_of_memory
from . import store
from .store import PROVENANCE, RUN
from .values import is_noisy, lacking

FAILED = "failed: "
BF16 = {"bf16", "bfloat16"}  # as configurations name it; on a GPU without bf16 units it would time an emulation
# What a trial, and a GPU, add to a row beside its times; every table may have them.
OF_PROGRAMS = ("ended", "luck", "dropped", "matmul_before", "matmul_after")
TRIAL = ("ratio", "low", "high", "pairs", "starts", "verdict", *OF_PROGRAMS)
OTHER_ROWS = 0.1  # of a headline row's worth
UNORDERED, LAST = 50, 99  # places in the order of a GPU's rows: of those that declare none, and after them

Tables = Sequence["Table"]


@dataclass(frozen=True)
class Worth:
    """What a table brings to somebody with little time, and what it costs.

    `row` is the worth of a headline row, from 1 to 100; any other row's is a tenth of it. Headline rows have one of the
    values that `headline` names for each column; without it all are. `answers` is the question of the task. `cpu`,
    `gpu` and `big_gpu` are seconds of a configuration, until a machine of that class has recorded them.

    On a GPU, whose minutes are few, headline rows come in the order of `on_gpu` where tables declare one: `LAST` after
    all others. A table in `one_run` compares rows with each other: it is measured whole, by one process.
    """

    row: float
    answers: str
    cpu: float | None = None
    gpu: float | None = None
    big_gpu: float | None = None
    headline: Mapping[str, tuple] = field(default_factory=dict)
    on_gpu: int | None = None
    one_run: bool = False

    def of(self, config: Row) -> float:
        on_page = all(config.get(name) in values for name, values in self.headline.items())
        return self.row if on_page else self.row * OTHER_ROWS

    def place(self, config: Row, preset: str) -> int:
        """Where a configuration stands in the order of a GPU's rows; elsewhere all have one place."""
        ordered = self.on_gpu is not None and preset in ("gpu", "big-gpu")
        return self.on_gpu if ordered and (self.one_run or self.of(config) == self.row) else UNORDERED

    def seconds(self, preset: str) -> float | None:
        on_gpu = self.big_gpu if self.gpu is None or preset == "big-gpu" else self.gpu
        return self.cpu if preset in ("cpu", "small") else on_gpu


class ColumnError(ValueError):
    """A table whose columns aren't those that it declares."""


@dataclass(frozen=True)
class Table:
    """A table of a chapter. Raise `version` when the method changes: older records then count as stale.

    `columns` are those that a measured row adds to its configuration; one that not every row has ends in "?". Another
    column, or a missing one, is an error when a row is measured, and a missing one when it is read.

    `missing` says of a configuration, which it is given as keywords, why it can't run on this machine ("" if it can): a
    row then holds that as its status, and planning tells it without measuring.
    `same_work`: all runs of a row do the same work, so that a wide spread is noise and a reason to measure again.
    `memory_here`: a row's peak is this machine's, and not that of a simulated or predicted one.
    `timed`: its figures depend on how fast the machine is; no load changes a loss, and a trial in pairs
    drops those that were disturbed itself: neither is measured again.
    `worth` decides what is measured first where time is short.
    """

    chapter: str
    table: str
    measure: Callable[..., Row | list[Row]]
    presets: Mapping[str, list[Row]]
    version: int
    same_work: bool = True
    missing: Callable[..., str] | None = None
    columns: tuple[str, ...] = ()
    memory_here: bool = True
    timed: bool = True
    worth: Worth = Worth(1, "")
    _view: "list[View]" = field(default_factory=list, compare=False)  # set once, by `numbers`

    def __reduce__(self) -> tuple:
        """Another process finds a table by its name: its module holds it in place of the function."""
        return pkgutil.resolve_name, (f"{self.measure.__module__}:{self.measure.__name__}",)

    @property
    def name(self) -> str:
        return f"{self.chapter}/{self.table}"

    @property
    def declared(self) -> tuple[list[str], list[str]]:
        """The columns that each measured row has, and those that some have."""
        optional = [name.removesuffix("?") for name in self.columns if name.endswith("?")]
        return [name for name in self.columns if not name.endswith("?")], optional

    def configurations(self, preset: str) -> list[Row]:
        """The configurations for a class of machine; empty if the experiment is for another class."""
        if preset not in self.presets:
            raise ValueError(f"unknown preset {preset!r}; valid: {', '.join(self.presets)}")
        return self.presets[preset]

    def identity(self, preset: str) -> list[str]:
        """The columns that identify a row's configuration."""
        return list(dict.fromkeys(name for config in self.configurations(preset) for name in config))

    def missing_because(self, config: Row) -> str:
        """Why a configuration can't run on this machine, as its row's status; "" if it can."""
        words = {word for value in config.values() for word in str(value).split(" + ")}
        if BF16 & words and (reason := missing_because("native bf16")):
            return reason
        return self.missing(**config) if self.missing else ""

    def rows(self, config: Row) -> list[Row]:
        """Measure one configuration. If memory runs out, or it can't run here, the row's status says so."""
        if reason := self.missing_because(config):
            return [config | {STATUS: reason}]
        try:
            measured = self.measure(**config)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            measured = {STATUS: OUT_OF_MEMORY}
        finally:
            free_memory()
        rows = measured if isinstance(measured, list) else [measured]
        if self.columns:
            for row in rows:
                self._check(row, config)
        return [config | {STATUS: "ok"} | row for row in rows]

    def _check(self, row: Row, config: Row) -> None:
        required, optional = self.declared
        if row.get(STATUS, "ok") != "ok":
            return
        if absent := [name for name in required if name not in row and name not in config]:
            raise ColumnError(f"{self.name}: a row lacks {', '.join(absent)}")
        allowed = {*required, *optional, *config, STATUS, *TRIAL, DEVICE_SHARE}
        if taken := sorted({*PROVENANCE, *RUN} & {*row}):
            raise ColumnError(f"{self.name}: a record itself says {', '.join(taken)} of a row")
        if unknown := [name for name in row if name not in allowed]:
            raise ColumnError(f"{self.name} declares no column {', '.join(unknown)}")

    def __call__(self, preset: str = "small") -> pd.DataFrame:
        return pd.DataFrame([row for config in self.configurations(preset) for row in self.rows(config)])

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


@dataclass(frozen=True)
class Results:
    """What a machine, the name of its folder, has recorded of an experiment at the sizes of its class."""

    experiment: Table
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
            notes.append(f"{'All' if old == len(self.rows) else old} rows by an older method.")
        busy = sum(map(is_noisy, self.measured.to_dict("records")))
        if 2 * busy > len(self.measured):
            notes.append(f"†: {busy} of {len(self.measured)} rows.")
        if self.runs > 1:
            notes.append(f"Rows of {self.runs} runs.")
        return " ".join(notes)


def recorded(experiment: Table, machine: str) -> Results:
    """The rows of a machine; those of the small preset are no results."""
    rows = store.read(machine, experiment.chapter, experiment.table)
    if len(rows):
        rows = rows[rows["preset"] != "small"]
    if not len(rows):
        return Results(experiment, pd.DataFrame())
    rows = with_declared(experiment, rows)
    return Results(experiment, _in_order(experiment, rows["preset"].iloc[0], rows))


def with_declared(experiment: Table, rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with all declared columns: an optional one that no row has is empty, another one raises."""
    required, optional = experiment.declared
    if (rows[STATUS] == "ok").any() and (absent := [name for name in required if name not in rows]):
        raise ColumnError(f"{experiment.name}: the records lack {', '.join(absent)}: measure the table again")
    return rows.assign(**{name: np.nan for name in optional if name not in rows})


def _in_order(experiment: Table, preset: str, rows: pd.DataFrame) -> pd.DataFrame:
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
    columns: str | Sequence[str] = (),
    version: int = 1,
    **fields: Any,
) -> Callable[[Callable[..., Row | list[Row]]], Table]:
    """Make a `Table` of a function in `helpers/chapters/<chapter>/<table>.py`; `fields` are others of the `Table`'s.

    `columns` may be one string of names: `columns="median_ms n peak_gib?"`.

    Each class of machine has its configurations. A class of GPUs without any uses the other class's, else the CPU's;
    without any for the CPU, nothing is measured there.
    """
    big = next((sizes for sizes in (big_gpu, gpu, cpu) if sizes is not None), [])
    presets = {"small": small, "cpu": cpu or [], "gpu": big if gpu is None else gpu, "big-gpu": big}
    names = tuple(columns.split()) if isinstance(columns, str) else tuple(columns)

    def wrap(measure: Callable[..., Row | list[Row]]) -> Table:
        chapter = measure.__module__.split(".")[-2]
        return Table(chapter, measure.__name__, measure, presets, version, columns=names, **fields)

    return wrap
