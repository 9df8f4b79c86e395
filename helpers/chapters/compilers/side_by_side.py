"""Backends built one after another and then timed in turn against eager: what inference and training share.

Each call starts with an idle device and ends with a synchronize.
"""

import time
from collections.abc import Callable, Iterable
from typing import Any

import pandas as pd
from torch import Tensor

from ...book.table import FAILED
from ...book.values import number
from ...compilers.backends import EAGER, missing_because
from ...compilers.messages import ExportFailed
from ...lab import STATUS, Comparison, Disagreement, Row, compare, device
from ...lab.memory import OUT_OF_MEMORY, is_out_of_memory
from ...lab.timing import synchronize

TIMED = "median_ms p20_ms p80_ms n baseline baseline_ms ratio? "
SPEEDS = TIMED + "speedup speedup_p20 speedup_p80 build_s "

Runs = dict[str, Callable[[], Any]]

# Rounds of a comparison: at least 10, if a run takes over a second at least 6, at most 200.
LEAST_ROUNDS, LEAST_SLOW_ROUNDS, MOST_ROUNDS, SLOW_S = 10, 6, 200, 1.0
TIMED_S = {"cpu": 5.0, "cuda": 1.5}  # of a comparison, by device type

# Each backend has threads of its own, which wait for more work for some ms before they sleep, on the cores that the
# next backend needs: without this pause ONNX Runtime took 1.5 to 1.7 times as long after eager on two cores.
REST_S = 0.02


def side_by_side(
    backends: Iterable[str], built: Callable[[str, Runs], tuple[Callable[[], Any], Row]], seconds: float | None
) -> list[Row]:
    """A row for eager and for each of the backends, from one comparison of `seconds`, at least 10 rounds.

    `built(backend, runs)` returns a backend's run and what its row says of the building; `runs` are those built
    before, eager's first. If a backend can't run here, fails, or disagrees, its row's status says so.
    """
    rows: dict[str, Row] = {name: {"backend": name} for name in dict.fromkeys([EAGER, *backends])}
    runs: Runs = {}
    for backend, row in rows.items():
        if reason := missing_because(backend):
            row[STATUS] = reason
            continue
        try:
            run, facts = built(backend, runs)
            runs[backend] = run
            row |= facts
        except (Disagreement, ExportFailed) as error:
            row[STATUS] = f"{FAILED}{error}"
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            row[STATUS] = OUT_OF_MEMORY
    compared = compare(
        runs, rounds=rounds_for(runs, seconds or TIMED_S[device().type]), warmup=1, check=False, before=rest
    )
    for backend in runs:
        rows[backend] |= speeds(compared, backend)
    return list(rows.values())


def waited(run: Callable[..., Any], *inputs: Tensor) -> Callable[[], Any]:
    """A function that calls `run` on the inputs and returns when the device is done."""

    def call() -> Any:
        outputs = run(*inputs)
        synchronize()
        return outputs

    return call


def rest() -> None:
    """Wait until the threads of other backends sleep; on a GPU there is nothing to wait for."""
    if device().type == "cpu":
        time.sleep(REST_S)


def rounds_for(runs: Runs, seconds: float) -> int:
    """The number of rounds that fill the seconds, within bounds. Costs a run of each."""
    taken = []
    for fn in runs.values():
        began = time.perf_counter()
        fn()
        taken.append(time.perf_counter() - began)
    least = LEAST_SLOW_ROUNDS if max(taken) > SLOW_S else LEAST_ROUNDS
    return min(max(int(seconds / sum(taken)), least), MOST_ROUNDS)


def speeds(compared: Comparison, backend: str) -> Row:
    """Times of a backend and of eager, its baseline, their paired ratio, and the speedup: eager's median over its."""
    speedup, p20, p80 = compared.ratio(EAGER, backend)
    return compared.row(backend, EAGER) | {"speedup": speedup, "speedup_p20": p20, "speedup_p80": p80}


def modes_named(rows: pd.DataFrame) -> pd.DataFrame:
    """With torch.compile's modes named as such."""
    return rows.assign(backend=rows["backend"].str.replace("^compile", "torch.compile", regex=True))


def spread(rows: pd.DataFrame, low: str, high: str, form: str) -> pd.Series:
    ends = zip(rows[low], rows[high], strict=True)
    return pd.Series([number(None) if a != a else f"{a:{form}}–{b:{form}}" for a, b in ends], rows.index)
