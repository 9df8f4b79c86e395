"""One gradient computation in each precision: its time and memory."""

import contextlib
from dataclasses import replace
from types import SimpleNamespace

import pandas as pd

from ... import train as training
from ...book.table import Worth, table
from ...book.values import Number, marked, number, over, pick
from ...lab import Row, bench, peak_memory
from ...lab.memory import GIB
from ...lab.precision import fp16_by_fp32
from ...lab.timing import tensors
from .trainings import RUNS, SMALL_RUNS, TASKS, TIMED, runs, training_setup

TORCHS_KERNELS, FP32_KERNELS = "torch's", "fp32's, rounded"
TORCHS_AUTOCAST = "bf16-torch"  # all others are of ours
NAMES = RUNS | {TORCHS_AUTOCAST: "AMP, bf16, torch's autocast"}


@table(
    small=[run | {"kernels": FP32_KERNELS} for run in SMALL_RUNS],
    cpu=[
        *(run | {"kernels": TORCHS_KERNELS} for run in runs("reduced", ("fp32", "bf16", TORCHS_AUTOCAST))),
        *(run | {"kernels": FP32_KERNELS} for run in runs("reduced", ("fp16", "amp", "static", "dynamic"))),
        *(run | {"kernels": TORCHS_KERNELS} for run in runs("reduced", ("dynamic",), ["segmentation"])),
    ],
    gpu=[run | {"kernels": TORCHS_KERNELS} for run in runs("reduced", (*TIMED, TORCHS_AUTOCAST))],
    big_gpu=[run | {"kernels": TORCHS_KERNELS} for run in runs("full", (*TIMED, TORCHS_AUTOCAST))],
    columns="median_ms p20_ms p80_ms n peak_gib",
    version=3,
    worth=Worth(40, "one gradient in each precision", cpu=5.2, gpu=4, big_gpu=3),
)
def gradient_time(task: str, precision: str, size: str, kernels: str) -> Row:
    """One gradient computation, forward and backward, of one batch.

    `kernels` says which ones compute products of fp16 numbers on a CPU: torch's, or, for a CPU without fp16 units,
    those of fp32 with the results rounded. Its memory is that of weights and batch, and what the computation adds at
    its peak, gradients among it; not the pictures that lie on the device for other batches.
    """
    by = {"precision": "bf16", "autocast": "torch"} if precision == TORCHS_AUTOCAST else {"precision": precision}
    trainer = training.build_trainer(training_setup(task, size=size, **by))
    model, scaler = trainer.model, trainer.scaler
    batch = next(trainer.epoch(0))

    def step() -> None:
        model.zero_grad()
        loss, _ = trainer.forward(batch)
        (loss if scaler is None else scaler.scale(loss)).backward()

    with trainer.settings(), fp16_by_fp32() if kernels == FP32_KERNELS else contextlib.nullcontext():
        timing = bench(step)
        model.zero_grad()
        added = peak_memory(step).added_bytes
    resident = [*model.parameters(), *model.buffers(), *tensors([batch.inputs, batch.targets, batch.options])]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in resident}  # each once
    return timing.row() | {"peak_gib": (sum(storages.values()) + added) / GIB}


@gradient_time.numbers()
def _(rows: pd.DataFrame) -> SimpleNamespace:
    """Time and memory of a gradient by training; what 16 bits take by torch's own kernels, against fp32."""
    in_bf16 = ["fp32", "bf16", TORCHS_AUTOCAST]
    fp16, by_torch = ~rows["precision"].isin(in_bf16), rows["kernels"] == TORCHS_KERNELS
    named = fp16 & by_torch & (rows["kernels"].nunique() > 1)
    cells: dict[str, dict] = {}
    for row in rows.assign(named=named).to_dict("records"):
        training = NAMES[row["precision"]] + (", torch's kernels" if row["named"] else "")
        columns = cells.setdefault(training, {"training": training})
        middle, low, high = number(marked(row["median_ms"], row)), number(row["p20_ms"]), number(row["p80_ms"])
        columns[f"{TASKS[row['task']]}, ms"] = f"{middle} ({low} – {high})"
        columns[f"{TASKS[row['task']]}, GiB"] = row["peak_gib"]
    pictures = rows[by_torch & (rows["task"] == "segmentation")]
    fp32, dynamic, bf16 = (pick(pictures, "median_ms", "ms", precision=run) for run in ("fp32", "dynamic", "bf16"))
    text = rows[by_torch & (rows["task"] == "lm")]
    ours, torchs = (pick(text, "median_ms", "ms", precision=run) for run in ("bf16", TORCHS_AUTOCAST))
    return SimpleNamespace(
        ours=over(ours, torchs),
        table=pd.DataFrame(list(cells.values())),
        fp16=over(dynamic, fp32),
        bf16=over(bf16, fp32),
        memory={task: _peak(rows[by_torch & (rows["task"] == task)]) for task in TASKS},
    )


def _peak(rows: pd.DataFrame) -> Number:
    """The peak of a gradient under bf16 autocast against that in fp32."""
    after, before = (pick(rows, "peak_gib", precision=run) for run in ("bf16", "fp32"))
    return replace(over(after, before), derivation="allocated bytes", decimals=2)
