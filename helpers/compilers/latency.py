"""How long a model takes to answer, by each runtime; and the same by a timing that is wrong, for comparison.

A latency is what a caller waits for: from the call until the result is there. So every run ends in a synchronise, and
begins with an idle device. The inputs are on the device already.
"""

import copy
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from helpers.lab import Comparison, Disagreement, compare
from helpers.lab import device as this_device
from helpers.lab.experiment import FAILED
from helpers.lab.records import STATUS, Row
from helpers.lab.timing import relative_error, synchronize, tensors

from . import inputs
from .backends import (
    CHANNELS_LAST,
    EAGER,
    WAYS,
    ExportFailed,
    agree_within,
    build,
    compiling,
    first_runs,
    largest_difference,
    obstacle,
    prepare,
    start,
    version,
)

# The least number of runs of each way, by how long one takes, and the most.
LEAST_RUNS, LEAST_SLOW_RUNS, MOST_RUNS, SLOW_MS = 20, 5, 200, 1000.0

FLAWED_EAGER_RUNS, FLAWED_RUNS, FLAWED_MOST_MS = 10, 100, 20e3  # the lecture's, and where its patience would end


def ways(model: str) -> list[str]:
    """The ways that are meant for a model; tokens have no channels to put last."""
    return [way for way in WAYS if way != CHANNELS_LAST or model in inputs.RESNET_MODELS]


def measure_latency(
    model: str,
    way: str,
    batch: int,
    *,
    precision: str = "fp32",
    length: int | None = None,
    seconds: float = 10.0,
    cold: bool = True,
    seed: int = 0,
) -> Row:
    """One row: milliseconds of a way and of eager, in turn in this process, once the way's outputs agree with eager's.

    `median_ms`, `p20_ms`, `p80_ms`, `p99_ms` of `n` runs; `samples_per_s`; `eager_ms` and `speedup` with its spread,
    round by round; `build_s`, which is export, compilation and the first three runs, as the second and third may still
    compile or record; `max_difference`, the largest absolute one from eager, and `error`, ‖a − b‖ / ‖b‖. Both ways get
    `seconds` of runs together, but at least 20 runs each, and at least 5 where one takes more than a second; with fewer
    than 100, p99 is next to the slowest. `cold` compiles from an empty cache. A way that can't run here, that fails, or
    that disagrees, is a row that says so.
    """
    with inputs.products(precision):
        if reason := obstacle(way, this_device()):
            return {STATUS: reason}
        net, data = _placed(model, batch, precision, length, seed)
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            eager = _waited(build(EAGER, net, data, folder), data)
            try:
                start(way)
                own = copy.deepcopy(net)  # what changes a model's layout must not change eager's
                began = time.perf_counter()
                run = build(way, own, data, folder, tf32=precision == "tf32", cold=cold)
                build_s = time.perf_counter() - began
                return _timed(way, _waited(run, data), eager, batch, precision, seconds) | {"build_s": build_s}
            except Exception as error:
                if (status := failed(error)) is None:
                    raise
                return {STATUS: status}


def measure_flawed(
    model: str,
    way: str,
    batch: int = 1,
    *,
    precision: str = "fp32",
    length: int | None = None,
    cold: bool = True,
    seed: int = 0,
    **settings: Any,
) -> Row:
    """`measure_latency`'s row, and beside it what the lecture's way of timing says of the same two ways.

    `flawed_ms` and `flawed_eager_ms` are means over runs that begin with the very first one, nothing waits for the
    device, and the copy of the input to the device is in one of the two only: 10 runs of eager, 100 of the other (10 at
    least, and none after 20 s). `flawed_speedup` is their ratio. On the CPU the copy costs nothing and there is nothing
    to wait for; what is left is the first runs, with what is compiled in them. They come before the right timing, but
    what the process did earlier they know: eager's first run is dearest in a fresh one.
    """
    settings |= {"precision": precision, "length": length, "cold": cold, "seed": seed}
    if reason := obstacle(way, this_device()):
        return {STATUS: reason}
    with inputs.products(precision), tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        net, data = _placed(model, batch, precision, length, seed)
        host = tuple(tensor.cpu() for tensor in data)
        eager = prepare(EAGER, net, data, folder)
        eager_ms, _ = flawed_mean(lambda: eager(*data), FLAWED_EAGER_RUNS)
        try:
            start(way)
            with compiling(way, folder, cold):
                run = prepare(way, copy.deepcopy(net), data, folder, tf32=precision == "tf32")
                with first_runs(way):
                    flawed_ms, n = flawed_mean(
                        lambda: run(*(tensor.to(data[0].device) for tensor in host)), FLAWED_RUNS
                    )
                    synchronize()
        except Exception as error:
            if (status := failed(error)) is None:
                raise
            return {STATUS: status}
    found = {"flawed_ms": flawed_ms, "flawed_eager_ms": eager_ms, "flawed_speedup": eager_ms / flawed_ms, "flawed_n": n}
    return measure_latency(model, way, batch, **settings) | found


