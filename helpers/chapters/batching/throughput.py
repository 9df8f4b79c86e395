"""Real tokens a second of training steps by kind of batches, against equally long samples."""

import itertools
from functools import partial
from types import SimpleNamespace

import numpy as np
import pandas as pd
import torch

from ...batching import StandardDataset
from ...batching.attention import VARIANTS, missing_because, without_cudnn_attention
from ...book.table import Worth, table
from ...book.values import PERCENT, TIMES, Number, in_unit, lacking, of_kernels, timed
from ...lab import STATUS, Row, device
from ...lab.memory import OUT_OF_MEMORY
from ...metrics import LMCrossEntropyLoss
from ...training.task import Batch
from ...training.text_batches import full_batch, packed_batches
from .feeds import BALANCED, BIG_BRAIN, BRAIN, FEEDS, PACKED, in_turns
from .inputs import MAX_LENGTH, WIKITEXT_SAMPLES, compute_dtype, dtype_name, language_model, text
from .step_times import fits, rates, training_step

NO_PADDING = "equally long, no padding"
DENSE, VARLEN = f"{PACKED}, dense", f"{PACKED}, varlen"
BATCHES = 20  # that each variant's training steps go through in a round; 10 on a CPU
DENSE_BATCHES = 5  # of them by dense attention, whose masks are T² numbers each, and whose steps take equally long


@table(
    small=[{"width": 128, "layers": 1, "batch_size": 4, "samples": 96, "rounds": 20}],  # flex wants heads of 16
    cpu=[{"width": 512, "layers": 2, "batch_size": 16, "samples": WIKITEXT_SAMPLES, "rounds": 6}],
    gpu=[{"width": 512, "layers": 4, "batch_size": 32, "samples": 20_000, "rounds": 6}],
    big_gpu=[{"width": 1024, "layers": 8, "batch_size": 256, "samples": 20_000, "rounds": 6}],
    version=4,
    columns="variant median_ms p20_ms p80_ms n real_tokens_per_s us_per_token ratio_to_no_padding dtype source"
    " baseline",
    worth=Worth(50, "tokens/s of a model by batching", cpu=39.2, gpu=8, big_gpu=30),
)
@without_cudnn_attention()
def throughput(width: int, layers: int, batch_size: int, samples: int, rounds: int) -> list[Row]:
    """Real tokens a second of training steps, forward, backward and AdamW, from one interleaved run.

    The limit is a batch of samples all as long as the mean one: the same model with nothing to pad. The others take
    batches of WikiText's lengths, the same ones in each round; any two variants are a pair in each of `us_per_token`.
    `batch_size` is the most samples in a batch of k = 10, whose length few samples may have: on a GPU, where a step
    has a least time, the others take as many samples as have equally many real tokens.
    Batches, and the masks or tables that attention needs, are made before: `attention` has what those cost. First
    each variant goes through its batches, to warm up; one that runs out of memory is a row that says so, and the
    others go on without it.
    """
    torch._dynamo.reset()  # `flex` is compiled for this length alone, as in a process of its own
    samples = text(samples, width)
    dataset = StandardDataset(samples, MAX_LENGTH + 1)
    model = language_model(samples, width, layers)
    criterion = LMCrossEntropyLoss(samples.vocab.pad_id)
    step = training_step(model.parameters(), lambda b: criterion(model(b.inputs, **b.options), b.targets))

    dtype, on_cuda = compute_dtype(), device().type == "cuda"
    feeds = {name: FEEDS[name] for name in (BRAIN, BIG_BRAIN, BALANCED)}
    for variant in VARIANTS if on_cuda else ("dense", "varlen"):
        if not missing_because(variant, device(), dtype):
            feeds[f"packed, {variant}"] = partial(packed_batches, variant=variant)
    length, count = float(dataset.lengths.mean()), BATCHES if on_cuda else BATCHES // 2

    def first_batches(name: str, size: int) -> list[Batch]:
        epochs, _ = feeds[name](dataset, size, device(), dtype, 0)
        return list(itertools.islice(epochs(0), count))

    balanced = first_batches(BALANCED, batch_size)
    per_step = np.mean([batch.real for batch in balanced])
    size = max(round(per_step / (length - 1)), 1) if on_cuda else batch_size
    batches = {NO_PADDING: [full_batch(samples, size, round(length), device())]}
    batches |= {name: balanced if name == BALANCED else first_batches(name, size) for name in feeds}
    real_tokens = {name: np.mean([int((b.targets != 0).sum()) for b in of]) for name, of in batches.items()}
    batches["packed, dense"] = batches["packed, dense"][:DENSE_BATCHES]
    batches[BRAIN] = batches[BRAIN][:1]
    names = list(batches)
    for name in reversed(names):  # the largest last, when all masks are there
        if not fits(step, batches[name]):
            del batches[name]
    rows = rates(step, batches, real_tokens, rounds)
    limit = rows.get(NO_PADDING)
    for row in rows.values():
        row["ratio_to_no_padding"] = row["real_tokens_per_s"] / limit["real_tokens_per_s"] if limit else None
    origin = {"dtype": dtype_name(), "source": samples.source, "baseline": NO_PADDING}
    return [{"variant": name} | rows.get(name, {STATUS: OUT_OF_MEMORY}) | origin for name in names]


