"""Where the ViT's batches come from: a `DataLoader`, or photos that lie on the device.

Both give `train(epoch)` and `validation()`, iterators of normalised fp32 images (B, 3, S, S) and labels (B,) on the
device, and count in `skipped` what could not be read. Training batches are all of one size, but for files that are
broken; the rest of an epoch that fills none is left out.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from helpers.pictures import Photos, PictureError, decode_photos
from helpers.pictures.datasets import Batch, EpochOrder, collate
from helpers.pictures.files import PhotoFiles
from helpers.pictures.transforms import (
    boxes_within,
    channel_constants,
    cut_on_device,
    middle_boxes,
    normalise,
    random_boxes,
)

from .switches import Fixes

Pair = tuple[Tensor, Tensor]
Constants = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class Feed:
    """What batches are made of."""

    side: int
    batch_size: int
    workers: int
    kept_side: int
    passes: int
    seed: int
    device: torch.device


def open_batches(fixes: Fixes, train: PhotoFiles, validation: PhotoFiles, feed: Feed) -> "LoadedBatches | HeldBatches":
    """The batches of a set of fixes. Decodes everything first if the fixes say so."""
    constants = functools.partial(channel_constants, feed.device)
    if "constants_once" in fixes:
        constants = functools.cache(constants)
    kind = HeldBatches if "photos_on_device" in fixes else LoadedBatches
    return kind(fixes, train, validation, feed, constants)


class LoadedBatches:
    """Photos are cut on the CPU, by this process or by workers, and copied to the device batch by batch."""

    def __init__(
        self, fixes: Fixes, train: PhotoFiles, validation: PhotoFiles, feed: Feed, constants: Callable[[], Constants]
    ) -> None:
        self.feed, self.constants, self.skipped = feed, constants, {}
        kept = [
            decode_photos(split, feed.kept_side) if "decode_once" in fixes else None for split in (train, validation)
        ]
        self.prepare_s = sum(split.seconds for split in kept if split is not None)
        as_float = "uint8_transfer" not in fixes
        usable = None if kept[0] is None else kept[0].usable
        self.order = EpochOrder(len(train), feed.seed, usable, feed.passes)
        self.batch_size = min(feed.batch_size, len(self.order))
        in_turn = np.arange(len(validation)) if kept[1] is None else kept[1].usable
        for split in kept:
            self.skipped |= dict(split.skipped if split is not None else [])
        self.pinned = "pinned" in fixes and feed.device.type == "cuda"
        workers = feed.workers if "workers" in fixes else 0
        options = {
            "batch_size": self.batch_size,
            "collate_fn": collate,
            "num_workers": workers,
            "pin_memory": self.pinned,
            "persistent_workers": workers > 0,
            "prefetch_factor": 2 if workers else None,
        }
        photos = Photos(train, feed.side, decoded=kept[0], middle_first="single_cut" not in fixes, as_float=as_float)
        self._train = DataLoader(photos, sampler=self.order, drop_last=True, **options)
        photos = Photos(validation, feed.side, decoded=kept[1], as_float=as_float)
        self._validation = DataLoader(photos, sampler=[(int(index), None) for index in in_turn], **options)

    def train(self, epoch: int) -> Iterator[Pair]:
        self.order.epoch = epoch
        return self._on_device(self._train)

    def validation(self) -> Iterator[Pair]:
        return self._on_device(self._validation)

    def _on_device(self, loader: DataLoader) -> Iterator[Pair]:
        batch: Batch
        seen = 0
        for batch in loader:
            self.skipped |= dict(batch.skipped)
            if len(batch.labels):
                seen += len(batch.labels)
                labels = batch.labels.to(self.feed.device, non_blocking=self.pinned)
                images = batch.images.to(self.feed.device, non_blocking=self.pinned)
                yield (normalise(images, *self.constants()) if images.dtype == torch.uint8 else images), labels
        if not seen:
            raise PictureError(f"no photo of an epoch could be read; {len(self.skipped)} files are broken")


class HeldBatches:
    """All photos lie on the device, decoded; a batch is gathered, cut and normalised there. Nothing is copied to it.

    An epoch's order and boxes follow from the same chance as with a loader. They are copied once an epoch.
    """

    def __init__(
        self, fixes: Fixes, train: PhotoFiles, validation: PhotoFiles, feed: Feed, constants: Callable[[], Constants]
    ) -> None:
        self.feed, self.constants = feed, constants
        self.middle_first = "single_cut" not in fixes
        kept = [decode_photos(split, feed.kept_side) for split in (train, validation)]
        self.prepare_s = sum(split.seconds for split in kept)
        self.skipped = dict(fault for split in kept for fault in split.skipped)
        self.sizes = [split.sizes for split in kept]
        self.usable = [split.usable for split in kept]
        self.order = EpochOrder(len(train), feed.seed, kept[0].usable, feed.passes)
        self.batch_size = min(feed.batch_size, len(self.order))
        self.pixels = [split.pixels.to(feed.device) for split in kept]  # (N, s, s, 3) each
        self.labels = [torch.from_numpy(split.labels).to(feed.device) for split in (train, validation)]

    def train(self, epoch: int) -> Iterator[Pair]:
        self.order.epoch = epoch
        order, cuts = self.order.drawn()
        cuts = cuts[order]
        if self.middle_first:
            boxes = boxes_within(random_boxes(cuts, np.ones((len(order), 2))), middle_boxes(self.sizes[0][order]))
        else:
            boxes = random_boxes(cuts, self.sizes[0][order])
        whole = len(order) // self.batch_size * self.batch_size
        return self._batches(0, order[:whole], boxes, cuts[:, 4] > 0)

    def validation(self) -> Iterator[Pair]:
        order = self.usable[1]
        return self._batches(1, order, middle_boxes(self.sizes[1][order]), np.zeros(len(order), dtype=bool))

    def _batches(self, split: int, order: np.ndarray, boxes: np.ndarray, mirrored: np.ndarray) -> Iterator[Pair]:
        order, boxes, mirrored = (
            torch.from_numpy(part).to(self.feed.device) for part in (order, boxes.astype(np.float32), mirrored)
        )
        for start in range(0, len(order), self.batch_size):
            part = slice(start, start + self.batch_size)
            images = self.pixels[split][order[part]].permute(0, 3, 1, 2)  # (B, 3, s, s)
            images = cut_on_device(images, boxes[part], mirrored[part], self.feed.side)
            yield normalise(images, *self.constants()), self.labels[split][order[part]]


def class_weights(labels: np.ndarray, classes: int, device: torch.device) -> Tensor:
    """Weights of the loss, (classes,), that make up for rare classes: 1 on average over the photos.

    Counts all labels, and on a GPU the host waits for the copy.
    """
    counts = np.bincount(labels, minlength=classes)
    weights = len(labels) / (np.maximum(counts, 1) * max((counts > 0).sum(), 1))
    return torch.tensor(weights.tolist(), dtype=torch.float32, device=device)
