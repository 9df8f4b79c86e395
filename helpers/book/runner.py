"""Run experiments and record them, one configuration after another: resumable, those of most worth first.

What was noisy, or was measured while other processes used the CPU or while matrix products were slower or faster than
beside the others, is measured again when all else is done: a machine's state lasts for minutes. The quietest of three
attempts counts. On a CPU the allocator keeps its pages (`lab.keep_pages`). A GPU's clock and power stand beside each
row.
"""

import contextlib
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from tqdm import tqdm

from ..lab import ceilings, files, machine
from ..lab.cpu import keep_pages, release_pages
from ..lab.timing import synchronize
from . import plan, store
from .table import FAILED, Table

LOCK = Path(tempfile.gettempdir()) / "deep-learning-speed-measure.lock"
LONGEST = 200  # characters of an error in a row
ATTEMPTS = 3
SPREAD = 1.3  # a row whose p80 / p20 is above this is noisy
DISTURBED = 0.1  # of the usual rate of products: a row beside one that is further off is noisy
LOADED = 0.1  # a machine with more than this share of its cores used by others is loaded
AGAIN_SHARE = 0.1  # of the time of the first attempts, at most, goes to what is measured again


@dataclass(frozen=True)
class Progress:
    """Numbers of configurations in a call of `measure`."""

    measured: int
    fresh: int
    failed: int = 0
    missing: list[plan.Pending] = field(default_factory=list)  # for which there was no time

    @property
    def left(self) -> int:
        return len(self.missing)


def measure(
    experiments: Iterable[Table],
    preset: str | None = None,
    *,
    seconds: float | None = None,
    results: Path | str | None = None,
) -> Progress:
    """Measure every configuration that has no fresh record, and record it as soon as it is done.

    `preset` is the machine's class (`device_class`) unless given. The rows of most worth a second come first
    (`plan.in_order`). With `seconds`, none is started that is expected to take longer than the time left: smaller ones
    are; and what is left then goes to rows that this machine has recorded as noisy. A call with the same arguments
    resumes, also on another machine of the same card that has these records.
    A configuration that raises, or whose variant disagrees with the reference, is recorded as failed. An error that
    leaves the device unusable is raised.

    Before anything is measured, damaged tables, folders that can't be written, `python -O`, and another `measure` on
    this machine are errors: two at once would time each other. (`small` is never a result, and isn't kept from it.)
    """
    machine.device()  # raises where the GPU can't be used
    machine.check_assertions()
    preset = preset or machine.device_class()
    with contextlib.nullcontext() if preset == "small" else _alone():
        return _measure(list(experiments), preset, seconds, results)


def _measure(experiments: list[Table], preset: str, seconds: float | None, results: Path | str | None) -> Progress:
    began, gpu = time.perf_counter(), machine.slug(machine.device_name())
    stored = [row for e in experiments for row in store.read_rows(_file(gpu, e, results))]
    for folder in {_file(gpu, e, results).parent for e in experiments if e.configurations(preset)}:
        files.check_writable(folder, "--results")
    plans = [plan.plan(e, preset, results=results, again=seconds is not None) for e in experiments]
    todo = plan.in_order(plans)
    pages = (keep_pages() or "kept") if machine.device().type == "cpu" and preset != "small" else ""
    of_preset = [row["matmul_tflops"] for row in stored if row["preset"] == preset and row.get("matmul_tflops")]
    rates = None if preset == "small" else list(map(float, of_preset))  # of matrix products beside this machine's rows
    last: dict[str, tuple[plan.Pending, float]] = {}  # of each table, and what it took
    best: dict[int, tuple[float, list[store.Row]]] = {}
    spent = [0.0] * len(todo)
    end, failed, waiting = float("inf") if seconds is None else seconds, 0, list(range(len(todo)))
    with tqdm(total=len(todo), unit="row", file=sys.stderr, disable=not todo) as bar:
        for attempt in range(1, 2 if preset == "small" else ATTEMPTS + 1):
            for number in waiting:
                pending = todo[number]
                e, start = pending.experiment, time.perf_counter()
                if end - (start - began) <= _needs(pending, last.get(e.name), todo, best):
                    continue
                bar.set_description(e.name)
                if pages == "kept" and e.name not in last:
                    release_pages()
                rows, excess = measured_rows(e, pending.config, rates)
                took = time.perf_counter() - start
                spent[number] += took
                if not pending.reason:
                    last[e.name] = pending, took
                failing = any(str(row[store.STATUS]).startswith(FAILED) for row in rows)
                if number not in best:
                    failed += failing
                    bar.update()
                if number not in best or (excess < best[number][0] and not failing):
                    best[number] = excess, rows
                if pending.noisy and (failing or best[number][0] > 1):
                    continue  # what is recorded is no worse
                more = {store.SECONDS: round(spent[number], 3), "attempts": attempt, "pages": pages}
                rows = [row | more | provenance(e, preset) for row in best[number][1]]
                store.replace(_file(gpu, e, results), rows, [*e.identity(preset), "preset"])
            if attempt == 1:
                end = min(end, (1 + AGAIN_SHARE) * (time.perf_counter() - began))
            waiting = [number for number, (excess, _) in best.items() if excess > 1]
    left = [pending for number, pending in enumerate(todo) if number not in best and not pending.noisy]
    return Progress(len(best), sum(p.fresh for p in plans), failed, left)


