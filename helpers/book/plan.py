"""What `measure` would do on this machine, in which order, how long that takes, and how much memory. Nothing runs here.

Rows come in the order of their worth a second, so that the time there is goes to those that a reader would miss most: a
table's headline rows, then its others; on a GPU first in the order that tables declare. A table of one run is measured
whole or not at all. Last, where there is a limit of time, come rows that are recorded as noisy. Time and memory are
those of recorded rows of the same table and class of machine: of the same configurations where some machine has
recorded them, else the mean of the others, else what the table declares. A plan costs some milliseconds a table, and
touches no device.
"""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import mean

from ..lab import Row, machine
from ..lab.machine import device_class, device_name, slug
from . import store
from .table import FAILED, LAST, Table

IN_GIB = {"peak_gib": 1.0, "peak_mib": 1 / 1024}
LEAST_S = 0.01  # what a row takes at least, also one that only says why it can't run
AGAIN = 0.1  # of a row's worth, where it is recorded and noisy


@dataclass(frozen=True)
class Pending:
    """A configuration to measure; `reason` says why it gets no more than a status here. `noisy`: it is recorded so."""

    experiment: Table
    config: Row
    preset: str
    seconds: float | None  # expected; None: unknown
    reason: str = ""
    noisy: bool = False

    @property
    def worth(self) -> float:
        return self.experiment.worth.of(self.config) * (AGAIN if self.noisy else 1)

    @property
    def place(self) -> int:
        return LAST + 1 if self.noisy else self.experiment.worth.place(self.config, self.preset)

    @property
    def whole(self) -> bool:
        """Whether it is measured with all others of its table or not at all."""
        return is_one_run(self.experiment, self.preset)

    def lasts(self, before: "tuple[Pending, float] | None" = None) -> float:
        """Expected seconds, corrected by what the table's last row took; 0 if nothing tells."""
        last, took = before or (self, 0.0)
        if before is None or not took:
            return self.seconds or 0.0
        return took * self.seconds / last.seconds if self.seconds and last.seconds else took


@dataclass(frozen=True)
class Plan:
    """What is to be measured of a table at the sizes of a preset; `again`: what is recorded, and noisy."""

    experiment: Table
    preset: str
    fresh: int = 0
    jobs: tuple[Pending, ...] = ()
    again: tuple[Pending, ...] = ()
    gib: float | None = None  # the largest peak recorded; None: unknown

    @property
    def missing(self) -> int:
        return len(self.jobs)

    @property
    def left_out(self) -> dict[str, int]:
        """Why -> how many of the missing get no more than a status."""
        return dict(Counter(job.reason for job in self.jobs if job.reason))

    @property
    def seconds(self) -> float | None:
        """Of all that is missing; None: unknown."""
        return _sum(self.jobs)


def plan(e: Table, preset: str | None = None, *, results: Path | str | None = None, again: bool = False) -> Plan:
    """What `measure` would measure of a table; `preset` is the machine's class unless given.

    `again`: rows that this machine has recorded as noisy are measured once more.
    """
    preset = preset or device_class()
    here = store.read_rows(store.path(slug(device_name()), e.chapter, e.table, results))
    configs, missing = e.configurations(preset), _missing(e, preset, here)
    noisy = _noisy(e, preset, here) if again and e.timed and preset != "small" and not e.worth.one_run else []
    recorded = _recorded(e, results) if missing or noisy else []
    jobs: list[Pending] = []
    for config, seconds in zip([*missing, *noisy], _expected(e, preset, [*missing, *noisy], recorded), strict=True):
        reason = e.missing_because(config)
        jobs.append(Pending(e, config, preset, 0.0 if reason else seconds, reason, config in noisy))
    first, more = tuple(jobs[: len(missing)]), tuple(jobs[len(missing) :])
    gib = _largest(e, preset, recorded) if any(not job.reason for job in first) else None
    return Plan(e, preset, len(configs) - len(missing), first, more, gib)


def is_one_run(e: Table, preset: str) -> bool:
    """Whether a table's rows are results that have to be of one process."""
    return e.worth.one_run and preset != "small"


def _missing(e: Table, preset: str, here: list[dict[str, str]]) -> list[Row]:
    """The configurations without a fresh row; where they must be of one run, all that this process hasn't measured."""
    missing = [config for config in e.configurations(preset) if not is_fresh(e, config, preset, here)]
    if not missing or not is_one_run(e, preset):
        return missing
    if len(missing) < len(e.configurations(preset)) and all(_failed(e, config, preset, here) for config in missing):
        return missing  # the rest is of one run already: a fault that stays must not cost the whole table each time
    of_this_run = [row for row in here if row.get(store.PROCESS) == machine.BEGAN]
    return [config for config in e.configurations(preset) if not is_fresh(e, config, preset, of_this_run)]


