"""What was seen of a script's loop while no profiler slowed it; a recording's folder holds it as JSON."""

import json
import zlib
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from ..lab import files

CHECKSUM = "crc32"  # of the rest
# A recording's profiles: without stacks, with them, and of a slow iteration
COSTS, PLACES, SLOWEST = "costs.json.gz", "places.json.gz", "slowest.json.gz"
OBSERVED = "observed.json"  # beside them, where it is of one process


class LineTime(NamedTuple):
    """Seconds of wall time that are charged to a line for what is done there, and the calls its function makes."""

    file: str
    line: int
    function: str
    activity: str
    seconds: float
    calls: int  # in an iteration


class Span(NamedTuple):
    """A measurement of the script's own clock: from one reading to another."""

    seconds: float
    away_s: float
    iterations: int
    with_first: bool
    evaluated: bool
    pending: bool

    @property
    def each_ms(self) -> float:
        """For an iteration, without those that were slowed; of what ends within one, all of it."""
        return (self.seconds - self.away_s) / max(self.iterations, 1) * 1e3


@dataclass
class Observation:
    """Counts are of the iterations that were observed, without those that were recorded."""

    seconds: float = 0.0  # charged to lines
    lines: list[LineTime] = field(default_factory=list)  # the dearest first
    iterations: list[float] = field(default_factory=list)  # seconds of each of the last
    count: int = 0  # of iterations
    epochs: int = 0  # that began after the first iteration
    evaluations: int = 0
    backwards: int = 0
    retained: int = 0  # backward passes that kept their graph
    averaged: int = 0  # forward passes after which gradients are averaged over the ranks
    searched: bool = False  # for parameters that got none, in each of them
    anomaly: bool = False
    garbage_s: float = 0.0
    memory: list[tuple[int, int, int]] = field(default_factory=list)  # iteration, bytes of the process, of the device
    device_bytes: int = 0  # that it has
    available: int = 0  # bytes of the host's memory
    padding: list[int] = field(default_factory=list)  # positions, padded ones, those beyond a batch's longest sample
    padded_at: tuple[str, int] | None = None  # the line that pads
    collected: list[tuple[str, int, float]] = field(default_factory=list)  # seconds of collections that a line began
    loads: tuple[str, int] | None = None  # the innermost line that most of what a dataset does passes through
    unclaimed: tuple[str, int, float, bool] | None = None  # what `tensors.unclaimed` returns
    compiled: dict[str, Any] = field(default_factory=dict)  # what `compilation` returns
    loaders: list[tuple[str, int, float]] = field(default_factory=list)  # the line that begins most, how often
    growing: list[Any] = field(default_factory=list)  # what `Growing.data` returns
    clock: list[Any] = field(default_factory=list)  # from line, to line, spans
    pace: dict[str, Any] = field(default_factory=dict)  # of a script that is watched for minutes
    settings: dict[str, Any] = field(default_factory=dict)  # switches, and the lines that set them
    variables: list[str] = field(default_factory=list)  # of the environment, that cost time
    workers: list[tuple[str, int, float]] = field(default_factory=list)  # lines of a loader's workers, and seconds
    worker_threads: int = 0  # torch's in each of them
    worker_threads_at: tuple[str, int] | None = None  # the line that sets their number
    others: float | None = None  # cores that other processes used
    wall: dict[str, Any] = field(default_factory=dict)  # what `wall_time` returns
    loops: list[dict[str, Any]] = field(default_factory=list)  # the user's, as `Calls.loops` returns them
    cores: dict[str, Any] = field(default_factory=dict)  # what `Cores.data` returns

    def write(self, path: Path) -> None:
        files.write(path, json.dumps(vars(self) | {CHECKSUM: _checksum(vars(self))}))


def read_observation(path: Path) -> Observation:
    """A ValueError if the file is damaged, or changed."""
    try:
        held = json.loads(path.read_text())
        if held.pop(CHECKSUM) != _checksum(held):
            raise ValueError
        known = {each.name: held[each.name] for each in fields(Observation) if each.name in held}
        return Observation(**known | {"lines": [LineTime(*line) for line in known.get("lines", [])]})
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise ValueError(f"{path.parent} holds a damaged observed*.json: delete it, or profile again") from None


def _checksum(held: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(held).encode())
