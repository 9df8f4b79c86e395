"""Inference latency of a model by each backend, and the lecture's flawed timing of the same, for comparison.

A latency is the time from the call until the result is complete: every run starts with an idle device and ends with a
synchronize. The inputs are on the device already.
"""

import copy
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from helpers.compilers.backends import (
    AOT,
    AUTOTUNE,
    BACKENDS,
    CHANNELS_LAST,
    EAGER,
    SCRIPT,
    agree_within,
    build,
    compile_cache,
    missing_because,
    prepare,
    start,
    version,
)
from helpers.compilers.messages import ExportFailed, failures_named
from helpers.lab import Comparison, Disagreement, compare, device
from helpers.lab.arguments import check_choice
from helpers.lab.experiment import FAILED, OUT_OF_MEMORY, is_out_of_memory
from helpers.lab.precision import fp32_products
from helpers.lab.records import STATUS, Row
from helpers.lab.timing import check_agreement, synchronize

from . import workloads

PRECISIONS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

# Rounds of a comparison: at least 20, if a run takes over a second at least 6, at most 200.
LEAST_ROUNDS, LEAST_SLOW_ROUNDS, MOST_ROUNDS, SLOW_S = 20, 6, 200, 1.0

# Each backend has threads of its own, which wait for more work for some ms before they sleep, on the cores that the
# next backend needs: without this pause ONNX Runtime took 1.5 to 1.7 times as long after eager on two cores.
REST_S = 0.02

FLAWED_EAGER_RUNS, FLAWED_RUNS = 10, 100  # the lecture's numbers of runs


def backends_for(model: str, batch: int) -> list[str]:
    """The backends for a model. Channels last is for pictures; what builds for minutes is built for batch 1 only,
    max-autotune on a GPU only; on a CPU a script is as fast as a trace and left out."""
    left_out = set() if model in workloads.RESNET_MODELS else {CHANNELS_LAST}
    left_out |= set() if batch == 1 else {AUTOTUNE, AOT}
    left_out |= set() if device().type == "cuda" else {AUTOTUNE, SCRIPT}
    return [backend for backend in BACKENDS if backend not in left_out]


def measure_latency(
    model: str,
    batch: int,
    backends: Iterable[str] = (),
    *,
    precision: str = "fp32",
    seconds: float = 10.0,
    cold: bool = True,
) -> list[Row]:
    """Latency of each backend (all that suit the model if none are given), as a row each, from one comparison.

    All are built first and their outputs compared with eager's; then they run in turn, for `seconds` in all, but at
    least 20 times each. `baseline_ms` is eager's median of these rounds, the same in all rows; `speedup` is its ratio
    to `median_ms`, with the spread of the rounds' ratios. `build_s`: export, compilation and the first three runs, as
    the second and third may still compile or record; `cold` compiles from an empty cache. `error` is ‖a − b‖ / ‖b‖.
    If a backend can't run here, fails, or disagrees, its row's status says so.
    """
    chosen = [EAGER, *(name for name in backends or backends_for(model, batch) if name != EAGER)]
    check_choice(PRECISIONS, precision=precision)
    net, data = _on_device(model, batch, precision)
    rows: dict[str, Row] = {backend: {"backend": backend} for backend in chosen}
    runs: dict[str, Callable[[], Any]] = {}
    with fp32_products(tf32=False), tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for number, backend in enumerate(chosen):
            if reason := missing_because(backend):
                rows[backend][STATUS] = reason
                continue
            place = Path(folder, str(number))
            place.mkdir()
            try:
                run, facts = _built(backend, net, data, place, cold)
                both = {EAGER: runs.get(EAGER, run), backend: run}
                tolerance = agree_within(backend, PRECISIONS[precision])
                facts |= {"error": check_agreement(both, tolerance)[backend], "tolerance": tolerance}
            except Exception as error:
                rows[backend][STATUS] = status_of(error)
                continue
            rows[backend] |= facts
            runs[backend] = run
        compared = compare(runs, rounds=rounds_for(runs, seconds), warmup=1, check=False, before=rest)
    for backend in runs:
        rows[backend] |= speeds(compared, backend, batch)
    return list(rows.values())


