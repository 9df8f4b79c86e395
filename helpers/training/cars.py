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
from .sizes import sizes_of
from .task import Batch, Task
from .text_batches import shuffled

SIZES = sizes_of("cars")


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
        **{name: sizes[name] for name in ("learning_rate", "decays", "micro_batches")},
    )


@functools.lru_cache(maxsize=1)
def _pictures(preset: str, path: Path | None, device: torch.device) -> tuple[str, dict[str, tuple[Tensor, Tensor]]]:
    """Cached for the next run: making or reading the pictures takes longer than an epoch of training."""
    options = {name: SIZES[preset][name] for name in ("size", "samples", "validation_samples")}
    splits = dict(zip(("train", "validation"), segmentation(path, **options), strict=True))
    workers = 0 if path is None and preset != "full" else cores()
    return splits["train"].source, {name: preload(dataset, device, workers) for name, dataset in splits.items()}
