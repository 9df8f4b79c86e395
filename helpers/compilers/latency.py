"""Inference latency of a model by each backend, and the lecture's flawed timing of the same, for comparison.

A latency is the time from the call until the result is complete: every run starts with an idle device and ends with a
synchronize. The inputs are on the device already.
"""

import copy
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from helpers.lab import Comparison, Disagreement, compare, device
from helpers.lab.experiment import FAILED
from helpers.lab.records import STATUS, Row
from helpers.lab.timing import relative_error, synchronize, tensors

from . import models
from .backends import (
    BACKENDS,
    CHANNELS_LAST,
    EAGER,
    agree_within,
    build,
    compile_cache,
    first_runs,
    largest_difference,
    missing_because,
    prepare,
    start,
    version,
)
from .messages import ExportFailed

# Least number of runs of a backend, least number if a run takes over SLOW_MS, and most runs.
LEAST_RUNS, LEAST_SLOW_RUNS, MOST_RUNS, SLOW_MS = 20, 5, 200, 1000.0

FLAWED_EAGER_RUNS, FLAWED_RUNS, FLAWED_MOST_MS = 10, 100, 20e3  # the lecture's numbers of runs; our time limit


def backends_for(model: str) -> list[str]:
    """The backends for a model; channels last is for pictures only."""
    return [backend for backend in BACKENDS if backend != CHANNELS_LAST or model in models.RESNET_MODELS]


def measure_latency(
    model: str,
    backend: str,
    batch: int,
    *,
    precision: str = "fp32",
    length: int | None = None,
    seconds: float = 10.0,
    cold: bool = True,
) -> Row:
    """Latency of a backend and of eager, timed in turn in this process after their outputs were compared, as a row.

    `median_ms`, `p20_ms`, `p80_ms`, `p99_ms` of `n` runs; `samples_per_s`; `baseline_ms` of eager and `speedup`, the
    ratio of the two medians, with the spread of the rounds' ratios; `build_s`: export, compilation and the first three
    runs, as the second and third may still compile or record; `max_difference`, the largest absolute difference from
    eager, and `error`, ‖a − b‖ / ‖b‖. Together they run for `seconds`, but at least 20 times each, or 5 times if a run
    takes more than a second; with fewer than 100 runs, p99 is near the maximum. `cold` compiles from an empty cache. If
    a backend can't run here, fails, or disagrees, the row's status says so.
    """
    with models.products(precision):
        if reason := missing_because(backend):
            return {STATUS: reason}
        net, data = _on_device(model, batch, precision, length)
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            eager = waited(build(EAGER, net, data, folder), *data)
            try:
                start(backend)
                copied = copy.deepcopy(net)  # a backend may change its model's memory layout
                began = time.perf_counter()
                run = build(backend, copied, data, folder, tf32=precision == "tf32", cold=cold)
                build_s = time.perf_counter() - began
                row = _timed(backend, waited(run, *data), eager, batch, precision, seconds)
            except (Disagreement, ExportFailed) as error:
                return {STATUS: f"{FAILED}{error}"}
    return row | {"build_s": build_s}


def measure_flawed(
    model: str,
    backend: str,
    batch: int = 1,
    *,
    precision: str = "fp32",
    length: int | None = None,
    seconds: float = 10.0,
    cold: bool = True,
) -> Row:
    """`measure_latency`'s row, and the lecture's flawed timing of the same two backends.

    `flawed_ms` and `flawed_eager_ms` are means that include the first runs, without synchronizing, and only the
    backend's includes the input's copy to the device: 10 runs of eager, 100 of the backend (at least 10, and none after
    20 s). `flawed_speedup` is their ratio. On the CPU the copy is free and nothing is asynchronous; only the first
    runs' compilation distorts. The flawed timing comes first, but eager's first run is slowest in a fresh process.
    """
    if reason := missing_because(backend):
        return {STATUS: reason}
    with models.products(precision), tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        net, data = _on_device(model, batch, precision, length)
        on_host = tuple(tensor.cpu() for tensor in data)
        eager = prepare(EAGER, net, data, folder)
        eager_ms, _ = flawed_mean(lambda: eager(*data), FLAWED_EAGER_RUNS)
        try:
            start(backend)
            with compile_cache(backend, folder, cold):
                run = prepare(backend, copy.deepcopy(net), data, folder, tf32=precision == "tf32")
                with first_runs(backend):
                    flawed_ms, n = flawed_mean(
                        lambda: run(*(tensor.to(data[0].device) for tensor in on_host)), FLAWED_RUNS
                    )
                    synchronize()
        except ExportFailed as error:
            return {STATUS: f"{FAILED}{error}"}
    flawed = {"flawed_ms": flawed_ms, "flawed_eager_ms": eager_ms, "flawed_speedup": eager_ms / flawed_ms}
    right = measure_latency(model, backend, batch, precision=precision, length=length, seconds=seconds, cold=cold)
    return right | flawed | {"flawed_n": n}


