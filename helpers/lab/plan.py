"""What `measure` would do on this machine: configurations to measure, minutes, memory. Nothing here is measured.

Time and memory are those of recorded rows of the same table and class of machine: of the same configurations where some
machine has recorded them, else the mean of the others. A table that none has recorded with its time has an unknown
time. A plan costs some milliseconds a table, and touches no device.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean

from . import records
from .experiment import Experiment
from .machine import device_class, device_name, slug
from .records import Row
from .runner import is_fresh

IN_GIB = {"peak_gib": 1.0, "peak_mib": 1 / 1024}


@dataclass(frozen=True)
class Plan:
    """What is to be measured of a table at the sizes of a preset."""

    experiment: Experiment
    preset: str
    fresh: int = 0
    missing: int = 0
    left_out: dict[str, int] = field(default_factory=dict)  # why -> how many of the missing get no more than a status
    seconds: float | None = 0.0  # None: unknown
    gib: float | None = None  # the largest peak recorded; None: unknown


def plan(e: Experiment, preset: str | None = None, *, results: Path | str | None = None, refresh: bool = False) -> Plan:
    """What `measure` would measure of a table; `preset` is the machine's class unless given."""
    preset = preset or device_class()
    here = records.read_rows(records.path(slug(device_name()), e.chapter, e.table, results))
    configs = e.configurations(preset)
    missing = configs if refresh else [config for config in configs if not is_fresh(e, config, preset, here)]
    reasons = [e.missing_because(config) for config in missing]
    todo = [config for config, reason in zip(missing, reasons, strict=True) if not reason]
    recorded = _recorded(e, results)
    seconds = _expected(e, preset, todo, recorded)
    left_out = dict(Counter(filter(None, reasons)))
    gib = _largest(e, preset, recorded) if todo else None
    return Plan(e, preset, len(configs) - len(missing), len(missing), left_out, seconds, gib)


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
    line += f"; {minutes(sum(known))} minutes"
    return line + (f" for {len(known)} tables, unknown for {len(seconds) - len(known)}" if known != seconds else "")


def minutes(seconds: float | None) -> str:
    if seconds is None:
        return "unknown"
    return f"{seconds / 60:.1f}" if seconds >= 3 or not seconds else "<0.1"


def lines(plans: Iterable[Plan], memory_gib: float = float("inf")) -> list[str]:
    """A table of plans, with the reasons of what is left out under each row, and the sum.

    A table that took more memory elsewhere than the `memory_gib` of this machine says so.
    """
    plans = list(plans)
    width = max((len(p.experiment.name) for p in plans), default=0)
    rows = [f"{'table':<{width}}  {'preset':<8}{'missing':>8}{'fresh':>7}{'GiB':>8}  minutes"]
    for p in plans:
        gib = f"{p.gib:.2f}" if p.gib is not None else "-"
        takes = minutes(p.seconds)
        takes += f"; more memory than the {memory_gib:.1f} GiB here" if (p.gib or 0) > memory_gib else ""
        rows.append(f"{p.experiment.name:<{width}}  {p.preset:<8}{p.missing:>8}{p.fresh:>7}{gib:>8}  {takes}")
        rows += [
            f"  {count} can't run here: {reason.removeprefix('not here: ')}" for reason, count in p.left_out.items()
        ]
    return [*rows, total(plans)]


def _recorded(e: Experiment, results: Path | str | None) -> list[dict[str, str]]:
    """All machines' rows of a table that hold figures."""
    folders = [*records.devices(results), *records.devices(results, cpu=True)]
    files = [records.path(folder, e.chapter, e.table, results) for folder in folders]
    return [row for file in files for row in records.whole_rows(file) if row[records.STATUS] == "ok"]


def _expected(e: Experiment, preset: str, configs: list[Row], recorded: list[dict[str, str]]) -> float | None:
    """Seconds of configurations; None if no row of the preset tells."""
    identity = e.identity(preset)
    times: dict[tuple[str, ...], list[float]] = {}
    for row in recorded:
        if row["preset"] == preset and row.get(records.SECONDS):
            times.setdefault(records.key(row, identity), []).append(float(row[records.SECONDS]))
    if configs and not times:
        return None
    known = {key: mean(values) for key, values in times.items()}
    typical = mean(known.values()) if known else 0.0
    return sum(known.get(records.key(config, identity), typical) for config in configs)


def _largest(e: Experiment, preset: str, recorded: list[dict[str, str]]) -> float | None:
    """The largest peak memory in GiB that rows of the preset's sizes tell."""
    if not e.memory_here:
        return None
    cells = [(row.get(name), unit) for row in recorded if row["preset"] == preset for name, unit in IN_GIB.items()]
    return max((float(peak) * unit for peak, unit in cells if peak), default=None)