def _failed(e: Table, config: Row, preset: str, here: list[dict[str, str]]) -> bool:
    """Whether a configuration was tried, and its row says that it failed."""
    identity = e.identity(preset)
    rows = [row for row in here if row["preset"] == preset and store.key(row, identity) == store.key(config, identity)]
    return bool(rows) and all(row[store.STATUS].startswith(FAILED) for row in rows)


def _noisy(e: Table, preset: str, here: list[dict[str, str]]) -> list[Row]:
    """The configurations whose fresh rows are noisy."""
    identity = e.identity(preset)
    keys = {store.key(row, identity) for row in here if row["preset"] == preset and row.get("noisy")}
    configs = [config for config in e.configurations(preset) if store.key(config, identity) in keys]
    return [config for config in configs if is_fresh(e, config, preset, here)]


def in_order(plans: Iterable[Plan]) -> list[Pending]:
    """All rows to measure, by their tables' place and worth a second: headline rows together, and others together.

    A table of one run stays in its own order, in which baselines come first.
    """

    def rank(job: Pending) -> tuple[int, float]:
        return job.place, -(job.experiment.worth.row if job.whole else job.worth)

    groups = []
    for p in plans:
        for (place, less), group in groupby(sorted([*p.jobs, *p.again], key=rank), key=rank):
            jobs = list(group)
            seconds = [LEAST_S if job.seconds is None else max(job.seconds, LEAST_S) for job in jobs]
            groups.append(((place, less / mean(seconds)), jobs))
    groups.sort(key=lambda group: group[0])
    return [job for _, jobs in groups for job in jobs]


def within(jobs: Iterable[Pending], seconds: float) -> list[Pending]:
    """The rows that are measured in so many seconds: what doesn't fit gives way to what comes after it."""
    chosen = []
    for whole, group in groupby(jobs, key=lambda job: job.whole and job.experiment.name):
        together = list(group)
        for block in [together] if whole else [[job] for job in together]:
            takes = sum(job.lasts() for job in block)
            if takes < seconds:
                chosen += block
                seconds -= takes
    return chosen


def runs(jobs: Iterable[Pending], seconds: float) -> list[list[Pending]]:
    """The rows of each run of so many seconds, until none is left that fits into one."""
    left, of_runs = list(jobs), []
    while chosen := within(left, seconds):
        of_runs.append(chosen)
        done = set(map(id, chosen))
        left = [job for job in left if id(job) not in done]
    return of_runs


def missing(jobs: Iterable[Pending]) -> list[str]:
    """What is left, a line a table, and how long it would take."""
    jobs = sorted(jobs, key=lambda job: -job.worth)
    tables = {job.experiment.name: [other for other in jobs if other.experiment is job.experiment] for job in jobs}
    lines = [f"  {name}: {len(of)} rows, {minutes(_sum(of))} minutes" for name, of in tables.items()]
    return [f"missing: {len(jobs)} rows, {minutes(_sum(jobs))} minutes", *lines] if jobs else []


def is_fresh(e: Table, config: Row, preset: str, rows: Iterable[dict[str, str]]) -> bool:
    """Whether the configuration has rows of this method and release of torch, none failed.

    A row whose status names a missing dependency is fresh until that is installed.
    """
    identity = e.identity(preset)
    wanted = store.key(config, identity)
    about = [row for row in rows if row["preset"] == preset and store.key(row, identity) == wanted]
    release = _release(machine.environment()["torch"])
    return bool(about) and all(
        row["method"] == str(e.version)
        and _release(row["torch"]) == release
        and not row[store.STATUS].startswith(FAILED)
        and not _now_installed(row[store.STATUS])
        for row in about
    )


def total(plans: Iterable[Plan]) -> str:
    """The sum of plans, as one line."""
    plans = list(plans)
    line = f"{sum(p.missing for p in plans)} configurations missing, {sum(p.fresh for p in plans)} fresh"
    if left_out := sum(sum(p.left_out.values()) for p in plans):
        line += f"; {left_out} of the missing can't run here"
    seconds = [p.seconds for p in plans if p.missing > sum(p.left_out.values())]
    known = [each for each in seconds if each is not None]
    if not seconds:
        return line
    if not known:
        return f"{line}; minutes unknown: no machine of the class has recorded how long these tables take"
    line += f"; {minutes(math.fsum(known))} minutes"  # whatever their order
    return line + (f" for {len(known)} tables, unknown for {len(seconds) - len(known)}" if known != seconds else "")


def minutes(seconds: float | None) -> str:
    if seconds is None:
        return "unknown"
    return f"{seconds / 60:.1f}" if seconds >= 3 or not seconds else "<0.1"


