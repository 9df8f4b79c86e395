"""Photos as a model's input: decoded, cut, and what to do when a file is no image.

A broken file is left out of its batch and named: `collate` puts its name into `Batch.skipped`, which crosses from a
worker to the main process with the rest of the batch. So an epoch goes on, and the loop knows what it did not see.
"""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler, default_collate

from helpers.lab.arguments import check_positive

from .photo_files import PhotoError, PhotoFiles, cores
from .transforms import (
    KEPT,
    channel_constants,
    cut_image,
    draw_cuts,
    middle_boxes,
    normalise,
    random_boxes,
    to_tensor,
)


class Batch(NamedTuple):
    """`images` is (B, 3, side, side), uint8 or normalised fp32; `skipped` has file and fault of what is left out."""

    images: Tensor
    labels: Tensor
    skipped: list[tuple[str, str]]


class Broken(NamedTuple):
    """What a data set gives instead of a photo that cannot be read."""

    file: str
    fault: str


def read_photo(file: Path, least: int | None = None):
    """The RGB image of PIL in a file, upright. Raises `PhotoError` whatever is wrong with it.

    A JPEG is decoded at 1/2, 1/4 or 1/8 of its size where both sides stay `least` pixels long or longer: an eighth
    takes about an eighth of the time.
    """
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise PhotoError(f"{file}: reading it needs Pillow (pip install pillow)") from None
    try:
        with Image.open(file) as image:
            if least is not None:
                image.draft("RGB", (least, least))
            ImageOps.exif_transpose(image, in_place=True)
            return image.convert("RGB")
    except OSError as error:
        raise PhotoError(f"{file}: not a readable image ({error.strerror or 'broken, or of no known kind'})") from error
    except Exception as error:  # a decoder that is given nonsense raises anything: struct.error, TypeError, …
        raise PhotoError(f"{file}: not a readable image ({type(error).__name__}: {error})") from error


@dataclass(frozen=True)
class KeptPhotos:
    """Every photo of a split, decoded and squeezed to a square: 3·side² bytes each, 1.0 GiB for 5,461 of 256×256.

    Boxes are shares of a photo's sides, so that cutting one from the square and making that a square again undoes the
    squeeze. What is lost is detail beyond `side` pixels.
    """

    pixels: Tensor  # (N, side, side, 3) uint8
    sizes: np.ndarray  # (N, 2) width and height of the photo, for its shape
    usable: np.ndarray  # (n,) int64, the photos that could be read
    skipped: list[tuple[str, str]]
    seconds: float


def keep_photos(files: PhotoFiles, side: int) -> KeptPhotos:
    """Decode a split once, with a thread a core: PIL lets go of Python's lock while it decodes."""
    began = time.perf_counter()
    pixels = torch.empty(len(files), side, side, 3, dtype=torch.uint8)
    sizes = np.ones((len(files), 2))

    def keep(index: int) -> Broken | None:
        try:
            image = read_photo(files.files[index], least=side)
        except PhotoError as error:
            return Broken(str(files.files[index]), str(error))
        sizes[index] = image.size
        pixels[index] = torch.from_numpy(np.array(image.resize((side, side), 2)))
        return None

    with ThreadPoolExecutor(cores()) as pool:
        faults = list(pool.map(keep, range(len(files))))
    usable = np.array([index for index, fault in enumerate(faults) if fault is None], dtype=np.int64)
    skipped = [tuple(fault) for fault in faults if fault is not None]
    if not len(usable):
        raise PhotoError(f"none of {len(files)} photos could be read; the first: {skipped[0][1]}")
    return KeptPhotos(pixels, sizes, usable, skipped, time.perf_counter() - began)


class Photos(Dataset):
    """Item (i, cut) is photo i, cut as the row of chance `cut` says or, if that is None, in its middle; and its label.

    From `kept` if given, else from the file, which is decoded at its full size. `middle_first` cuts the middle out
    before the random part of it, which resamples twice and sees less of the photo. `as_float` normalises here.
    """

    def __init__(
        self,
        files: PhotoFiles,
        side: int,
        *,
        kept: KeptPhotos | None = None,
        middle_first: bool = False,
        as_float: bool = False,
    ) -> None:
        if isinstance(side, bool) or not isinstance(side, int) or side < 1:
            raise PhotoError(f"side is {side!r}; it must be an integer of at least 1")
        self.files, self.side, self.kept = files, side, kept
        self.middle_first, self.as_float = middle_first, as_float
        self.constants = channel_constants()

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, key: tuple[int, np.ndarray | None]) -> tuple[Tensor, int] | Broken:
        index, cut = key
        try:
            image, size = self._photo(index)
        except PhotoError as error:
            return Broken(str(self.files.files[index]), str(error))
        if cut is None:
            image = cut_image(image, middle_boxes(size), self.side)
        else:
            if self.middle_first:
                image, size = self._middle(image, size), np.ones(2)
            image = cut_image(image, random_boxes(cut, size), self.side)
            if cut[4]:
                image = image.transpose(0)  # left to right
        pixels = to_tensor(image)  # (3, side, side) uint8
        return (normalise(pixels, *self.constants) if self.as_float else pixels), int(self.files.labels[index])

    def _photo(self, index: int):
        """The image, and the width and height that give its shape."""
        if self.kept is None:
            image = read_photo(self.files.files[index])
            return image, np.array(image.size)
        from PIL import Image

        return Image.fromarray(self.kept.pixels[index].numpy()), self.kept.sizes[index]

    def _middle(self, image, size: np.ndarray):
        """The whole photo made smaller, then its middle: side×side."""
        shorter = round(self.side / KEPT)
        width, height = (round(shorter * length / size.min()) for length in size)
        left, top = (width - self.side) // 2, (height - self.side) // 2
        small = image.resize((width, height), 2)  # bilinear
        return small.crop((left, top, left + self.side, top + self.side))


class EpochOrder(Sampler):
    """Photos of an epoch in random order, each with its chance: both follow from the seed and `epoch` alone.

    An epoch is `passes` such orders, one after another.
    """

    def __init__(self, count: int, seed: int, usable: np.ndarray | None = None, passes: int = 1) -> None:
        check_positive(passes=passes)
        self.count, self.seed, self.epoch, self.passes = count, seed, 0, passes
        self.usable = np.arange(count) if usable is None else usable

    def __len__(self) -> int:
        return self.passes * len(self.usable)

    def drawn(self) -> tuple[np.ndarray, np.ndarray]:
        """The order (n,), and the chance of every photo (count, 5), by photo."""
        rng = np.random.default_rng([self.seed, self.epoch, 1])
        order = np.concatenate([rng.permutation(self.usable) for _ in range(self.passes)])
        return order, draw_cuts(self.count, self.seed, self.epoch)

    def __iter__(self) -> Iterator[tuple[int, np.ndarray]]:
        order, cuts = self.drawn()
        return ((int(index), cuts[index]) for index in order)


def collate(items: list[tuple[Tensor, int] | Broken]) -> Batch:
    """The photos that could be read, and the names of the others. With none at all, a batch of length 0."""
    broken = [tuple(item) for item in items if isinstance(item, Broken)]
    good = [item for item in items if not isinstance(item, Broken)]
    if not good:
        return Batch(torch.empty(0, 3, 0, 0), torch.empty(0, dtype=torch.int64), broken)
    images, labels = default_collate(good)
    return Batch(images, labels, broken)
