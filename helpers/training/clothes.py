"""Classification of clothes by a Vision Transformer. Photos are loaded by a `DataLoader` or kept on the device.

Images are normalised fp32 (B, 3, S, S), labels (B,). Training batches have one size; the last incomplete batch of an
epoch is dropped.
"""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from ..metrics import StreamingMetrics
from ..models import ViT
from ..pictures import Photos, decode_photos, photo_files
from ..pictures.clothing import PhotoFiles
from ..pictures.datasets import EpochOrder
from ..pictures.transforms import boxes_within, channel_constants, cut_on_device, middle_boxes, normalise, random_boxes
from .sizes import sizes_of
from .slow_parts import CollectedMetrics, with_slow_vit_parts
from .switches import NO_FAULTS, Faults
from .task import Batch, Task

SWITCHED_SIZES = sizes_of("clothes")

Feed = tuple[Callable[[int], Iterator[Batch]], Callable[[], Iterator[Batch]]]  # batches of an epoch; of validation


def switched_clothes_task(
    sizes: dict[str, Any], path: str | Path | None, device: torch.device, seed: int, dtype: torch.dtype, faults: Faults
) -> Task:
    """The ViT and its photos, with the `faults` of `switches.CLOTHES`.

    `path` is the folder of the clothing dataset, of which as many photos are taken; without it they are generated.
    Unless they are decoded again in each epoch, all photos are decoded here.
    """
    counts = {name: sizes[name] for name in ("classes", "samples", "validation_samples")}
    train, validation_photos = photo_files(path, **counts, size=sizes["photo_size"], seed=seed)
    splits = train.some(sizes["samples"]), validation_photos.some(sizes["validation_samples"])
    photos = PhotoBatches(sizes, splits, device, seed, faults)
    batches, validation = photos.loaded() if faults.photos_copied else photos.preloaded()
    classes, metric = len(splits[0].classes), CollectedMetrics if faults.metrics_collected else StreamingMetrics
    return Task(
        source=splits[0].source,
        model=build_vit(sizes, classes, seed, faults).to(device),
        loss=lambda logits, batch: F.cross_entropy(logits.float(), batch.targets, batch.weights),
        metric=metric(classes),
        validation_metric=metric(classes),
        batches=batches,
        steps=lambda epoch: len(photos.order) // photos.batch_size,
        validation=validation,
        learning_rate=sizes["learning_rate"],
        weight_decay=0.05,
        prepare_s=sum(split.seconds for split in photos.decoded),
    )


def build_vit(sizes: dict[str, Any], classes: int, seed: int, faults: Faults = NO_FAULTS) -> ViT:
    """The ViT of these sizes; its weights follow from the seed."""
    torch.manual_seed(seed)
    width = sizes["width"][not faults.odd_width]
    return with_slow_vit_parts(ViT(classes, width=width, dropout=sizes["dropout"], **sizes["model"]), faults)


