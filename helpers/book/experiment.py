"""Experiments: a function that measures one configuration, and the configurations for each class of machine.

Calling one with a preset measures all of its configurations and returns a DataFrame. `measure` records each
configuration when it is done, so that an interrupted run can be resumed.
"""

import gc
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import pandas as pd
import torch

from ..lab.device_share import DEVICE_SHARE
from ..lab.machine import device, missing_because
from ..lab.memory import OUT_OF_MEMORY, end_loader_workers, is_out_of_memory
from ..lab.rows import STATUS, Row
from .store import PROVENANCE, RUN

FAILED = "failed: "
BF16 = {"bf16", "bfloat16"}  # as configurations name it; on a GPU without bf16 units it would time an emulation


# What a trial, and a GPU, add to a row beside its times; every table may have them.
OF_PROGRAMS = ("ended", "luck", "dropped", "matmul_before", "matmul_after")
TRIAL = ("ratio", "low", "high", "pairs", "starts", "verdict", *OF_PROGRAMS)


OTHER_ROWS = 0.1  # of a headline row's worth
UNORDERED, LAST = 50, 99  # places in the order of a GPU's rows: of those that declare none, and after them


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
    """A table whose columns aren't those that its experiment declares."""


@dataclass(frozen=True)
class Experiment:
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


def free_memory() -> None:
    """Free the last configuration's memory, so that all configurations start from the same state.

    Loaders' workers end first: each would be waited for in vain for five seconds where its loader is garbage. This
    includes cuBLAS's workspaces, which count as allocated: CUDA graphs captured before must not be replayed after.
    """
    end_loader_workers()
    gc.collect()
    if device().type == "cuda":
        if hasattr(torch._C, "_cuda_clearCublasWorkspaces"):  # torch has no public function for it
            torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
