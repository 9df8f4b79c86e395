"""Which iterations of a training are recorded: told of each optimizer's step, it starts and stops the profiler.

    first     3 iterations after the very first two, which `costs` replaces unless the script ends before
    costs     `steps` iterations after `after` others, without shapes and stacks, which slow the host
    places    up to 3 iterations with shapes and stacks
    slowest   the next slow iteration, with both, where those take a fifth of the time and come at equal distances

Then the loop goes on unrecorded until an epoch has ended, if it soon does, and what is slow and rare came three times.
A window is shorter where its iterations have many events or take long; for `places` Python's calls are counted before.
Iterations of 55 ms with 6,000 events are slowed by 12 % in `costs` (25 % with shapes).
"""

import contextlib
import gc
import gzip
import json
import math
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import ref

import torch
from torch.optim import Optimizer
from torch.profiler import ProfilerAction, ProfilerActivity
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from ..lab import files, missing_because
from .iterations import Pace
from .loader_workers import Workers
from .monitor import Monitor
from .observation import COSTS, PLACES, SLOWEST, Observation
from .rates import speedups
from .running import RARE, end_of_iteration
from .stacks import CALLED_FROM, call_sites, runners
from .tensors import unclaimed

FIRST, WITH_STACKS, WARM_UP = 3, 3, 10  # iterations
EVENTS = 300_000  # in a profile at most: some 100 MB of JSON, which take 5 s to read
CALLS = 300_000  # of Python in an iteration: with more, stacks would take gigabytes of memory
WINDOW_S, WARM_S = 60.0, 30.0  # what iterations of seconds are given
OBSERVED, OBSERVED_S = 20, 8.0  # iterations without a profiler, and their seconds, that are waited for
PATIENCE_S = 30.0  # unprofiled, for an epoch's end and for slow iterations
SLOW_SHARE, SLOW_SEEN = 0.2, 0.05  # of the time in slow iterations: they are recorded; are waited for
OBSERVED_TOGETHER = 40  # iterations after the windows where all ranks have to end at the same one

Waiting = Generator[None, None, None]  # goes on whenever an iteration has ended


@dataclass(frozen=True)
class Plan:
    """What is recorded of a script, and for how long it is observed.

    `steps` iterations at most after the first `after`: by default 10, fewer where these take more than 30 s, more where
    DataLoader's workers prefetch many batches, as a loop that waits for them doesn't until these are used up.
    Unprofiled, it is observed for at least 20 iterations and 8 s, `minutes`, or `until_epoch` ended. Then the script is
    stopped, unless it may `go_on` to its end; `limit` seconds after its first step what is known by then is kept.
    """

    steps: int = 8
    after: int | None = None
    go_on: bool = False
    until_epoch: bool = False
    minutes: float = 0.0
    limit: float = 120.0

    @property
    def seconds(self) -> float:
        """After which the script is stopped."""
        return self.limit + 60 * self.minutes


class OwnProfiler(torch.profiler.profile):
    """Ours, as opposed to one that the script starts."""