class PhotoBatches:
    """Batches of training photos by epoch, and of validation photos: from a loader, or from photos on the device."""

    def __init__(
        self,
        sizes: dict[str, Any],
        splits: tuple[PhotoFiles, PhotoFiles],
        device: torch.device,
        seed: int,
        faults: Faults,
    ) -> None:
        self.sizes, self.splits, self.device, self.faults = sizes, splits, device, faults
        self.side = sizes["model"]["image_size"]
        # Called for each batch: mean and deviation of the channels, and the classes' weights.
        self.constants = functools.partial(channel_constants, device)
        self.weights = functools.partial(class_weights, splits[0].labels, len(splits[0].classes), device)
        if not faults.constants_recomputed:
            self.constants, self.weights = functools.cache(self.constants), functools.cache(self.weights)
        again = faults.photos_decoded_again and faults.photos_copied
        self.decoded = [] if again else [decode_photos(split, sizes["decoded_side"]) for split in splits]
        self.order = EpochOrder(len(splits[0]), seed, sizes["passes"])
        self.batch_size = min(sizes["batch_size"], len(self.order))

    def loaded(self) -> Feed:
        """Photos are cropped on the CPU, by this process or by workers, and copied to the device batch by batch."""
        faults, workers = self.faults, 0 if self.faults.no_workers else self.sizes["workers"]
        pinned = not faults.pageable_batches and self.device.type == "cuda"
        options = {
            "batch_size": self.batch_size,
            "num_workers": workers,
            "pin_memory": pinned,
            "persistent_workers": workers > 0,
            "prefetch_factor": 2 if workers else None,
            "generator": torch.Generator(),  # else each epoch would advance the generator that dropout uses
        }
        cut = {"middle_first": faults.photos_cut_twice, "as_float": faults.photos_as_floats}
        trained, validated = (
            Photos(files, self.side, decoded=decoded, **cut)
            for files, decoded in zip(self.splits, self.decoded or (None, None), strict=True)
        )
        train_loader = DataLoader(trained, sampler=self.order, drop_last=True, **options)
        validation_loader = DataLoader(validated, sampler=[(index, None) for index in range(len(validated))], **options)

        def on_device(loader: DataLoader) -> Iterator[Batch]:
            for images, labels in loader:
                labels = labels.to(self.device, non_blocking=pinned)
                images = images.to(self.device, non_blocking=pinned)
                if images.dtype == torch.uint8:
                    images = normalise(images, *self.constants())
                yield Batch(images, labels, real=len(labels), weights=self.weights())

        def train(epoch: int) -> Iterator[Batch]:
            self.order.epoch = epoch
            return on_device(train_loader)

        return train, lambda: on_device(validation_loader)

    def preloaded(self) -> Feed:
        """All decoded photos are on the device; a batch is gathered, cropped and normalised there, without a copy.

        An epoch's order and crops are drawn as with a loader, and copied once an epoch.
        """
        pixels = [split.pixels.to(self.device) for split in self.decoded]  # (N, s, s, 3) each
        targets = [torch.from_numpy(split.labels).to(self.device) for split in self.splits]

        def batches(split: int, order: np.ndarray, boxes: np.ndarray, mirrored: np.ndarray) -> Iterator[Batch]:
            order, boxes, mirrored = (
                torch.from_numpy(part).to(self.device) for part in (order, boxes.astype(np.float32), mirrored)
            )
            for start in range(0, len(order), self.batch_size):
                part = slice(start, start + self.batch_size)
                images = pixels[split][order[part]].permute(0, 3, 1, 2)  # (B, 3, s, s)
                images = cut_on_device(images, boxes[part], mirrored[part], self.side)
                labels = targets[split][order[part]]
                images = normalise(images, *self.constants())
                yield Batch(images, labels, real=len(labels), weights=self.weights())

        def train(epoch: int) -> Iterator[Batch]:
            self.order.epoch = epoch
            order, cuts = self.order.drawn()
            shapes, cuts = self.decoded[0].sizes[order], cuts[order]
            if self.faults.photos_cut_twice:
                boxes = boxes_within(random_boxes(cuts, np.ones((len(order), 2))), middle_boxes(shapes))
            else:
                boxes = random_boxes(cuts, shapes)
            complete = len(order) // self.batch_size * self.batch_size
            return batches(0, order[:complete], boxes, cuts[:, 4] > 0)

        def validation() -> Iterator[Batch]:
            shapes = self.decoded[1].sizes
            return batches(1, np.arange(len(shapes)), middle_boxes(shapes), np.zeros(len(shapes), dtype=bool))

        return train, validation


def class_weights(labels: np.ndarray, classes: int, device: torch.device) -> Tensor:
    """Weights of the loss, (classes,), inverse to each class's frequency: 1 on average over the photos.

    Counts all labels; on a GPU the host waits for the copy.
    """
    counts = np.bincount(labels, minlength=classes)
    weights = len(labels) / (np.maximum(counts, 1) * max((counts > 0).sum(), 1))
    return torch.tensor(weights.tolist(), dtype=torch.float32, device=device)
