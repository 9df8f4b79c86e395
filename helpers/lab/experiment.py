"""What a chapter measures: a function of a configuration, and the configurations of each preset.

    @experiment(small=[{"size": 256}], full=[{"size": 8192}])
    def copy(size):
        "Bytes a second of a device-to-device copy."
        ...
        return {"gb_per_s": 1.0}

`copy("small")` measures the whole preset and returns a DataFrame. `lab.measure` runs the same configurations
one by one and records each, so that it can stop and go on.
"""

import gc
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pandas as pd
import torch

from .machine import device
from .records import STATUS, Row

OUT_OF_MEMORY = "out of memory"
FAILED = "failed: "
PRESETS = ("small", "full")


@dataclass(frozen=True)
class Experiment:
    """A table of a chapter. Raise `version` when the way of measuring changes: older records then count as stale.

    `host` marks what can be told of a CPU as well (the sorting of indices, say): a CPU's record is a result where there
    is none of a GPU's machine. `beside` marks what is another result on a CPU: its record stands beside a GPU's.
    """

    chapter: str
    table: str
    measure: Callable[..., Row | list[Row]]
    presets: Mapping[str, list[Row]]
    version: int
    host: bool = False
    beside: bool = False

    @property
    def about(self) -> str:
        return inspect.getdoc(self.measure) or ""

    def configurations(self, preset: str) -> list[Row]:
        if preset not in self.presets:
            raise ValueError(f"unknown preset {preset!r}; valid: {', '.join(self.presets)}")
        return self.presets[preset]

    def identity(self, preset: str) -> list[str]:
        """The columns that say which configuration a row is about."""
        return list(dict.fromkeys(name for config in self.configurations(preset) for name in config))

    def rows(self, config: Row) -> list[Row]:
        """Measure one configuration. Out of memory is a row that says so."""
        try:
            found = self.measure(**config)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            found = {STATUS: OUT_OF_MEMORY}
        finally:
            free_memory()
        rows = found if isinstance(found, list) else [found]
        return [config | {STATUS: "ok"} | row for row in rows]

    def __call__(self, preset: str = "small") -> pd.DataFrame:
        return pd.DataFrame([row for config in self.configurations(preset) for row in self.rows(config)])


def experiment(
    *, small: list[Row], full: list[Row], version: int = 1, host: bool = False, beside: bool = False
) -> Callable[[Callable], Experiment]:
    """Make an `Experiment` of a function that lies in `helpers/experiments/<chapter>.py`."""

    def wrap(measure: Callable[..., Row | list[Row]]) -> Experiment:
        parts = measure.__module__.split(".")
        chapter = parts[-1] if parts[-2] == "experiments" else parts[-2]
        presets = {"small": small, "full": full}
        return Experiment(chapter, measure.__name__, measure, presets, version, host or beside, beside)

    return wrap


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that the device, or the host, has no memory left."""
    said = str(error).lower()
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError)
        and any(words in said for words in ("out of memory", "can't allocate memory", "alloc_failed"))
    )


def free_memory() -> None:
    """Give back what the last configuration held, so that the next one starts from the same state.

    That includes what cuBLAS works in, which counts as allocated: a CUDA graph captured before must not run after.
    """
    gc.collect()
    if device().type == "cuda":
        if hasattr(torch._C, "_cuda_clearCublasWorkspaces"):
            torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
