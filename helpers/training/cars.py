"""Segmentation: a U-Net that finds cars in pictures."""

import functools
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from ..metrics import PixelAccuracy
from ..models import UNet
from ..pictures import cores, preload, segmentation
from .task import Batch, Task
from .text_batches import shuffled

# `small` is for tests; `reduced` takes a CPU seconds to show what fp16 does to gradients; `long` reaches the accuracy
# of `full` on a CPU, in many steps of small batches. How much fp16 loses depends on the number of pixels that the loss
# is a mean over: `MICRO_BATCHES` makes it that of `full`, 128 × 256 × 256.
SIZES = {
    "small": {"size": 16, "samples": 32, "validation_samples": 16, "width": 4, "depth": 1, "batch_size": 8},
    "reduced": {"size": 64, "samples": 640, "validation_samples": 128, "width": 8, "depth": 3, "batch_size": 32},
    "long": {"size": 64, "samples": 1536, "validation_samples": 256, "width": 8, "depth": 3, "batch_size": 8},
    "full": {"size": 256, "samples": 4096, "validation_samples": 512, "width": 32, "depth": 4, "batch_size": 128},
}
MICRO_BATCHES = {"small": 1, "reduced": 64, "long": 256, "full": 1}
LEARNING_RATE = {"small": 3e-3, "reduced": 1e-2, "long": 6e-3, "full": 1e-3}
DECAYS = ("long", "full")  # a constant rate leaves their accuracy swinging by a point from epoch to epoch


def segmentation_task(preset: str, path: Path | None, device: torch.device, seed: int) -> Task:
    """U-Net on pictures of cars. The data set and the order of an epoch are on the device.

    So a step copies nothing from the host, which would make the host wait until all queued work is done.
    """
    source, pictures = _pictures(preset, path, device)
    sizes = SIZES[preset]
    batch_size = sizes["batch_size"]
    torch.manual_seed(seed)

    def taken(split: str, order: Tensor) -> Iterator[Batch]:
        images, masks = pictures[split]  # (N, 3, H, W), (N, 1, H, W)
        parts = order.to(device).split(batch_size)
        return (Batch(images[indices], masks[indices], real=len(indices)) for indices in parts)

    return Task(
        source=source,
        model=UNet(width=sizes["width"], depth=sizes["depth"]).to(device),
        loss=lambda logits, batch: binary_cross_entropy_with_logits(logits, batch.targets),
        validation_metric=PixelAccuracy(),
        batches=lambda epoch: taken("train", shuffled(len(pictures["train"][0]), seed, epoch)),
        steps=lambda epoch: -(-len(pictures["train"][0]) // batch_size),
        validation=lambda: taken("validation", torch.arange(len(pictures["validation"][0]))),
        learning_rate=LEARNING_RATE[preset],
        decays=preset in DECAYS,
        micro_batches=MICRO_BATCHES[preset],
    )


@functools.lru_cache(maxsize=1)
def _pictures(preset: str, path: Path | None, device: torch.device) -> tuple[str, dict[str, tuple[Tensor, Tensor]]]:
    """Cached for the next run: making or reading the pictures takes longer than an epoch of training."""
    options = {name: SIZES[preset][name] for name in ("size", "samples", "validation_samples")}
    splits = dict(zip(("train", "validation"), segmentation(path, **options), strict=True))
    workers = 0 if path is None and preset != "full" else cores()
    return splits["train"].source, {name: preload(dataset, device, workers) for name, dataset in splits.items()}
