"""Classification of clothes by a Vision Transformer. Photos are loaded by a `DataLoader` or kept on the device.

Images are normalised fp32 (B, 3, S, S), labels (B,). Training batches have one size, except for broken files; the last
incomplete batch of an epoch is dropped.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from helpers.metrics import StreamingMetrics
from helpers.models import ViT
from helpers.pictures import Photos, PictureError, decode_photos, photo_files
from helpers.pictures.clothing import PhotoFiles
from helpers.pictures.datasets import EpochOrder, collate
from helpers.pictures.transforms import (
    boxes_within,
    channel_constants,
    cut_on_device,
    middle_boxes,
    normalise,
    random_boxes,
)

from .faults import NO_FAULTS, Faults
from .slow_parts import CollectedMetrics, with_slow_vit_parts
from .trainer import Batch, Task

# `small` is for a CPU and for tests, `gpu` for a GPU of 8 GB. `classes` and the three below describe generated photos.
# An epoch goes over all photos `passes` times. `width`: odd, fixed. `decoded_side`: of photos kept in memory.
FULL: dict[str, Any] = {
    "classes": 10,
    "samples": 5120,
    "validation_samples": 1024,
    "photo_size": (400, 533),
    "passes": 1,
    "model": {"image_size": 224, "patch_size": 32, "depth": 12, "heads": 4, "head_dim": 64, "mlp_size": 1024},
    "width": (255, 256),
    "dropout": 0.1,
    "batch_size": 256,
    "workers": 8,
    "decoded_side": 256,
    "learning_rate": 5e-4,
}
SWITCHED_SIZES: dict[str, dict[str, Any]] = {
    "small": FULL | {
        "classes": 4, "samples": 64, "validation_samples": 32, "photo_size": (100, 133), "decoded_side": 40,
        "model": {"image_size": 32, "patch_size": 8, "depth": 2, "heads": 2, "head_dim": 16, "mlp_size": 64},
        "width": (31, 32), "batch_size": 16, "workers": 1, "learning_rate": 1e-3,
    },
    "cpu": FULL | {
        "classes": 4, "samples": 512, "validation_samples": 128, "photo_size": (900, 1200), "decoded_side": 128,
        "model": {"image_size": 112, "patch_size": 16, "depth": 3, "heads": 4, "head_dim": 64, "mlp_size": 1024},
        "dropout": 0.0, "batch_size": 16, "workers": 2,
    },
    "gpu": FULL | {"samples": 2560, "validation_samples": 512, "batch_size": 64, "workers": 4},
    "full": FULL,
}  # fmt: skip

Constants = tuple[Tensor, Tensor]


def switched_clothes_task(
    sizes: dict[str, Any],
    path: str | Path | None,
    device: torch.device,
    seed: int,
    dtype: torch.dtype,
    faults: Faults,
) -> Task:
    """The ViT and its photos, with the `faults` of `switches.CLOTHES`.

    `path` is the folder of the clothing dataset; without it the photos are generated. Unless they are decoded again in
    each epoch, all photos are decoded here.
    """
    counts = {name: sizes[name] for name in ("classes", "samples", "validation_samples")}
    splits = photo_files(path, **counts, size=sizes["photo_size"], seed=seed)
    classes = len(splits[0].classes)
    constants = functools.partial(channel_constants, device)
    weights = functools.partial(class_weights, splits[0].labels, classes, device)
    if not faults.constants_recomputed:
        constants, weights = functools.cache(constants), functools.cache(weights)
    feed = Feed(sizes, seed, device, constants, weights)
    kind = LoadedBatches if faults.photos_copied else PreloadedBatches
    batches = kind(feed, splits, faults)
    metric = CollectedMetrics if faults.metrics_collected else StreamingMetrics
    return Task(
        source=splits[0].source,
        model=build_vit(sizes, classes, seed, faults).to(device),
        loss=lambda logits, batch: F.cross_entropy(logits.float(), batch.targets, batch.weights),
        metric=metric(classes),
        validation_metric=metric(classes),
        batches=batches.train,
        steps=lambda epoch: len(batches.order) // batches.batch_size,
        validation=batches.validation,
        learning_rate=sizes["learning_rate"],
        weight_decay=0.05,
        prepare_s=batches.prepare_s,
        skipped=batches.skipped,
    )


def build_vit(sizes: dict[str, Any], classes: int, seed: int, faults: Faults = NO_FAULTS) -> ViT:
    """The ViT of these sizes; its weights follow from the seed."""
    torch.manual_seed(seed)
    width = sizes["width"][not faults.odd_width]
    return with_slow_vit_parts(ViT(classes, width=width, dropout=sizes["dropout"], **sizes["model"]), faults)


@dataclass(frozen=True)
class Feed:
    """What both kinds of batches need. `constants` and `weights` are called for each batch."""

    sizes: dict[str, Any]
    seed: int
    device: torch.device
    constants: Callable[[], Constants]  # mean and deviation of the channels
    weights: Callable[[], Tensor]  # of the classes

    @property
    def side(self) -> int:
        return self.sizes["model"]["image_size"]


class LoadedBatches:
    """Photos are cropped on the CPU, by this process or by workers, and copied to the device batch by batch."""

    def __init__(self, feed: Feed, splits: tuple[PhotoFiles, PhotoFiles], faults: Faults) -> None:
        self.feed, sizes = feed, feed.sizes
        decode_once = not faults.photos_decoded_again
        decoded = [decode_photos(split, sizes["decoded_side"]) if decode_once else None for split in splits]
        self.prepare_s = sum(split.seconds for split in decoded if split is not None)
        self.skipped = dict(fault for split in decoded if split is not None for fault in split.skipped)
        train, validation = splits
        self.order = EpochOrder(len(train), feed.seed, decoded[0].usable if decode_once else None, sizes["passes"])
        self.batch_size = min(sizes["batch_size"], len(self.order))
        validation_order = decoded[1].usable if decode_once else np.arange(len(validation))
        self.pinned = not faults.pageable_batches and feed.device.type == "cuda"
        workers = 0 if faults.no_workers else sizes["workers"]
        options = {
            "batch_size": self.batch_size,
            "collate_fn": collate,
            "num_workers": workers,
            "pin_memory": self.pinned,
            "persistent_workers": workers > 0,
            "prefetch_factor": 2 if workers else None,
            "generator": torch.Generator(),  # else each epoch would advance the generator that dropout uses
        }
        as_float = faults.photos_as_floats
        photos = Photos(train, feed.side, decoded=decoded[0], middle_first=faults.photos_cut_twice, as_float=as_float)
        self._train = DataLoader(photos, sampler=self.order, drop_last=True, **options)
        photos = Photos(validation, feed.side, decoded=decoded[1], as_float=as_float)
        self._validation = DataLoader(photos, sampler=[(int(index), None) for index in validation_order], **options)

    def train(self, epoch: int) -> Iterator[Batch]:
        self.order.epoch = epoch
        return self._on_device(self._train)

    def validation(self) -> Iterator[Batch]:
        return self._on_device(self._validation)

    def _on_device(self, loader: DataLoader) -> Iterator[Batch]:
        seen = 0
        for images, labels, skipped in loader:
            self.skipped |= dict(skipped)
            if len(labels):
                seen += len(labels)
                labels = labels.to(self.feed.device, non_blocking=self.pinned)
                images = images.to(self.feed.device, non_blocking=self.pinned)
                if images.dtype == torch.uint8:
                    images = normalise(images, *self.feed.constants())
                yield Batch(images, labels, real=len(labels), weights=self.feed.weights())
        if not seen:
            raise PictureError(f"no photo of an epoch could be read; {len(self.skipped)} files are broken")


class PreloadedBatches:
    """All decoded photos are on the device; a batch is gathered, cropped and normalised there, without a copy.

    An epoch's order and crops are drawn as with a loader, and copied once an epoch.
    """

    def __init__(self, feed: Feed, splits: tuple[PhotoFiles, PhotoFiles], faults: Faults) -> None:
        self.feed, sizes = feed, feed.sizes
        self.middle_first = faults.photos_cut_twice
        decoded = [decode_photos(split, sizes["decoded_side"]) for split in splits]
        self.prepare_s = sum(split.seconds for split in decoded)
        self.skipped = dict(fault for split in decoded for fault in split.skipped)
        self.sizes = [split.sizes for split in decoded]
        self.usable = [split.usable for split in decoded]
        self.order = EpochOrder(len(splits[0]), feed.seed, self.usable[0], sizes["passes"])
        self.batch_size = min(sizes["batch_size"], len(self.order))
        self.pixels = [split.pixels.to(feed.device) for split in decoded]  # (N, s, s, 3) each
        self.labels = [torch.from_numpy(split.labels).to(feed.device) for split in splits]

    def train(self, epoch: int) -> Iterator[Batch]:
        self.order.epoch = epoch
        order, cuts = self.order.drawn()
        cuts = cuts[order]
        if self.middle_first:
            boxes = boxes_within(random_boxes(cuts, np.ones((len(order), 2))), middle_boxes(self.sizes[0][order]))
        else:
            boxes = random_boxes(cuts, self.sizes[0][order])
        complete = len(order) // self.batch_size * self.batch_size
        return self._batches(0, order[:complete], boxes, cuts[:, 4] > 0)

    def validation(self) -> Iterator[Batch]:
        order = self.usable[1]
        return self._batches(1, order, middle_boxes(self.sizes[1][order]), np.zeros(len(order), dtype=bool))

    def _batches(self, split: int, order: np.ndarray, boxes: np.ndarray, mirrored: np.ndarray) -> Iterator[Batch]:
        order, boxes, mirrored = (
            torch.from_numpy(part).to(self.feed.device) for part in (order, boxes.astype(np.float32), mirrored)
        )
        for start in range(0, len(order), self.batch_size):
            part = slice(start, start + self.batch_size)
            images = self.pixels[split][order[part]].permute(0, 3, 1, 2)  # (B, 3, s, s)
            images = cut_on_device(images, boxes[part], mirrored[part], self.feed.side)
            labels = self.labels[split][order[part]]
            images = normalise(images, *self.feed.constants())
            yield Batch(images, labels, real=len(labels), weights=self.feed.weights())


def class_weights(labels: np.ndarray, classes: int, device: torch.device) -> Tensor:
    """Weights of the loss, (classes,), inverse to each class's frequency: 1 on average over the photos.

    Counts all labels; on a GPU the host waits for the copy.
    """
    counts = np.bincount(labels, minlength=classes)
    weights = len(labels) / (np.maximum(counts, 1) * max((counts > 0).sum(), 1))
    return torch.tensor(weights.tolist(), dtype=torch.float32, device=device)