def measure_flawed(model: str, backend: str, *, seconds: float = 5.0) -> Row:
    """The lecture's flawed timing of a backend and of eager at batch 1, and `measure_latency`'s row of the same.

    `flawed_ms` and `flawed_eager_ms` are means that include the first runs, without synchronizing, and only the
    backend's includes the input's copy to the device: 10 runs of eager, 100 of the backend. `flawed_speedup` is their
    ratio. On the CPU the copy is free and nothing is asynchronous; only the first runs' compilation distorts.
    """
    if reason := missing_because(backend):
        return {STATUS: reason}
    net, data = _on_device(model, 1, "fp32")
    on_host = tuple(tensor.cpu() for tensor in data)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, fp32_products(tf32=False):
        eager = prepare(EAGER, net, data, folder)
        eager_ms = flawed_mean(lambda: eager(*data), FLAWED_EAGER_RUNS)
        try:
            start(backend)
            with compile_cache(backend, folder), failures_named("first runs"):
                run = prepare(backend, copy.deepcopy(net), data, folder)
                ms = flawed_mean(lambda: run(*(tensor.to(data[0].device) for tensor in on_host)), FLAWED_RUNS)
                synchronize()
        except ExportFailed as error:
            return {STATUS: f"{FAILED}{error}"}
    flawed = {"flawed_ms": ms, "flawed_eager_ms": eager_ms, "flawed_speedup": eager_ms / ms}
    return measure_latency(model, 1, [backend], seconds=seconds)[-1] | flawed


def flawed_mean(fn: Callable[[], Any], runs: int) -> float:
    """Mean milliseconds of the first runs by the host's clock, without waiting for the device."""
    began = time.perf_counter()
    for _ in range(runs):
        fn()
    return 1e3 * (time.perf_counter() - began) / runs


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


def speeds(compared: Comparison, backend: str, batch: int) -> Row:
    """Times of a backend and of eager, its baseline, and the speed-up: the ratio of eager's median to the backend's."""
    timing = compared.timing(backend)
    speedup, p20, p80 = compared.ratio(EAGER, backend)
    return timing.row() | {
        "p99_ms": float(np.percentile(compared.samples_ms[backend], 99)),
        "samples_per_s": 1e3 * batch / timing.median_ms,
        "baseline": EAGER,
        "baseline_ms": compared.timing(EAGER).median_ms,
        "speedup": speedup,
        "speedup_p20": p20,
        "speedup_p80": p80,
        "threads": torch.get_num_threads(),
    }


def rounds_for(runs: dict[str, Callable[[], Any]], seconds: float) -> int:
    """The number of rounds that fill the seconds, within bounds. Costs a run of each."""
    taken = []
    for fn in runs.values():
        began = time.perf_counter()
        fn()
        taken.append(time.perf_counter() - began)
    least = LEAST_SLOW_ROUNDS if max(taken) > SLOW_S else LEAST_ROUNDS
    return min(max(int(seconds / sum(taken)), least), MOST_ROUNDS)


def status_of(error: Exception) -> str:
    """What a row says of an error that concerns its backend only; other errors are raised."""
    if is_out_of_memory(error):
        return OUT_OF_MEMORY
    if isinstance(error, (Disagreement, ExportFailed)):
        return f"{FAILED}{error}"
    raise error


def _built(
    backend: str, net: nn.Module, data: tuple[Tensor, ...], folder: Path, cold: bool
) -> tuple[Callable[[], Any], Row]:
    start(backend)
    copied = copy.deepcopy(net)  # a backend may change its model's memory layout
    began = time.perf_counter()
    run = waited(build(backend, copied, data, folder, cold=cold), *data)
    return run, {"build_s": time.perf_counter() - began, "version": version(backend)}


def _on_device(model: str, batch: int, precision: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The model and its inputs on the device, in the precision's dtype."""
    dtype = PRECISIONS[precision]
    data = workloads.example(model, batch)
    data = tuple(tensor.to(device(), dtype if tensor.is_floating_point() else None) for tensor in data)
    return workloads.network(model).to(device(), dtype), data
