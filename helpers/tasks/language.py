"""Language modelling: a GPT-2-like model that predicts each next token, and the four ways to make its batches."""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from helpers.batching import BalancedBatchSampler, BaseDataset, SequencedDataset, StandardDataset, collate_fn
from helpers.batching.attention import causal_attention, missing_because, packed_attention
from helpers.batching.sequenced import Packed
from helpers.metrics import LMAccuracy, LMCrossEntropyLoss
from helpers.models import GPT2LikeModel
from helpers.text import SyntheticText, corpus

from .order import shuffled
from .task import Batch, Task

LANGUAGE = {
    "small": {
        "model": {"d_model": 32, "num_heads": 2, "num_layers": 1, "max_length": 32, "dropout": 0.1},
        "samples": 64,
        "vocab_size": 500,
        "batch_size": 16,
        "lr": 3e-3,
    },
    "reduced": {
        "model": {"d_model": 128, "num_heads": 4, "num_layers": 2, "max_length": 128, "dropout": 0.1},
        "samples": 2000,
        "vocab_size": 4000,
        "batch_size": 32,
        "lr": 1e-3,
    },
    "full": {
        "model": {"d_model": 512, "num_heads": 8, "num_layers": 6, "max_length": 640, "dropout": 0.1},
        "samples": 20_000,
        "vocab_size": None,
        "batch_size": 64,
        "lr": 3e-4,
    },
}
SPREAD = 10  # of lengths in a balanced batch
# How batches are made: padded to the longest there may be, to the longest there is, of nearly one length, or packed.
DATA = ("standard", "base", "balanced", "sequenced")


def language_task(
    preset: str,
    path: Path | None,
    device: torch.device,
    seed: int,
    data: str = "standard",
    dtype: torch.dtype = torch.float32,
) -> Task:
    """The model and its text. `dtype` is what attention will compute in.

    Samples are the same ones, cut to `max_length`, whatever `data` is. So an epoch has equally many real tokens, and on
    the mean a step has as many.
    """
    chosen = LANGUAGE[preset]
    texts = _texts(preset, path)
    vocab = texts["train"].vocab
    pad, longest, size = vocab.pad_id, chosen["model"]["max_length"] + 1, chosen["batch_size"]
    torch.manual_seed(seed)
    shape = chosen["model"] | {"max_length": longest}  # a packed sample keeps its last token, which has no target
    model = GPT2LikeModel(len(vocab), pad_id=pad, attention_dropout=0.0, **shape).to(device)
    batches, steps = FEEDS[data](StandardDataset(texts["train"], longest, pad_id=pad), size, device, dtype, seed)
    judged = StandardDataset(texts["validation"], longest)

    def validation() -> Iterator[Batch]:
        return (_padded(judged, i.tolist(), pad, device) for i in torch.arange(len(judged)).split(size))

    return Task(
        source=texts["train"].source,
        model=model,
        loss=LMCrossEntropyLoss(pad),
        accuracy=LMAccuracy(pad),
        batches=batches,
        steps=steps,
        validation=validation,
        learning_rate=chosen["lr"],
    )


Feed = tuple[Callable[[int, int], Iterator[Batch]], Callable[[int], int]]


