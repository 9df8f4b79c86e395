"""Inference latency of a model by each backend.

A latency is the time from the call until the result is complete. The inputs are on the device already.
"""

import copy
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from ...compilers import backends
from ...lab import Worth, device, experiment
from ...lab.arguments import check_choice
from ...lab.precision import fp32_products
from ...lab.records import Row
from ...lab.records.experiment import LAST
from ...lab.timing import check_agreement
from . import workloads
from .side_by_side import SPEEDS, Runs, side_by_side, waited

BOTH = (workloads.RESNET_18, workloads.BERT_BASE)
PRECISIONS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def backends_for(model: str, batch: int) -> list[str]:
    """The backends for a model. Channels last is for pictures; what builds for minutes is built for batch 1 only,
    max-autotune on a GPU only; on a CPU a script is as fast as a trace and left out. A tiny model has a trace only."""
    if model in workloads.TINY:
        return [backends.TRACE]
    left_out = set() if model in workloads.RESNET_MODELS else {backends.CHANNELS_LAST}
    left_out |= set() if batch == 1 else {backends.AUTOTUNE, backends.AOT}
    left_out |= set() if device().type == "cuda" else {backends.AUTOTUNE, backends.SCRIPT}
    return [name for name in backends.BACKENDS if name not in left_out]


@experiment(
    small=workloads.each(workloads.TINY, "fp32", (1,)),
    cpu=workloads.each(BOTH, "fp32", (1, 8)),
    # in fp16, where builds of minutes are for batch 1; in fp32 with one that has none of them
    gpu=workloads.each(BOTH, "fp16", (1, 8, 64)) + workloads.each(BOTH, "fp32", (8,)),
    version=3,
    columns=SPEEDS + "backend version",
    worth=Worth(20, "latency by backend", cpu=43.5, gpu=20, big_gpu=85, on_gpu=LAST),
)
def latency(model: str, precision: str, batch: int) -> list[Row]:
    """Latency of a model by each backend and by eager, in turn, after their outputs were compared."""
    return measure_latency(model, batch, precision=precision)


def measure_latency(
    model: str, batch: int, chosen: Iterable[str] = (), *, precision: str = "fp32", seconds: float | None = None
) -> list[Row]:
    """Latency of each backend (all that suit the model if none are given), as a row each, from one comparison.

    All are built first and their outputs compared with eager's; then they run in turn, for `seconds` in all (5, on a
    GPU 1.5), but at least 10 times each. `baseline_ms` is eager's median of these rounds, the same in all rows;
    `speedup` is its ratio to `median_ms`, with the spread of the rounds' ratios. `build_s`: export, compilation from an
    empty cache, and the first three runs, as the second and third may still compile or record.
    """
    check_choice(PRECISIONS, precision=precision)
    dtype = PRECISIONS[precision]
    data = tuple(x.to(device(), dtype if x.is_floating_point() else None) for x in workloads.example(model, batch))
    net = workloads.network(model).to(device(), dtype)
    with fp32_products(), tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:

        def built(backend: str, runs: Runs) -> tuple[Callable[[], Any], Row]:
            place = Path(folder, str(len(runs)))
            place.mkdir(exist_ok=True)  # a backend that failed may have written there
            backends.start(backend)
            copied = copy.deepcopy(net)  # a backend may change its model's memory layout
            began = time.perf_counter()
            run = waited(backends.build(backend, copied, data, place), *data)
            facts = {"build_s": time.perf_counter() - began, "version": backends.version(backend)}
            both = {backends.EAGER: runs.get(backends.EAGER, run), backend: run}
            check_agreement(both, backends.agree_within(backend, dtype))
            return run, facts

        return side_by_side(chosen or backends_for(model, batch), built, seconds)
