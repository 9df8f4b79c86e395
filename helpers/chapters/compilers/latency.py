"""Inference latency of a model by each backend.

A latency is the time from the call until the result is complete. The inputs are on the device already.
"""

import copy
import math
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import torch

from ...book.table import LAST, Worth, table
from ...book.values import TIMES, Number, lacking, number, over, speedup
from ...compilers import backends
from ...compilers.backends import ONE_THREAD, ONNX, ONNX_ONE_THREAD, ONNX_UNFUSED
from ...lab import Row, device
from ...lab.arguments import check_choice
from ...lab.device_share import HOST_BOUND, host_bound
from ...lab.precision import fp32_products
from ...lab.timing import check_agreement
from . import workloads
from .side_by_side import SPEEDS, Runs, modes_named, side_by_side, waited
from .workloads import BERT_BASE, RESNET_18

BOTH = (RESNET_18, BERT_BASE)
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


@table(
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


# Numbers


@latency.numbers()
def _(rows: pd.DataFrame) -> SimpleNamespace:
    """Inference in fp32: both models by backend, and each backend's mean speedup over the batch sizes.

    Of ONNX Runtime's for ResNet-18 `fused` is what fusion adds, and `threaded` what more than one thread adds beyond
    eager's: the rest is that of its products.
    """
    rows = modes_named(rows[(rows["precision"] == "fp32") & rows["batch"].isin([1, 8])])
    others = rows[rows["backend"] != "eager"]
    by_backend = others.assign(number=[speedup(row, 2) for _, row in others.iterrows()]).groupby(["model", "backend"])
    means = by_backend["number"].agg(_mean)[by_backend.size() == by_backend.size().max()]
    onnx = _at(means, (RESNET_18, ONNX))
    onnx_alone, alone = (_at(means, (RESNET_18, name)) for name in (ONNX_ONE_THREAD, ONE_THREAD))
    best = max(means.items(), key=lambda mean: float(mean[1]), default=(("", ""), lacking("inference", TIMES)))
    served = [mean for (_, backend), mean in means.items() if backend in (ONNX, "torch.compile")]
    return SimpleNamespace(
        table=_by_model(rows),
        served=max(served, key=float, default=lacking("inference by ONNX Runtime or torch.compile", TIMES)),
        resnet_onnx=onnx,
        fused=over(onnx, _at(means, (RESNET_18, ONNX_UNFUSED))),
        threaded=over(onnx, over(onnx_alone, alone)),
        resnet_compile=_at(means, (RESNET_18, "torch.compile")),
        bert_onnx=_at(means, (BERT_BASE, ONNX)),
        bert_openvino=_at(means, (BERT_BASE, "OpenVINO")),
        bert_compile=_at(means, (BERT_BASE, "torch.compile")),
        best=best[1],
        best_model=best[0][0].partition(",")[0],
        best_backend=best[0][1],
    )


def _by_model(rows: pd.DataFrame) -> pd.DataFrame:
    """A row for each backend: for each model and batch its latency and its speedup, and the time to build it."""
    backends = list(dict.fromkeys(rows["backend"]))
    columns = {"backend": backends}
    for model, of_model in rows.groupby("model", sort=False):
        name = model.partition(",")[0]
        for batch, of_batch in of_model.groupby("batch"):
            of_batch = of_batch.set_index("backend").reindex(backends)
            cells = {
                backend: f"{number(row['median_ms'])} ({number(speedup(row, 2))})" + HOST_BOUND * host_bound(row)
                for backend, row in of_batch.dropna(subset="median_ms").iterrows()
            }
            cells |= {"eager": number(of_batch.loc["eager", "median_ms"])} if "eager" in cells else {}
            columns[f"{name}, batch {batch}, ms"] = list(map(cells.get, backends))
        built = of_model.drop_duplicates("backend").set_index("backend")["build_s"]
        columns[f"{name}, build, s"] = built.reindex(backends).to_numpy()
    return pd.DataFrame(columns)


def _mean(speedups: pd.Series) -> Number:
    """Their geometric mean; its interval is the mean of theirs, which is wider than one of independent errors."""
    mean, low, high = (
        math.exp(sum(math.log(getattr(s, end) or math.nan) for s in speedups) / len(speedups))
        for end in ("value", "low", "high")
    )
    ends = (low, high) if low == low else (None, None)
    return Number(mean, TIMES, *ends, sum(s.n for s in speedups), decimals=2, noisy=any(s.noisy for s in speedups))


def _at(numbers: pd.Series, key: str | tuple[str, str]) -> Number:
    return numbers[key] if key in numbers.index else lacking(" of ".join([key] if isinstance(key, str) else key), TIMES)