def random_batches(
    dataset: StandardDataset, size: int, device: torch.device, dtype: torch.dtype, seed: int, whole: bool = False
) -> Feed:
    """Random batches, padded to the longest of each, or `whole`: to the longest that a sample may be."""
    if whole:
        dataset = BaseDataset(dataset.samples, dataset.max_length, pad_id=dataset.pad_id)

    def batches(epoch: int, start: int) -> Iterator[Batch]:
        order = shuffled(len(dataset), seed, epoch).split(size)
        return (_padded(dataset, indices.tolist(), dataset.pad_id, device) for indices in order[start:])

    return batches, lambda epoch: -(-len(dataset) // size)


def balanced_batches(
    dataset: StandardDataset, size: int, device: torch.device, dtype: torch.dtype, seed: int, k: int = SPREAD
) -> Feed:
    """Random batches of lengths that differ by at most k, padded to the longest of each."""
    sampler = BalancedBatchSampler(dataset.lengths, size, k, seed)

    def batches(epoch: int, start: int) -> Iterator[Batch]:
        sampler.load_state_dict(sampler.state_dict() | {"epoch": epoch, "position": start})
        return (_padded(dataset, indices, dataset.pad_id, device) for indices in sampler)

    def steps(epoch: int) -> int:
        sampler.set_epoch(epoch)
        return len(sampler)

    return batches, steps


def packed_batches(
    dataset: StandardDataset,
    size: int,
    device: torch.device,
    dtype: torch.dtype,
    seed: int,
    way: str | None = None,
) -> Feed:
    """One sequence a step, with as many tokens as the others' batches have real ones, on the mean.

    `way` is the way of attention, the fastest that runs if it isn't given.
    """
    capacity = max(round(min(size, len(dataset)) * float(dataset.lengths.mean())), dataset.max_length)
    packed = SequencedDataset(
        dataset, None, capacity, strategy="best-fit", seed=seed, pad_id=dataset.pad_id, fixed=True
    )
    way = way or packed_way(device, dtype)

    def batches(epoch: int, start: int) -> Iterator[Batch]:
        packed.set_epoch(epoch)
        sequences = itertools.islice(packed, start, None)
        return (_packed(sequence, way, dataset.pad_id, device) for sequence in sequences)

    def steps(epoch: int) -> int:
        packed.set_epoch(epoch)
        return len(packed)

    return batches, steps


FEEDS = {
    "standard": random_batches,
    "base": functools.partial(random_batches, whole=True),
    "balanced": balanced_batches,
    "sequenced": packed_batches,
}


def packed_way(device: torch.device, dtype: torch.dtype) -> str:
    """The fastest way of attention over packed documents that runs there."""
    preferred = ("varlen", "flex", "dense") if device.type == "cuda" else ("dense",)
    return next(variant for variant in preferred if not missing_because(variant, device, dtype))


def _packed(packed: Packed, way: str, pad_id: int, device: torch.device) -> Batch:
    """A packed sequence as a batch of one row, with the attention that keeps its documents apart."""
    there = _moved(packed, device)
    options = {
        "positions": there.positions,
        "attend": packed_attention(packed.layout(), way, device),
    }
    return Batch(there.tokens[None], there.targets(pad_id)[None], options)


def _padded(dataset: StandardDataset, indices: Sequence[int], pad_id: int, device: torch.device) -> Batch:
    """Rows (B, T + 1) as inputs and the tokens that follow them; at least two tokens wide."""
    tokens = collate_fn([dataset[index] for index in indices], pad_id)
    if tokens.shape[1] < 2:
        tokens = torch.nn.functional.pad(tokens, (0, 2 - tokens.shape[1]), value=pad_id)
    tokens = _moved(tokens, device)
    return Batch(tokens[:, :-1], tokens[:, 1:], {"attend": causal_attention})


def _moved(tokens: Tensor | Packed, device: torch.device) -> Tensor | Packed:
    """On the device. From pinned memory the copy is queued, and the host goes on."""
    return tokens.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tokens


@functools.lru_cache(maxsize=1)
def _texts(preset: str, path: Path | None) -> dict:
    """Training and validation text. WikiText's validation split is learned from and its test split judges."""
    chosen = LANGUAGE[preset]
    if path is not None:
        train = corpus("validation", path)
        return {"train": train, "validation": corpus("test", path, vocab=train.vocab)}
    options = {} if chosen["vocab_size"] is None else {"vocab_size": chosen["vocab_size"]}
    sizes = {"train": chosen["samples"], "validation": max(chosen["samples"] // 8, 16)}
    return {name: SyntheticText(size, seed, **options) for seed, (name, size) in enumerate(sizes.items())}
