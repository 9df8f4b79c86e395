"""Weight gradients that are exactly zero, by precision."""

import contextlib
from types import SimpleNamespace

import pandas as pd

from ... import train as training
from ...book import Worth
from ...book.table import table
from ...book.values import derived
from ...lab.precision import fp16_by_fp32
from ...lab.rows import Row
from ...train import Step
from .trainings import LOOKED_AT, RUNS, TASKS, TIMED, LookedAt, runs, training_setup, zero_share


@table(
    small=runs("small", ("amp", "static"), ["segmentation"]),
    cpu=runs("reduced", TIMED),
    gpu=runs("reduced", TIMED),
    big_gpu=runs("full", TIMED),
    columns="layer step weights zero_share",
    timed=False,
    version=3,
    worth=Worth(6, "gradients that become zero", cpu=2.2, gpu=3, big_gpu=3),
)
def zeros(task: str, precision: str, size: str) -> list[Row]:
    """The share of weight gradients that are exactly zero, layer by layer, in one step; none if some aren't finite."""
    rows: list[Row] = []

    def look(step: Step) -> None:
        if step.number < LOOKED_AT[size]:
            return
        for name, parameter in step.model.named_parameters():
            if parameter.grad is not None and parameter.dim() > 1:
                share = float(zero_share([parameter.grad])) if parameter.grad.isfinite().all() else None
                rows.append({"layer": name, "step": step.number + 1, "weights": parameter.numel(), "zero_share": share})
        raise LookedAt

    with contextlib.suppress(LookedAt), fp16_by_fp32():
        training.train(training_setup(task, precision, size), on_step=look, progress=False)
    return rows


@zeros.numbers()
def _(rows: pd.DataFrame) -> SimpleNamespace:
    """The share of zero weight gradients by training, of all weights and over layers; none if some aren't finite."""
    cells: dict[str, dict] = {name: {"training": RUNS[name]} for name in RUNS if name in set(rows["precision"])}
    for (task, precision), layers in rows.groupby(["task", "precision"], sort=False):
        share, weights = layers["zero_share"], layers["weights"]
        finite = not share.isna().any()
        cells[precision][f"{TASKS[task]}, all"] = (share * weights).sum() / weights.sum() if finite else None
        cells[precision][f"{TASKS[task]}, by layer"] = f"{share.min():.2g} – {share.max():.2g}" if finite else None
    return SimpleNamespace(table=pd.DataFrame(list(cells.values())), step=derived(rows["step"].max(), "counted", "", 0))