def flawed_mean(fn: Callable[[], Any], runs: int) -> tuple[float, int]:
    """Mean milliseconds of the first runs by the host's clock, without waiting for the device; and their number."""
    taken: list[float] = []
    while len(taken) < runs and (len(taken) < FLAWED_EAGER_RUNS or sum(taken) < FLAWED_MOST_MS):
        began = time.perf_counter()
        fn()
        taken.append(1000 * (time.perf_counter() - began))
    return float(np.mean(taken)), len(taken)


def waited(run: Callable[..., Any], *inputs: Tensor) -> Callable[[], Any]:
    """A function that calls `run` on the inputs and returns when the device is done."""

    def call() -> Any:
        outputs = run(*inputs)
        synchronize()
        return outputs

    return call


def speeds(compared: Comparison, backend: str, batch: int) -> Row:
    """Times of a backend and of eager, its baseline, and the speed-up: the ratio of eager's median to the backend's."""
    timing = compared.timing(backend)
    speedup, p20, p80 = compared.ratio(EAGER, backend)
    return timing.row() | {
        "samples_per_s": 1e3 * batch / timing.median_ms,
        "baseline": EAGER,
        "baseline_ms": compared.timing(EAGER).median_ms,
        "speedup": speedup,
        "speedup_p20": p20,
        "speedup_p80": p80,
    }


def rounds_for(runs: dict[str, Callable[[], Any]], seconds: float) -> tuple[int, int]:
    """The number of rounds that fill the seconds, within bounds, and of warm-up runs. Costs two runs of each."""
    taken = []
    for fn in runs.values():
        fn()
        began = time.perf_counter()
        fn()
        taken.append(1e3 * (time.perf_counter() - began))
    slow = max(taken) > SLOW_MS
    least = LEAST_SLOW_RUNS if slow else LEAST_RUNS
    return min(max(int(1e3 * seconds / sum(taken)), least), MOST_RUNS), 1 if slow else 3


def _on_device(model: str, batch: int, precision: str, length: int | None) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The model in evaluation mode and its inputs, on the device, in the precision's dtype."""
    dtype = models.PRECISIONS[precision]
    data = models.example(model, batch, length=length)
    data = tuple(tensor.to(device(), dtype if tensor.is_floating_point() else None) for tensor in data)
    return models.network(model).eval().to(device(), dtype), data


def _timed(
    backend: str, run: Callable[[], Any], eager: Callable[[], Any], batch: int, precision: str, seconds: float
) -> Row:
    reference = [tensor.clone() for tensor in tensors(eager())]
    outputs = tensors(run())
    tolerance = agree_within(backend, reference[0].dtype, tf32=precision == "tf32")
    facts = {
        "max_difference": largest_difference(outputs, reference),
        "error": max(map(relative_error, outputs, reference)),
        "tolerance": tolerance,
        "threads": torch.get_num_threads(),
        "version": version(backend),
    }
    both = {EAGER: eager} if backend == EAGER else {EAGER: eager, backend: run}
    rounds, warmup = rounds_for(both, seconds)
    compared = compare(both, rounds=rounds, warmup=warmup, tolerance=tolerance)
    p99 = float(np.percentile(compared.samples_ms[backend], 99))
    return speeds(compared, backend, batch) | {"p99_ms": p99} | facts
