"""What `measure` would do on this machine: configurations to measure, minutes, memory. Nothing here is measured.

Time and memory are those of recorded rows of the same table: of the same configurations where some machine of the class
has recorded them, else the mean of its others, else the mean of another class's. A table that nobody has recorded with
its time has an unknown time. A plan costs some milliseconds a table, and touches no device.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean

from . import records
from .experiment import Experiment
from .machine import CLASSES, device_class, device_name, slug
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
    basis: str = ""  # the preset of the rows that `seconds` is taken from
    gib: float | None = None  # the largest peak recorded; None: unknown
    damaged: str = ""  # why the table can't be read: nothing of it is measured

    @property
    def name(self) -> str:
        return f"{self.experiment.chapter}/{self.experiment.table}"


def plan(e: Experiment, preset: str | None = None, *, results: Path | str | None = None, refresh: bool = False) -> Plan:
    """What `measure` would measure of a table; `preset` is the machine's class unless given."""
    preset = preset or device_class()
    try:
        here = records.read_rows(records.path(slug(device_name()), e.chapter, e.table, results))
    except records.RecordError as error:
        return Plan(e, preset, damaged=str(error))
    configs = e.configurations(preset)
    missing = configs if refresh else [config for config in configs if not is_fresh(e, config, preset, here)]
    reasons = [e.missing_because(config) for config in missing]
    todo = [config for config, reason in zip(missing, reasons, strict=True) if not reason]
    recorded = _recorded(e, results)
    seconds, basis = _expected(e, preset, todo, recorded)
    left_out = dict(Counter(filter(None, reasons)))
    gib = _largest(e, preset, recorded) if todo else None
    return Plan(e, preset, len(configs) - len(missing), len(missing), left_out, seconds, basis, gib)


def total(plans: Iterable[Plan]) -> str:
    """The sum of plans, as one line."""
    plans = list(plans)
    fresh, missing = sum(p.fresh for p in plans), sum(p.missing for p in plans)
    line = f"{missing} configurations missing, {fresh} fresh"
    if left_out := sum(sum(p.left_out.values()) for p in plans):
        line += f"; {left_out} of the missing can't run here"
    if not missing - left_out:
        return line
    return f"{line}; {_sum_of_minutes([p for p in plans if p.missing > sum(p.left_out.values())])}"


def minutes(p: Plan) -> str:
    """The expected minutes of a plan, and whose rows they are taken from."""
    if p.seconds is None:
        return "unknown"
    of_others = f" (by rows of {p.basis})" if p.basis not in ("", p.preset) else ""
    return _in_minutes(p.seconds) + of_others


def _in_minutes(seconds: float) -> str:
    return f"{seconds / 60:.1f}" if seconds >= 3 or not seconds else "<0.1"


def lines(plans: Iterable[Plan], memory_gib: float = float("inf")) -> list[str]:
    """A table of plans, with the reasons of what is left out under each row, and the sum.

    A table that took more memory elsewhere than the `memory_gib` of this machine says so.
    """
    plans = list(plans)
    width = max((len(p.name) for p in plans), default=0)
    rows = [f"{'table':<{width}}  {'preset':<8}{'missing':>8}{'fresh':>7}{'GiB':>8}  minutes"]
    for p in plans:
        gib = f"{p.gib:.2f}" if p.gib is not None else "-"
        takes = "damaged" if p.damaged else minutes(p)
        takes += f"; more memory than the {memory_gib:.1f} GiB here" if (p.gib or 0) > memory_gib else ""
        rows.append(f"{p.name:<{width}}  {p.preset:<8}{p.missing:>8}{p.fresh:>7}{gib:>8}  {takes}")
        rows += [
            f"  {count} can't run here: {reason.removeprefix('not here: ')}" for reason, count in p.left_out.items()
        ]
    return [*rows, total(plans)]


def _sum_of_minutes(plans: list[Plan]) -> str:
    known = [p for p in plans if p.seconds is not None]
    unknown = len(plans) - len(known)
    if not known:
        return "minutes unknown: no machine has recorded how long these tables take"
    sum_of_known = f"{_in_minutes(sum(p.seconds for p in known))} minutes"
    return sum_of_known + (f" for {len(known)} tables, unknown for {unknown}" if unknown else "")


def _recorded(e: Experiment, results: Path | str | None) -> list[dict[str, str]]:
    """All machines' rows of a table that hold figures."""
    folders = [*records.devices(results), *records.devices(results, cpu=True)]
    files = [records.path(folder, e.chapter, e.table, results) for folder in folders]
    return [row for file in files for row in records.whole_rows(file) if row[records.STATUS] == "ok"]


def _expected(
    e: Experiment, preset: str, configs: list[Row], recorded: list[dict[str, str]]
) -> tuple[float | None, str]:
    """Seconds of configurations, and the preset of the rows they are taken from; None if no row tells."""
    if not configs:
        return 0.0, ""
    for basis in filter(e.presets.__contains__, _nearest(preset)):
        identity = e.identity(basis)
        times: dict[tuple[str, ...], list[float]] = {}
        for row in recorded:
            if row["preset"] == basis and row.get(records.SECONDS):
                times.setdefault(records.key(row, identity), []).append(float(row[records.SECONDS]))
        if times:
            known = {key: mean(values) for key, values in times.items()}
            typical = mean(known.values())
            same = known if basis == preset else {}  # another class's machine takes another time for the same, too
            return sum(same.get(records.key(config, identity), typical) for config in configs), basis
    return None, ""


def _nearest(preset: str) -> list[str]:
    """The presets whose rows tell of a preset's time, the best first; `small` takes seconds, and tells of itself."""
    if preset not in CLASSES:
        return [preset]
    return sorted(reversed(CLASSES), key=lambda name: abs(CLASSES.index(name) - CLASSES.index(preset)))


def _largest(e: Experiment, preset: str, recorded: list[dict[str, str]]) -> float | None:
    """The largest peak memory in GiB that rows of the preset's sizes tell."""
    if not e.memory_here:
        return None
    cells = [(row.get(name), unit) for row in recorded if row["preset"] == preset for name, unit in IN_GIB.items()]
    return max((float(peak) * unit for peak, unit in cells if peak), default=None)