def flawed_mean(fn: Callable[[], Any], runs: int) -> tuple[float, int]:
    """The mean milliseconds of the first runs by the host's clock, whether the device is done or not; and how many."""
    taken: list[float] = []
    while len(taken) < runs and (len(taken) < FLAWED_EAGER_RUNS or sum(taken) < FLAWED_MOST_MS):
        began = time.perf_counter()
        fn()
        taken.append(1000 * (time.perf_counter() - began))
    return float(np.mean(taken)), len(taken)


def failed(error: Exception) -> str | None:
    """A row's status for what went wrong in a way; None for what a caller must hear of: memory, wrong arguments."""
    return f"{FAILED}{error}" if isinstance(error, (Disagreement, ExportFailed)) else None


def _placed(model: str, batch: int, precision: str, length: int | None, seed: int):
    """The model in evaluation and its inputs, on the device, in the precision's dtype."""
    device, dtype = this_device(), inputs.PRECISIONS[precision]
    data = inputs.example(model, batch, length=length, seed=seed + 1)
    data = tuple(tensor.to(device, dtype if tensor.is_floating_point() else None) for tensor in data)
    return inputs.network(model, seed).eval().to(device, dtype), data


def _waited(run: Callable, data: tuple[torch.Tensor, ...]) -> Callable[[], Any]:
    def call() -> Any:
        outputs = run(*data)
        synchronize()
        return outputs

    return call


def _timed(
    way: str, run: Callable[[], Any], eager: Callable[[], Any], batch: int, precision: str, seconds: float
) -> Row:
    reference = [tensor.clone() for tensor in tensors(eager())]
    outputs = tensors(run())
    tolerance = agree_within(way, reference[0].dtype, tf32=precision == "tf32")
    facts = {
        "max_difference": largest_difference(outputs, reference),
        "error": max(map(relative_error, outputs, reference)),
        "tolerance": tolerance,
        "threads": torch.get_num_threads(),
        "version": version(way),
    }
    both = {EAGER: eager} if way == EAGER else {EAGER: eager, way: run}
    rounds, warmup = rounds_for(both, seconds)
    found = compare(both, rounds=rounds, warmup=warmup, tolerance=tolerance)
    p99 = float(np.percentile(found.samples_ms[way], 99))
    return speeds(found, way, batch) | {"p99_ms": p99} | facts


def speeds(found: Comparison, way: str, batch: int) -> Row:
    """Times of a way beside eager's; the speed-up is the median of the rounds' ratios."""
    slower, low, high = found.ratio(EAGER, way)
    timing = found.timing(way)
    return timing.row() | {
        "samples_per_s": 1e3 * batch / timing.median_ms,
        "eager_ms": found.timing(EAGER).median_ms,
        "speedup": slower,
        "speedup_p20": low,
        "speedup_p80": high,
    }


def rounds_for(ways: dict[str, Callable[[], Any]], seconds: float) -> tuple[int, int]:
    """How many rounds fill the seconds, within bounds, and how many runs warm up. Costs two runs of each way."""
    taken = []
    for fn in ways.values():
        fn()
        began = time.perf_counter()
        fn()
        taken.append(1e3 * (time.perf_counter() - began))
    slow = max(taken) > SLOW_MS
    least = LEAST_SLOW_RUNS if slow else LEAST_RUNS
    return min(max(int(1e3 * seconds / sum(taken)), least), MOST_RUNS), 1 if slow else 3
