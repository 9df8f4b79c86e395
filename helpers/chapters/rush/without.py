"""What the best setup loses without each of its changes: the gain of a change where one ends up, not where one starts.

A ladder's rung is tried on a slow loop, whose other costs hide it, or on whatever happened to come before it. Here each
variant is the best setup with one field put back. fp32 products need an fp32 residual stream and, on a GPU, attention
without a fused kernel, so that row is named as what it is: no single change.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch

from ...book.table import Worth, table
from ...book.values import PERCENT, TIMES, Number, derived, judged, lacking, paired, pick, timed
from ...lab import Row, device
from ...lab.estimate import EFFECT, UNDECIDED
from ...lab.memory import OUT_OF_MEMORY, is_out_of_memory
from ...rush import Setup
from ...rush.measurement import first_loss
from .setups import FULL, MEDIUM, ON_CPU, PAIRED, RUN_PAIRED, SMALL, apart, missing, run_apart, setup_of

BEST_SETUP = "the best setup"  # in a row; a reader sees `FULL_SETUP`
FULL_SETUP = "the full setup"
IN_FP32 = "TF32 products, fp32 residual, attention by hand"
IN_FP32_ON_CPU = "bf16: fp32 products, fp32 residual"
ON_GPU: dict[str, dict[str, Any]] = {
    "fused attention": {"attention": "eager"},
    "torch.compile": {"compile": "none"},
    "a fused AdamW: a loop": {"optimizer": "for-loop"},
    "a fused AdamW: foreach": {"optimizer": "foreach"},
    "a CUDA graph": {"cuda_graph": False},
    "a chunked loss": {"head": "full"},
    "fused projections": {"fused": False},
    "a bf16 residual stream": {"residual": "weights"},
    IN_FP32: {"precision": "tf32", "residual": "weights", "attention": "eager"},
}
ON_TWO_CORES: dict[str, dict[str, Any]] = {
    "fused attention": {"attention": "eager"},
    "torch.compile": {"compile": "none"},
    "a fused AdamW: a loop": {"optimizer": "for-loop"},
    "a fused AdamW: foreach": {"optimizer": "foreach"},
    "a chunked loss": {"head": "full"},
    "SwiGLU level 2": {"mlp": "plain"},
    "fused projections": {"fused": False},
    "a bf16 residual stream": {"residual": "weights"},
    IN_FP32_ON_CPU: {"precision": "fp32-onednn", "residual": "weights"},
}
NO_SINGLE_CHANGE = (IN_FP32, IN_FP32_ON_CPU)
LEFT_OUT = {"cuda": ON_GPU, "cpu": ON_TWO_CORES}
SMALLER = 4  # the batch of both sides where the variant doesn't fit at the best setup's


def _variants(sizes: Row, kind: str) -> list[Row]:
    return [sizes | {"without": name} for name in (BEST_SETUP, *LEFT_OUT[kind])]


def _setup(model: str, sequence: int, without: str) -> Setup:
    """The best setup on this device less one change, as far as the device can run it."""
    best = setup_of(model, sequence)
    return dataclasses.replace(best, **LEFT_OUT[device().type].get(without, {}))


def _missing(model: str, sequence: int, without: str, **_: object) -> str:
    if reason := missing(model=model, sequence=sequence):
        return reason
    try:
        reason = _setup(model, sequence, without).missing_because(device())
    except ValueError as error:  # where mixed precision is fp16, a graph needs the fused optimizer
        reason = str(error)
    return f"not here: {reason}" if reason else ""


@table(
    small=[SMALL | {"trial_s": 1.0, "without": name} for name in (BEST_SETUP, "a fused AdamW: foreach")],
    cpu=_variants(ON_CPU | {"trial_s": 40.0}, "cpu"),
    gpu=_variants(MEDIUM | PAIRED, "cuda"),
    big_gpu=_variants(FULL | PAIRED, "cuda"),
    missing=_missing,
    columns=f"{RUN_PAIRED} batch seed_loss?",
    worth=Worth(95, "what the best setup loses without each change", cpu=80, gpu=20, big_gpu=14, on_gpu=2),
)
def without(model: str, sequence: int, without: str, trial_s: float) -> Row | list[Row]:
    """The best setup without one of its changes, in turns with the best setup; where that doesn't fit, both smaller.

    Out of memory is a row of its own, before that of the smaller batch. `seed_loss` is the loss of the best setup from
    other weights: a variant whose loss differs by more trains something else.
    """
    best, variant = setup_of(model, sequence), _setup(model, sequence, without)
    try:
        alone = _row(variant, best, trial_s)
        if "unpaired" not in alone or best.batch <= SMALLER:
            return alone
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error) or best.batch <= SMALLER:
            raise
        alone = {"batch": best.batch, "status": OUT_OF_MEMORY}
    variant, best = (dataclasses.replace(setup, batch=SMALLER) for setup in (variant, best))
    run_apart(best)  # so that its peak is known: whether both fit at once is decided by that
    return [alone, _row(variant, best, trial_s)]


def _row(variant: Setup, best: Setup, trial_s: float) -> Row:
    options = {} if variant == best else {"baseline": best, "seconds": trial_s}
    row = run_apart(variant, **options) | {"batch": variant.batch}
    if variant == best:
        return row | {"seed_loss": apart(best, first_loss, best, seed=1)}
    return row | {"baseline": BEST_SETUP}


@dataclass(frozen=True)
class Without:
    """`gains`: how many times as fast the best setup is with a change as without it. `largest`: the single change of
    most gain among those with an effect."""

    job: str
    rows: pd.DataFrame
    best: Number
    gains: dict[str, Number]
    largest: str
    largest_gain: Number
    memory: Number
    memory_of: str
    undecided: Number
    tried: Number


@without.numbers()
def _(rows: pd.DataFrame) -> Without:
    """Each change's gain in the best setup, with memory and loss beside; another training has no gain."""
    first, best = rows.iloc[0], rows[rows["without"] == BEST_SETUP]
    rows = rows.reindex(columns=rows.columns.union(["ratio"]))
    tried = rows[(rows["without"] != BEST_SETUP) & rows["ratio"].notna()]
    loss, of_other_seed = best[["loss", "seed_loss"]].iloc[0] if len(best) else (float("nan"), float("nan"))
    alike = (tried["loss"] - loss).abs() <= abs(of_other_seed - loss)
    gains = {row["without"]: paired(row) for row in tried[alike].to_dict("records")}
    proven = {name: gain for name, gain in gains.items() if judged(gain)[0] == EFFECT and name not in NO_SINGLE_CHANGE}
    ranked = max(
        proven.items(), key=lambda item: item[1].value, default=("", lacking("a change with an effect", TIMES))
    )
    peaks = tried[alike].set_index("without")["peak_gib"]
    memory = pick(rows, "peak_gib", without=BEST_SETUP)
    hungriest = peaks.idxmax() if len(peaks) else ""
    more = Number(float(peaks.max()) / float(memory), TIMES, derivation="allocated bytes") if len(peaks) else memory
    return Without(
        job=f"{first['model']}, {int(first['batch'])} × {int(first['sequence'])} tokens",
        rows=_shown(rows, gains),
        best=pick(rows, "tokens_per_s", "tokens/s", 0, without=BEST_SETUP),
        gains=gains,
        largest=ranked[0],
        largest_gain=ranked[1],
        memory=more,
        memory_of=hungriest,
        undecided=derived(sum(judged(gain)[0] == UNDECIDED for gain in gains.values()), "counted", "", 0),
        tried=derived(len(gains), "counted", "", 0),
    )