# Numbers


@throughput.numbers()
def _(rows: pd.DataFrame) -> SimpleNamespace:
    """Training steps by kind of batches, each at its best batch size, against equally long samples.

    `alone`, `over_longest` and `over_balanced` are packing with the kernel that padded batches have: FlashAttention,
    which a GPU's packs give the texts' ends and a CPU's a mask. `kernel` is what the packs' fastest kernel adds, and
    `gain` is both. All of these are at one batch size, that of the fastest packs. A step's real tokens and its kernel
    of attention are columns of the table.
    """
    sizes = rows["batch_size"].unique()
    names = ["batch_size", "variant", "attention", "real tokens a step", "median_ms", "p20_ms", "p80_ms"]
    names = [*names[len(sizes) < 2 :], "real_tokens_per_s", "ratio_to_no_padding"]
    best = rows.sort_values("ratio_to_no_padding", ascending=False).drop_duplicates("variant")
    packed = next(iter(best.loc[best["variant"].str.startswith(PACKED), "variant"]), PACKED)

    def faster(variant: str, baseline: str, like: str = "", kernel: bool = False) -> Number:
        of = best.loc[best["variant"] == (like or variant), "batch_size"]
        if not len(of):
            return lacking(like or variant, TIMES)
        both = rows[(rows["batch_size"] == of.iloc[0]) & rows["variant"].isin([variant, baseline])]
        ratio = in_turns(both, variant, baseline)
        return of_kernels(ratio, f"{variant} over {baseline}", *both.to_dict("records")) if kernel else ratio

    same = DENSE if (rows["preset"] == "cpu").all() else VARLEN
    share = {name: in_unit(faster(name, NO_PADDING), PERCENT, 0) for name in (BRAIN, BALANCED, packed)}
    first = rows.iloc[0]
    shown = rows.assign(
        attention=rows["variant"].map(_kernel_of),
        **{"real tokens a step": (rows["real_tokens_per_s"] * rows["median_ms"] / 1e3).round()},
    )
    return SimpleNamespace(
        table=timed(shown, names).rename(columns={"ratio_to_no_padding": "tokens/s, limit = 1"}),
        model=f"{first['layers']} layers of width {first['width']}, {first['dtype']}, batches of "
        + " and ".join(map(str, sizes))
        + f", {first['source'].partition(',')[0]}",
        fastest=packed,
        packed=share[packed],
        balanced=share[BALANCED],
        brain=share[BRAIN],
        gain=faster(packed, BRAIN),
        by_length=faster(BALANCED, BRAIN),
        over_balanced=faster(same, BALANCED, packed),
        over_longest=faster(same, BIG_BRAIN, packed),
        balanced_over_longest=faster(BALANCED, BIG_BRAIN),
        packs_over_longest=faster(packed, BIG_BRAIN),
        alone=faster(same, BRAIN, packed),
        kernel=faster(packed, same, packed, kernel=True),
        kernel_name=_kernel_of(packed),
        same_kernel=_kernel_of(same),
    )


def _kernel_of(variant: str) -> str:
    """The attention of a kind of batches, as its table names it."""
    return variant.removeprefix(f"{PACKED}, ") if variant.startswith(PACKED) else "causal"