def _needs(
    pending: plan.Pending, last: tuple[plan.Pending, float] | None, todo: list[plan.Pending], begun: Iterable[int]
) -> float:
    """Seconds that must be left to start a row: of a table that is measured whole, for all of it, until it is begun."""
    table = [number for number, other in enumerate(todo) if other.experiment is pending.experiment]
    if pending.whole and not set(table) & set(begun):
        return sum(todo[number].lasts() for number in table)
    return pending.lasts(last)


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Hold the machine's lock of measuring; a BlockingIOError if another process does."""
    if not LOCK.exists():  # another user's is only read
        LOCK.touch()
    with files.locked(LOCK, "another `measure` runs on this machine; each would time the other"):
        yield


def measured_rows(e: Table, config: store.Row, rates: list[float] | None = None) -> tuple[list[store.Row], float]:
    """One configuration's rows, each with the machine's load and the reasons it is noisy, and by how much it is.

    That is the largest factor by which a limit is exceeded. If `rates` are given, those of matrix products beside the
    rows measured before, this row's is measured and added.
    """
    with machine.OthersLoad() as load, ceilings.UnderLoad() as card:
        try:
            rows = e.rows(config)
        except Exception as error:
            rows = [config | {store.STATUS: FAILED + _in_a_line(error)}]
    timed = e.timed and any(row[store.STATUS] == "ok" for row in rows)
    beside: store.Row = {"load": load.cores, "clock_mhz": card.clock_mhz, "power_w": card.power_w}
    noise = _noise(rows, load.cores, e.same_work) if timed else []
    if rates is not None and timed:
        beside["matmul_tflops"] = ceilings.rate_beside()
        noise += _disturbed(beside["matmul_tflops"], rates)
        rates.append(beside["matmul_tflops"])
    beside["noisy"] = ", ".join(reason for reason, _ in noise)
    return [row | beside for row in rows], max((value for _, value in noise), default=0.0)


def _noise(rows: list[store.Row], load: float | None, same_work: bool) -> list[tuple[str, float]]:
    """The reasons why rows are noisy, each with the factor by which it exceeds its limit."""
    noise = []
    if load is not None and load > (limit := LOADED * (os.cpu_count() or 1)):
        noise.append((f"others used {load:g} cores", load / limit))
    spread = max((_spread(row) for row in rows), default=1.0) if same_work else 1.0
    if spread > SPREAD:
        noise.append((f"p80 is {spread:.2f} times p20", spread / SPREAD))
    return noise


def _disturbed(rate: float, rates: list[float]) -> list[tuple[str, float]]:
    if len(rates) < 3:
        return []
    share = rate / median(rates)
    reason = f"matrix products ran at {share:.2f} of their usual rate"
    return [(reason, abs(share - 1) / DISTURBED)] if abs(share - 1) > DISTURBED else []


def _spread(row: store.Row) -> float:
    """The largest p80 / p20 of a row's times."""
    pairs = [(row[name], row.get(name.replace("p20", "p80"))) for name in row if name.endswith(("p20_ms", "p20_s"))]
    return max((p80 / p20 for p20, p80 in pairs if p20 and p80), default=1.0)


def _in_a_line(error: Exception) -> str:
    """An error as one line, in which the project's files have no folder. The traceback of an error that isn't the
    library's own goes to stderr.

    Raises it again if it has left the device unusable.
    """
    text = str(error).replace(f"{files.project_root()}{os.sep}", "")
    if type(error).__module__.partition(".")[0] == __name__.partition(".")[0]:
        return text
    try:
        synchronize()  # fails after an error inside a CUDA kernel
    except RuntimeError:
        raise error from None
    tqdm.write("".join(traceback.format_exception(error)), file=sys.stderr, end="")
    return f"{type(error).__name__}: {text.partition(chr(10))[0]}"[:LONGEST]


def provenance(e: Table, preset: str) -> store.Row:
    """The provenance columns of a row."""
    known = machine.environment()
    origin = {name: known[name] for name in store.PROVENANCE if name in known}
    return origin | {"preset": preset, "method": e.version, store.PROCESS: machine.BEGAN}


def _file(gpu: str, e: Table, results: Path | str | None) -> Path:
    return store.path(gpu, e.chapter, e.table, results)
