"""What is recorded of an experiment, by the machine that is shown, and the numbers that a claims function names in it.

ladder = results(experiments.rush.ladder).named(claims.rush.ladder)
ladder.total                 # a Number: a wrong column raises, a missing row is a number that is not measured
ladder.on_cpu.total          # the CPU's, where a GPU is shown

Numbers of one name are always of one machine: no ratio has its two sides on two.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd

from ..estimate import todays
from ..machine import slug
from . import store
from .experiment import ColumnError, Experiment
from .store import STATUS
from .values import lacking


@dataclass(frozen=True)
class Results:
    """What one machine has recorded of an experiment, at the sizes of its class."""

    experiment: Experiment
    rows: pd.DataFrame

    @property
    def measured(self) -> pd.DataFrame:
        """The rows that hold figures."""
        return self.rows[self.rows[STATUS] == "ok"] if len(self.rows) else self.rows

    def named(
        self, claims: Callable[..., SimpleNamespace], *others: "Results", beside: "tuple[Results, ...]" = ()
    ) -> "Named":
        """The numbers that `claims` makes of the measured rows of this table, and of the others, all of one machine.

        That is this table's, else the first that has all, one with most of their headline rows before others. It can
        do without those `beside`.
        """
        sources = _of_one_machine((self, *others))
        here = sources[0].machine
        return Named(claims, sources, tuple(each if each.machine == here else each.of(here) for each in beside))

    @property
    def machine(self) -> str:
        """The name of the folder of the machine; "" without rows."""
        return slug(self.rows["gpu"].iloc[0]) if len(self.rows) and "gpu" in self.rows else ""

    def of(self, machine: str) -> "Results":
        """The same table of another machine, without rows where it has none."""
        return recorded(self.experiment, machine=machine) if machine else Results(self.experiment, self.rows.iloc[:0])

    @property
    def runs(self) -> int:
        """How many processes measured the rows that hold figures; older rows count by their day and commit."""
        return len(set(map(store.run_of, self.measured.to_dict("records"))))

    @property
    def origin(self) -> str:
        """For a caption: the machine, where it is not the one that page 1 names, several runs, and older methods."""
        if not len(self.rows):
            return ""
        notes = []
        if (name := self.rows["gpu"].iloc[0]) != main_machine():
            only_cpu = [slug(name)] == store.devices(cpu=True)
            notes.append("On the CPU." if only_cpu else f"Measured on {name}.")
        return " ".join([*notes, self.mixed]).strip()

    @property
    def mixed(self) -> str:
        """For a caption: that its rows are of several runs or of older methods, if they are."""
        old = int((self.rows["method"] != str(self.experiment.version)).sum())
        notes = [f"{old} rows by an older method."] if old else []
        return " ".join([*notes, *([f"Rows of {self.runs} runs."] if self.runs > 1 else [])])


class Named:
    """The numbers of one or several tables, by name; computed when the first is asked for.

    Of tables that aren't measured, each name is a number that says so.
    """

    def __init__(
        self, claims: Callable[..., SimpleNamespace], sources: tuple[Results, ...], beside: tuple[Results, ...] = ()
    ):
        self._claims, self.sources, self._beside = claims, sources, beside

    @property
    def measured(self) -> bool:
        """Whether each of the tables holds figures."""
        return all(len(table.measured) for table in self.sources)

    @property
    def on_cpu(self) -> "Named":
        """The same numbers of the CPU that is measured; of nothing where a CPU is shown itself."""
        shown = self.sources[0].machine
        return self._of("" if not shown or shown.startswith("cpu-") else _folder(store.devices(cpu=True)))

    @property
    def on_gpu(self) -> "Named":
        """The same numbers of the GPU that is measured, where a CPU is shown as it has more rows; else of nothing."""
        shown = self.sources[0].machine
        gpu = _folder(store.devices()) if shown.startswith("cpu-") else ""
        return self._of(gpu)

    def _of(self, folder: str) -> "Named":
        return Named(self._claims, *(tuple(each.of(folder) for each in of) for of in (self.sources, self._beside)))

    @property
    def origin(self) -> str:
        return " ".join(dict.fromkeys(table.origin for table in self.sources if table.origin))

    @cached_property
    def _values(self) -> dict[str, Any]:
        tables = [table.measured for table in (*self.sources, *self._beside)]
        values = vars(self._claims(*tables))
        if hidden := {"measured", "on_cpu", "on_gpu", "origin", "sources"} & values.keys():
            raise AttributeError(f"{self._claims.__qualname__} names {', '.join(hidden)}, which a table has itself")
        return values

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if not self.measured:
            return lacking(", ".join(table.experiment.name for table in self.sources if not len(table.measured)))
        if name not in self._values:
            names = ", ".join(sorted(self._values))
            raise AttributeError(f"{self._claims.__qualname__} names no {name!r}; it names: {names}")
        return self._values[name]


def recorded(experiment: Experiment, preset: str | None = None, machine: str | None = None) -> Results:
    """The records of the machine that knows most: a GPU's before a CPU's if it has most of the headline rows, rows of
    this method before older ones, and then the main machine's before others'.

    Rows of the small preset are no results. `preset` chooses rows, and `machine`, the name of its folder, whose.
    """
    tables = []
    for device in [machine] if machine else [*store.devices(), *store.devices(cpu=True)]:
        rows = store.read(device, experiment.chapter, experiment.table)
        if len(rows):
            rows = rows[rows["preset"] == preset if preset else rows["preset"] != "small"]
        if len(rows):
            tables.append(rows)
    on_gpu = [rows for rows in tables if rows["preset"].iloc[0] != "cpu" and _tells_most(experiment, rows)]
    on_gpu = on_gpu or [rows for rows in tables if rows["preset"].iloc[0] == "cpu"] or tables
    current, first = str(experiment.version), main_machine()
    on_gpu.sort(key=lambda rows: ((rows["method"] != current).mean(), rows["gpu"].iloc[0] != first, -len(rows)))
    rows = with_declared(experiment, on_gpu[0]) if on_gpu else pd.DataFrame()
    if "verdict" in rows:
        rows = rows.assign(verdict=rows["verdict"].map(todays, na_action="ignore"))
    return Results(experiment, _in_order(experiment, rows["preset"].iloc[0], rows) if len(rows) else rows)


def _tells_most(e: Experiment, rows: pd.DataFrame) -> bool:
    """Whether more than half of a table's headline rows are recorded: a quarter of an hour leaves some tables begun."""
    preset = rows["preset"].iloc[0]
    identity, there = e.identity(preset), rows.to_dict("records")
    done = {store.key(row, identity) for row in there}
    headlines = [config for config in e.configurations(preset) if e.worth.of(config) == e.worth.row]
    return 2 * sum(store.key(config, identity) in done for config in headlines) > len(headlines)


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