def lines(plans: Iterable[Plan], memory_gib: float = float("inf"), seconds: float | None = None) -> list[str]:
    """A table of plans in the order of measuring, with the reasons of what is left out under each row, and the sum.

    With `seconds`, how many rows of each are measured in that time, in which order, what remains, and what further runs
    of as many seconds measure. A table that took more memory
    elsewhere than the `memory_gib` of this machine says so.
    """
    jobs = in_order(plans)
    place = {name: rank for rank, name in reversed([*enumerate(job.experiment.name for job in jobs)])}
    plans = sorted(plans, key=lambda p: place.get(p.experiment.name, len(jobs)))
    chosen = jobs if seconds is None else within(jobs, seconds)
    width = max((len(p.experiment.name) for p in plans), default=0)
    heads = f"{'missing':>8}{'fresh':>7}" + ("" if seconds is None else f"{'in time':>9}") + f"{'worth':>7}{'GiB':>8}"
    rows = [f"{'table':<{width}}  {'preset':<8}{heads}  minutes"]
    for p in plans:
        gib = f"{p.gib:.2f}" if p.gib is not None else "-"
        takes = minutes(p.seconds)
        takes += f"; more memory than the {memory_gib:.1f} GiB here" if (p.gib or 0) > memory_gib else ""
        fits = "" if seconds is None else f"{sum(job.experiment is p.experiment for job in chosen):>9}"
        counts = f"{p.missing:>8}{p.fresh:>7}{fits}{p.experiment.worth.row:>7g}{gib:>8}"
        rows.append(f"{p.experiment.name:<{width}}  {p.preset:<8}{counts}  {takes}")
        rows += [
            f"  {count} can't run here: {reason.removeprefix('not here: ')}" for reason, count in p.left_out.items()
        ]
    return [*rows, *(_by_runs(jobs, seconds) if seconds is not None else ()), total(plans)]


def _by_runs(jobs: list[Pending], seconds: float) -> list[str]:
    """The order of the rows, a line a table, and in how many runs they are done."""
    of_runs, rows = runs(jobs, seconds), []
    for number, chosen in enumerate(of_runs, 1):
        rows.append(f"run {number}: {_sum(chosen) or 0:.0f} s")
        for (name, noisy), group in groupby(chosen, key=lambda job: (job.experiment.name, job.noisy)):
            table = list(group)
            rows.append(f"  {name}: {len(table)} {'noisy ' * noisy}rows, {_sum(table) or 0:.0f} s")
    first, done = of_runs[0] if of_runs else [], {id(job) for chosen in of_runs for job in chosen}
    left = [job for job in jobs if all(job is not other for other in first) and not job.noisy]
    over = [job for job in jobs if id(job) not in done]
    rest = f"; {len(over)} don't fit into one" if over else ""
    line = f"in {seconds:g} s: {len(first)} configurations; {minutes(_sum(left))} minutes remain"
    return [*rows, f"{line}; all in {len(of_runs)} runs{rest}"]


def _sum(jobs: Iterable[Pending]) -> float | None:
    seconds = [job.seconds for job in jobs]
    return None if None in seconds else sum(seconds)


def _recorded(e: Table, results: Path | str | None) -> list[dict[str, str]]:
    """All machines' rows of a table that hold figures."""
    folders = [*store.devices(results), *store.devices(results, cpu=True)]
    files = [store.path(folder, e.chapter, e.table, results) for folder in folders]
    return [row for file in files for row in store.whole_rows(file) if row[store.STATUS] == "ok"]


def _expected(e: Table, preset: str, configs: list[Row], recorded: list[dict[str, str]]) -> list[float | None]:
    """Seconds of each configuration; None where neither rows of the preset nor the declaration tell."""
    identity = e.identity(preset)
    times: dict[tuple[str, ...], list[float]] = {}
    for row in recorded:
        if row["preset"] == preset and row.get(store.SECONDS):
            times.setdefault(store.key(row, identity), []).append(float(row[store.SECONDS]))
    known = {key: mean(values) for key, values in times.items()}
    typical = mean(known.values()) if known else None if preset == "small" else e.worth.seconds(preset)
    return [known.get(store.key(config, identity), typical) for config in configs]


def _largest(e: Table, preset: str, recorded: list[dict[str, str]]) -> float | None:
    """The largest peak memory in GiB that rows of the preset's sizes tell."""
    if not e.memory_here:
        return None
    cells = [(row.get(name), unit) for row in recorded if row["preset"] == preset for name, unit in IN_GIB.items()]
    return max((float(peak) * unit for peak, unit in cells if peak), default=None)


def _now_installed(status: str) -> bool:
    package = status.removeprefix(machine.NOT_INSTALLED)
    return package != status and machine.installed(package) is not None


def _release(version: str) -> list[str]:
    return version.split("+")[0].split(".")[:2]