@dataclass
class Window:
    """A few iterations under torch's profiler, each marked `ProfilerStep#N`, in a file once they are over.

    `slowed_by` in the file is how much longer they took than unprofiled ones: 0.07 for 7 %.
    """

    path: Path
    iterations: int = 0  # recorded whole
    events: float = 0.0  # in an iteration
    lost: str = ""  # why torch has no profile, where it fails
    only_slowest: bool = False  # the other iterations don't count

    def record(
        self, number: int, active: int, warm: int, plain: list[float], settings: dict[str, Any], **options: Any
    ) -> Waiting:
        """Record the `active` iterations after those from `number` on in which the profiler only prepares itself.

        Closed before its end, it saves those that are complete.
        """
        first, seconds, thread = number + warm, [], threading.get_ident()
        on_cpu = not torch.cuda.is_available()
        bf16_speedup = speedups() if on_cpu else {}  # measured now: later it would be recorded
        profiler = OwnProfiler(
            activities=[ProfilerActivity.CPU] if on_cpu else [ProfilerActivity.CPU, ProfilerActivity.CUDA],
            schedule=lambda step: ProfilerAction.WARMUP if (step or number) < first else ProfilerAction.RECORD,
            **options,
        )
        profiler.step_num = number
        profiler.start()
        try:
            for running in range(number, first + active):
                if running > number:
                    profiler.step()
                began = time.perf_counter()
                yield
                if running >= first:
                    seconds.append(time.perf_counter() - began)
        finally:
            if seconds and len(plain) > 2:
                slowed_by = statistics.median(seconds) / statistics.median(plain) - 1
                profiler.add_metadata_json("slowed_by", f"{slowed_by:.4f}")
            if on_cpu:
                profiler.add_metadata_json("bf16_speedup", json.dumps(bf16_speedup))
            # Its export makes / of each backslash, so no quotation mark may be escaped.
            profiler.add_metadata_json("settings", json.dumps(settings, ensure_ascii=False).replace('\\"', "'"))
            try:
                profiler.stop()
            except RuntimeError as error:
                if "replay stack" not in str(error):
                    raise
                self.lost, seconds = f"torch {torch.__version__} lost count of Python's calls", []
            if seconds and threading.get_ident() == thread:  # stopped in another one, a profile is empty
                self.iterations = len(seconds)
                self.events = len(profiler.profiler.kineto_results.events()) / self.iterations
                numbers = range(first, first + self.iterations + 1)
                counted = [first + seconds.index(max(seconds))] if self.only_slowest else numbers[:-1]
                self._save(profiler, [number for number in numbers if number not in counted])

    def _save(self, profiler: OwnProfiler, incomplete: list[int]) -> None:
        """Write the profile, in which the iterations of these numbers don't count."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Not in the system's folder for such: torch writes past the scratch of `try`, which may stand for that one.
        with tempfile.TemporaryDirectory(dir=self.path.parent) as folder:
            plain = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(plain))
            data = plain.read_bytes()
            for number in incomplete:
                data = data.replace(b'"ProfilerStep#%d"' % number, b'"incomplete iteration"')
        if profiler.with_stack:
            data = _with_call_sites(data, profiler.profiler.kineto_results)
        files.write(self.path, gzip.compress(data, 4))


class Windows:
    """Told of every step of an optimizer, records the windows `first`, `costs` and `places`.

    Only this process and the thread that steps first count. In a job of several ranks all end at the same iteration,
    since one that ended alone would leave the others waiting; rank 0 alone records places.
    """

    def __init__(self, folder: Path, plan: Plan, rank: int, ranks: int) -> None:
        costs = folder / (COSTS if ranks == 1 else f"rank{rank}.json.gz")
        self.first, self.costs, self.places = Window(costs), Window(costs), Window(folder / PLACES)
        self.slowest = Window(folder / SLOWEST, only_slowest=True)
        self.plan, self.rank, self.ranks = plan, rank, ranks
        self.warm = WARM_UP if plan.after is None else max(plan.after, 3)
        self.disturbed = False  # by a profiler of the script's
        self.iterations = 0  # that have ended
        self.monitor = Monitor(Pace() if plan.minutes else None)
        self._over = False
        self._plain: list[float] = []  # seconds of iterations that no profiler slowed
        self._ends_iteration = end_of_iteration()
        self._ender: ref[Optimizer] | None = None  # the optimizer that ended the last iterations
        self._recorded: ref[Optimizer] | None = None  # those of the windows
        self._ended = 0  # iterations that it ended
        self._process = os.getpid()
        self._thread: int | None = None
        self._steps = self._record()

    def stepped(self, optimizer: Optimizer | None) -> bool:
        """Whether the last window ended with this step of the optimizer; None: with a backward, where nothing steps."""
        if self._over or not self.are_of_this_process:
            return False
        self._thread = self._thread or threading.get_ident()
        if threading.get_ident() != self._thread:
            return False
        self.iterations = max(self.iterations, 1)  # the first, whose beginning nothing showed
        if optimizer is not None and not self._ends_iteration(optimizer):
            return False
        self.iterations += 1
        if optimizer is not (self._ender and self._ender()):
            self._ender, self._ended = None if optimizer is None else ref(optimizer), 0
        self._ended += 1
        self.monitor.iteration_ended()
        with self.monitor.looking_away():
            ended = next(self._steps, True) is True
        together = self.warm + self.plan.steps + 1 + WITH_STACKS + OBSERVED_TOGETHER
        self._over = ended if self.ranks == 1 else self.iterations >= together
        return self._over

    def observation(self, workers: Workers, others: float | None = None) -> Observation:
        """What was seen of the loop, and of its loaders' workers and of other processes beside it."""
        seen = self.monitor.observation(workers.processes)
        seen.workers, seen.others = workers.lines, others
        seen.worker_threads, seen.worker_threads_at = workers.threads, workers.set_at
        return seen

    @property
    def are_of_this_process(self) -> bool:
        """Not of one that it has forked."""
        return os.getpid() == self._process

    def close(self) -> None:
        """End the window that is open; its complete iterations count."""
        self._over = True
        if not self.are_of_this_process:
            return
        with contextlib.suppress(RuntimeError):  # some versions of torch stop a profiler only in its own thread
            self._steps.close()

    def missing(self, script: str) -> str:
        """What is not recorded and why, in words; nothing if all is."""
        if self.rank or self.places.iterations:
            return ""
        if (calls := self.monitor.calls.total) > CALLS:
            return f"{script} makes {calls:,} Python calls an iteration: too many to record source lines"
        if self.places.lost:
            return f"{script} is recorded without source lines: {self.places.lost}"
        recorded = self.costs.iterations or self.first.iterations
        return (
            f"{script} ended after {self.iterations} iterations: {recorded} recorded without source lines, none with; "
            f"a smaller --after or --steps records both"
        )

    def _record(self) -> Waiting:
        if self.warm > FIRST + 1:
            settings = self.monitor.settings.data()  # observed, too: long steps may have no others
            yield from self.first.record(self.iterations + 1, FIRST, 0, self._plain, settings, record_shapes=True)
        if self.plan.after is None and self.ranks == 1:
            # Saving took time, in which workers got ahead; they lose it slowly.
            self.warm = max(self.warm, self.iterations + 2 * _prefetched() + 1)
        began, patience = time.perf_counter(), WARM_S if self.plan.after is None and self.ranks == 1 else math.inf
        while self.iterations < self.warm - 1:
            last = time.perf_counter()
            if last - began > patience and len(self._plain) > 2:
                break
            yield
            self._plain.append(time.perf_counter() - last)
        yield from self._costs_and_places()
        while not self._is_observed():
            if self._ender is not self._recorded and self._ended > RARE and self.ranks == 1:  # of another loop
                self._plain.clear()
                yield from self._costs_and_places()
            yield
        if not self.plan.minutes:
            yield from self._wait_for_slow()

    def _costs_and_places(self) -> Waiting:
        self._recorded = self._ender
        yield from self._window(self.costs, self._fitting(self.plan.steps, self.first.events), 1)
        if self.rank == 0:
            yield from self._count_calls()
            calls = self.monitor.calls.total
            if missing_because("torch 2.8"):
                yield  # older ones lose count of the calls that were running while these were counted
            most = self._fitting(min(self.plan.steps, WITH_STACKS), self.costs.events + 2 * calls)
            if calls <= CALLS:
                with _uncollected():
                    yield from self._window(self.places, most, 0, record_shapes=True, with_stack=True)
        if self.ranks == 1:
            self.monitor.counts.unclaimed = yield from unclaimed()

    def _is_observed(self) -> bool:
        monitor = self.monitor
        ended = not self.plan.until_epoch or bool(monitor.counts.epochs or monitor.counts.evaluations)
        long = monitor.observed_s >= max(60 * self.plan.minutes, OBSERVED_S)
        if long and monitor.observed_s + (left := monitor.epoch_left_s()) < PATIENCE_S:
            ended &= not left
        return ended and self.ranks == 1 and monitor.count >= OBSERVED and long

    def _wait_for_slow(self) -> Waiting:
        """Watch until slow iterations have come three times, and record the next one where it can be foreseen."""
        share, ahead = self.monitor.iterations.next_slow()
        while share >= SLOW_SEEN and not ahead and self.monitor.observed_s < PATIENCE_S:
            for _ in range(max(self.monitor.count // 50, 1)):
                yield
            share, ahead = self.monitor.iterations.next_slow()
        step_s = statistics.median(self.monitor.iterations.own() or [0.0])
        if share >= SLOW_SHARE and ahead and ahead * step_s < PATIENCE_S and self.monitor.calls.total <= CALLS:
            for _ in range(ahead - 2):
                yield
            with _uncollected():
                yield from self._window(self.slowest, 2, 0, record_shapes=True, with_stack=True)

    def _count_calls(self) -> Waiting:
        """Count calls and lines of the next iteration, which that slows."""
        with self.monitor.looking_away(), self.monitor.calls.counted(self.monitor.growing.called):
            yield

    def _window(self, window: Window, active: int, warm: int, **options: bool) -> Waiting:
        with self.monitor.looking_away():
            settings = self.monitor.settings.data()
            graphs: list[Any] = []
            settings["graphs"] = graphs
            self.monitor.graphs = graphs if options else None
            yield from window.record(self.iterations + 1, active, warm, self._plain, settings, **options)
            self.monitor.graphs = None

    def _fitting(self, most: int, events: float) -> int:
        """So many iterations, or fewer by the limits of events, of which one has so many, and of time."""
        seconds = statistics.median(self._plain or [0.0])
        limits = EVENTS / max(events, 1), WINDOW_S / max(seconds, 1e-9)
        return max(1, int(min(most, *limits)))


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Nothing that is garbage is freed: finalizers let other threads run while torch notes frames, and that crashes."""
    collected = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collected:
            gc.enable()


def _prefetched() -> int:
    """The number of batches that the workers of a DataLoader keep ready."""
    loaders = [each for each in gc.get_objects() if type(each) is _MultiProcessingDataLoaderIter]
    return max((loader._prefetch_factor * loader._num_workers for loader in loaders), default=0)


def _with_call_sites(data: bytes, results: Any) -> bytes:
    """A trace with the calling line of every Python frame, which its export leaves out, and without our frames."""
    trace = json.loads(data.decode(errors="replace"))
    is_runner, site_of = runners(), call_sites(results, int(trace.get("baseTimeNanoseconds", 0)))
    events = []
    for event in trace["traceEvents"]:
        if event.get("cat") == "python_function":
            if is_runner(event["name"].split("(")[0]):
                continue
            if site := site_of(event["name"], float(event["ts"])):
                event.setdefault("args", {})[CALLED_FROM] = site
        events.append(event)
    return json.dumps(trace | {"traceEvents": events}).encode()