def main_machine() -> str:
    """The machine that the report names first: of the GPUs, else of the CPUs, the last one with half of the tables."""
    first = _folder(store.devices() or store.devices(cpu=True))
    return next((row["gpu"] for file in _tables(first) for row in store.whole_rows(file)), first) if first else ""


def with_cpu(frame: pd.DataFrame, cpu: Any, column: str, *on: str) -> pd.DataFrame:
    """A GPU's table with a column of the CPU's beside, matched by columns; as it is where `cpu` is no table."""
    if not isinstance(cpu, pd.DataFrame):
        return frame
    there = dict(zip(cpu[list(on)].itertuples(index=False, name=None), cpu[column], strict=True))
    keys = frame[list(on)].itertuples(index=False, name=None)
    return frame.assign(**{f"{column} on the CPU": [there.get(key) for key in keys]})


def _of_one_machine(tables: tuple[Results, ...]) -> tuple[Results, ...]:
    """The tables of the first one's machine, else of the first machine that has all of them measured."""
    if len({table.machine for table in tables if table.machine}) <= 1:
        return tables
    folders = dict.fromkeys((tables[0].machine, *store.devices(), *store.devices(cpu=True)))
    known = [tuple(table.of(folder) for table in tables) for folder in folders]
    known = [of_one for of_one in known if all(len(table.measured) for table in of_one)]
    told = (of_one for of_one in known if all(_tells_most(table.experiment, table.rows) for table in of_one))
    return next(told, known[0] if known else (tables[0], *(table.of("") for table in tables[1:])))


def _folder(names: list[str]) -> str:
    """Of these machines the last one measured that has half as many tables as any; "" of none."""
    counts = {name: len(_tables(name)) for name in names}
    most = max(counts.values(), default=0)
    return max(names, key=lambda name: (2 * counts[name] >= most, _last(name), counts[name]), default="")


def _tables(folder: str) -> list[Path]:
    return sorted((store.folder() / folder).rglob("*.csv"))


def _last(of: str) -> bytes:
    """The day on which a machine was measured last: a row ends with it, its commit, method and checksum."""
    return max((day for at in _tables(of) for day in re.findall(rb"20\d\d-..-..", at.read_bytes()[-60:])), default=b"")
