"""What can be trained: a language model and a segmentation network, each with its data, loss and accuracy."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from helpers.amp.segmentation import preload, segmentation
from helpers.metrics import LMAccuracy, LMCrossEntropyLoss, PixelAccuracy
from helpers.models import GPT2LikeModel, UNet
from helpers.text import SyntheticText, corpus

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Task:
    """A model and what trains it. `batch(split, indices)` gives inputs and targets on the device."""

    source: str
    model: nn.Module
    loss: Callable[[Tensor, Tensor], Tensor]
    accuracy: PixelAccuracy | LMAccuracy
    batch: Callable[[str, Tensor], Batch]
    sizes: dict[str, int]
    batch_size: int
    learning_rate: float


# Presets as plain data; `small` is for a CPU and for tests.
SEGMENTATION = {
    "small": {"size": 16, "samples": 32, "validation_samples": 16, "width": 4, "depth": 1, "batch_size": 8, "lr": 3e-3},
    "full": {
        "size": 256,
        "samples": 4096,
        "validation_samples": 512,
        "width": 32,
        "depth": 4,
        "batch_size": 128,
        "lr": 1e-3,
    },
}
LANGUAGE = {
    "small": {
        "model": {"d_model": 32, "num_heads": 2, "num_layers": 1, "max_length": 32, "dropout": 0.1},
        "samples": 64,
        "vocab_size": 500,
        "batch_size": 16,
        "lr": 3e-3,
    },
    "full": {
        "model": {"d_model": 512, "num_heads": 8, "num_layers": 6, "max_length": 256, "dropout": 0.1},
        "samples": 20_000,
        "vocab_size": None,
        "batch_size": 64,
        "lr": 3e-4,
    },
}


def segmentation_task(preset: str, path: Path | None, device: torch.device, seed: int) -> Task:
    """U-Net on pictures of cars; the data set lies on the device as a whole."""
    source, held = _pictures(preset, path, device)
    chosen = SEGMENTATION[preset]
    torch.manual_seed(seed)
    return Task(
        source=source,
        model=UNet(width=chosen["width"], depth=chosen["depth"]).to(device),
        loss=nn.functional.binary_cross_entropy_with_logits,
        accuracy=PixelAccuracy(),
        batch=lambda split, indices: tuple(part[indices.to(device)] for part in held[split]),
        sizes={name: len(images) for name, (images, _) in held.items()},
        batch_size=chosen["batch_size"],
        learning_rate=chosen["lr"],
    )


def language_task(preset: str, path: Path | None, device: torch.device, seed: int) -> Task:
    """A GPT-2-like model that predicts each next token; batches are cut to `max_length` and padded to their longest."""
    chosen = LANGUAGE[preset]
    texts = _texts(preset, path)
    vocab = texts["train"].vocab
    pad, longest = vocab.pad_id, chosen["model"]["max_length"]
    torch.manual_seed(seed)

    def batch(split: str, indices: Tensor) -> Batch:
        rows = [texts[split][int(i)][: longest + 1] for i in indices]
        tokens = np.full((len(rows), max(max(map(len, rows)), 2)), pad, dtype=np.int64)  # (B, T + 1)
        for row, line in zip(rows, tokens, strict=True):
            line[: len(row)] = row
        both = torch.from_numpy(tokens).to(device, non_blocking=True)
        return both[:, :-1], both[:, 1:]

    return Task(
        source=texts["train"].source,
        model=GPT2LikeModel(len(vocab), pad_id=pad, **chosen["model"]).to(device),
        loss=LMCrossEntropyLoss(pad),
        accuracy=LMAccuracy(pad),
        batch=batch,
        sizes={name: len(text) for name, text in texts.items()},
        batch_size=chosen["batch_size"],
        learning_rate=chosen["lr"],
    )


TASKS = {"lm": language_task, "segmentation": segmentation_task}


@functools.lru_cache(maxsize=1)
def _pictures(preset: str, path: Path | None, device: torch.device) -> tuple[str, dict[str, Batch]]:
    """Kept for the next run: making or reading the pictures takes longer than training on them for an epoch."""
    sizes = {name: SEGMENTATION[preset][name] for name in ("size", "samples", "validation_samples")}
    splits = dict(zip(("train", "validation"), segmentation(path, **sizes), strict=True))
    return splits["train"].source, {name: preload(dataset, device) for name, dataset in splits.items()}


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
