"""An epoch of forward passes by kind of batches."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from ...batching import StandardDataset
from ...batching.attention import without_cudnn_attention
from ...book.table import Worth, table
from ...book.values import PERCENT, Number, derived, lacking, timed
from ...lab import Row, device
from ...training.task import Batch
from .feeds import BALANCED, BIG_BRAIN, BRAIN, FEEDS, PACKED, STEPS, in_turns
from .inputs import MAX_LENGTH, compute_dtype, dtype_name, language_model, text
from .step_times import Epoch, epochs

PERCENTILES = {"min_ms": 0, "p25_ms": 25, "median_ms": 50, "p75_ms": 75, "max_ms": 100}


@table(
    small=[{"width": 32, "batch_size": 4, "samples": 24}],
    cpu=[{"width": 1024, "batch_size": 32, "samples": 600}],
    gpu=[{"width": 512, "batch_size": size, "samples": 20_000} for size in (32, 128)],
    big_gpu=[{"width": 1024, "batch_size": size, "samples": 20_000} for size in (64, 256)],
    version=4,
    columns=f"variant {' '.join(PERCENTILES)} mean_ms batches padding_share epoch_s real_tokens_per_s us_per_token "
    "loader_s? dtype source",
    worth=Worth(40, "time of a forward pass by batching", cpu=110, gpu=15, big_gpu=20),
)
@without_cudnn_attention()
def batch_time(width: int, batch_size: int, samples: int) -> list[Row]:
    """An epoch of forward passes: embedding, positions, one decoder layer of 8 heads; no head, no backward.

    The decoder's memory is the embedded batch itself, under the causal mask. `epoch_s` is by the clock. On a CPU it is
    as a loop goes: the host makes a batch and computes it, and the next. On a GPU the batches of a part lie on the
    device before it begins, and `loader_s` is what it takes to make and copy all of them: with a loop's workers that is
    hidden behind the steps, or is the limit. The variants' epochs take turns, a part each, whose times for a real token
    are `us_per_token`. The time of a batch, from the tokens on the device to the output, is device time; on a GPU it is
    taken in a second pass, see `device_ms`.
    """
    samples = text(samples, width)
    model = language_model(samples, width, layers=1, head=False).eval()
    dataset = StandardDataset(samples, MAX_LENGTH + 1)
    feeds = {name: feed(dataset, batch_size, device(), compute_dtype(), 0) for name, feed in FEEDS.items()}
    origin = {"dtype": dtype_name(), "source": samples.source}

    def run(batch: Batch) -> Tensor:
        return model(batch.inputs, **batch.options)

    with torch.inference_mode():
        taken = epochs(feeds, run)
        return [_epoch(name, epoch, len(dataset)) | epoch.row(run) | origin for name, epoch in taken.items()]


def _epoch(variant: str, epoch: Epoch, samples: int) -> Row:
    tokens = sum(epoch.real) + (samples if variant == PACKED else 0)  # the last of a sample, which only packs keep
    row = {"variant": variant, "batches": len(epoch.times_ms), "padding_share": 1 - tokens / epoch.positions}
    row |= {"mean_ms": float(np.mean(epoch.times_ms))}
    return row | {name: float(np.percentile(epoch.times_ms, share)) for name, share in PERCENTILES.items()}


# Numbers


@batch_time.numbers()
def _(rows: pd.DataFrame) -> SimpleNamespace:
    """An epoch of forward passes by batch size: gains over BRAIN, padding, and what packs gain over k = 10."""
    columns = ["min_ms", "mean_ms", "median_ms", "max_ms", "batches", "padding, %", "epoch_s", "real_tokens_per_s"]
    columns += ["loader_s"] if rows["loader_s"].notna().any() else []
    shaped = rows.assign(**{"padding, %": (100 * rows["padding_share"]).map("{:.1f}".format)})
    sizes = [int(size) for size in sorted(rows["batch_size"].unique())]
    rates = rows.pivot(index="variant", columns="batch_size", values="real_tokens_per_s")
    against_brain = rates / rates.reindex([BRAIN]).to_numpy()

    def most(name: str) -> Number:
        if name not in rates.index or BRAIN not in rates.index:
            return lacking(f"epochs of {name} and {BRAIN}")
        return in_turns(rows[rows["batch_size"] == against_brain.loc[name].idxmax()], name, BRAIN)

    gain = {name: most(name) for name in dict.fromkeys([*STEPS, *rates.index])}
    padding = rows.groupby("variant")["padding_share"].max().reindex(STEPS)
    brain_padding = Number(padding[BRAIN], PERCENT, missing=f"an epoch of {BRAIN}", decimals=0)
    first = rows.iloc[0]
    epoch = f"an epoch of {rows['samples'].max():,.0f} samples, width {first['width']}"
    return SimpleNamespace(
        tables=[timed(shaped[rows["batch_size"] == size], ["variant", *columns]) for size in sizes],
        sizes=sizes,
        model=f"{epoch}, {first['dtype']}, {first['source']}",
        big_brain=gain[BIG_BRAIN],
        balanced=gain[BALANCED],
        packed=gain[PACKED],
        largest=max((one for one in gain.values() if one.measured), key=float, default=gain[BRAIN]),
        brain_padding=brain_padding,
        bound=derived(1 / (1 - brain_padding.value), "1 / (1 − padding)", decimals=1),
        balanced_padding=Number(padding[BALANCED], PERCENT, missing=f"an epoch of {BALANCED}", decimals=1),
    )
