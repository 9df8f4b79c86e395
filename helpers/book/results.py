"""What one machine has recorded of a table: its rows, in the order of their configurations."""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from ..lab.estimate import todays
from ..lab.rows import STATUS
from . import store
from .experiment import ColumnError, Experiment


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
        """For a caption: the machine, and whether its rows are of several runs or of older methods."""
        if not len(self.rows):
            return ""
        notes = [f"Machine: {self.rows['gpu'].iloc[0]}."]
        if old := int((self.rows["method"] != str(self.experiment.version)).sum()):
            notes.append(f"{old} rows by an older method.")
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