def _shown(rows: pd.DataFrame, gains: dict[str, Number]) -> pd.DataFrame:
    """The table as it is read: tokens/s are the full setup's by the pairs; a batch is a column if there are several."""
    names = ["without", "gain", "batch", "tokens_per_s", "mfu", "matmul_share", "peak_gib", "loss"]
    in_pairs = rows.loc[rows["without"] == BEST_SETUP, "tokens_per_s"].max() / rows["ratio"]
    by_ratio = in_pairs.where(rows["ratio"].notna(), rows["tokens_per_s"])
    one_type = ~rows["without"].isin(NO_SINGLE_CHANGE) & (rows["without"] == BEST_SETUP).any()
    own = rows["matmul_share"] / rows["tokens_per_s"]  # each process measured the rate of products anew
    share = by_ratio * own.mask(one_type, own[rows["without"] == BEST_SETUP].max())
    rows = rows.assign(tokens_per_s=by_ratio, matmul_share=share)
    shown = timed(rows.assign(gain=rows["without"].map(gains), mfu=rows["mfu"].map(_percent)), names)
    shown = shown.assign(matmul_share=shown["matmul_share"].map(_percent)).replace(
        {"without": {BEST_SETUP: FULL_SETUP}}
    )
    if shown["batch"].nunique() == 1:
        shown = shown.drop(columns="batch")
    return shown.rename(
        columns={
            "gain": "time without it",
            "tokens_per_s": "tokens/s, by the ratio",
            "mfu": "MFU",
            "matmul_share": "share of matmul rate",
        }
    )


def _percent(share: float) -> Number | None:
    return Number(share, PERCENT, decimals=0) if pd.notna(share) else None
