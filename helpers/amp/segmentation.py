"""Pictures of cars with masks: Carvana from the user's folder, or generated silhouettes when there is none.

    train, validation = segmentation()
    image, mask = train[0]

An image is (3, H, W) and normalised, a mask is (1, H, W) of 0 and 1, both float32.
"""

from collections.abc import Sized
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from . import silhouettes

MEAN, STD = 0.5, 0.25  # of every channel: (value in 0 … 1 − MEAN) / STD
SPLITS = ("train", "validation")
HELD_OUT = 8  # one car in so many is for validation


class DataError(ValueError):
    """The pictures are not what they must be. The message names the file."""


def segmentation(
    path: str | Path | None = None,
    size: int = 256,
    samples: int = 4096,
    validation_samples: int = 512,
    seed: int = 0,
) -> tuple[Dataset, Dataset]:
    """Training and validation data: Carvana if `path` is given, silhouettes otherwise. `.source` says which."""
    if path is not None:
        return Carvana(path, size, "train"), Carvana(path, size, "validation")
    return Silhouettes(samples, size, seed, "train"), Silhouettes(validation_samples, size, seed, "validation")


def preload(dataset: Dataset, device: torch.device | str = "cpu", workers: int = 0) -> tuple[Tensor, Tensor]:
    """All images (N, 3, H, W) and masks (N, 1, H, W) on the device: 16 bytes per pixel, 1 MiB per 256×256 picture."""
    if not isinstance(dataset, Sized) or not len(dataset):
        raise DataError("there is nothing to load: the data set has no pictures")
    images = masks = None
    at = 0
    for image, mask in DataLoader(dataset, batch_size=32, num_workers=workers):
        if images is None or masks is None:
            images = torch.empty(len(dataset), *image.shape[1:], device=device)
            masks = torch.empty(len(dataset), *mask.shape[1:], device=device)
        images[at : at + len(image)] = image.to(device)
        masks[at : at + len(mask)] = mask.to(device)
        at += len(image)
    return images, masks


class Carvana(Dataset):
    """The Kaggle data set as it is unpacked: `train/ID_NN.jpg` and `train_masks/ID_NN_mask.gif`.

    Resized to size×size as the task does. A car was photographed 16 times; all its photos are in one split, one car
    in eight in validation. Reading one costs 10 to 20 ms of one core: `preload` with workers.
    """

    source = "Carvana"

    def __init__(self, folder: str | Path, size: int = 256, split: str = "train") -> None:
        _check(size=size, split=split)
        folder = Path(folder)
        if not (folder / "train").is_dir() or not (folder / "train_masks").is_dir():
            raise DataError(f"{folder}: no folders 'train' and 'train_masks' in it, as Carvana has them")
        photos = sorted((folder / "train").glob("*.jpg"))
        cars = sorted({_car(photo) for photo in photos})
        held_out = set(cars[HELD_OUT - 1 :: HELD_OUT] or cars[-1:])
        self.size, self.split = size, split
        self.photos = [photo for photo in photos if (_car(photo) in held_out) == (split == "validation")]
        if not self.photos:
            raise DataError(f"{folder / 'train'}: {len(photos)} photos (*.jpg) of {len(cars)} cars, none for {split}")
        self.masks = [folder / "train_masks" / f"{photo.stem}_mask.gif" for photo in self.photos]
        for photo, mask in zip(self.photos, self.masks, strict=True):
            if not mask.is_file():
                raise DataError(f"{photo}: its mask {mask} is missing")

    def __len__(self) -> int:
        return len(self.photos)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        photo, whole = _read(self.photos[index], "RGB", self.size)
        mask, masked = _read(self.masks[index], "L", self.size)
        if whole != masked:
            raise DataError(
                f"{self.masks[index]}: the mask is {masked[0]}×{masked[1]}, its photo {whole[0]}×{whole[1]}"
            )
        image = photo.transpose(2, 0, 1).astype(np.float32) / 255  # (3, H, W)
        return _normalised(image), torch.from_numpy(mask[None] > 127).float()


class Silhouettes(Dataset):
    """Generated cars in front of clutter, each from its seed, split and index alone: nothing is stored or downloaded.

    Side, oblique and front views with ragged outlines; paint and glass that may have the colours behind them; a
    soft shadow, reflections, and boxes, posts and wheels that belong to no car. About a fifth of the pixels is car.
    One 256×256 picture costs about 4 ms of one core.
    """

    source = "generated silhouettes"

    def __init__(self, samples: int = 4096, size: int = 256, seed: int = 0, split: str = "train") -> None:
        _check(samples=samples, size=size, split=split)
        if size < 16:
            raise ValueError(f"size is {size}; a car needs at least 16 pixels")
        if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
            raise ValueError(f"seed is {seed!r}; it must be an integer of at least 0")
        self.samples, self.size, self.seed, self.split = samples, size, seed, split

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not -self.samples <= index < self.samples:
            raise IndexError(f"picture {index} of {self.samples}")
        rng = np.random.default_rng([self.seed, SPLITS.index(self.split), index % self.samples])
        image, mask = silhouettes.draw(rng, self.size)
        return _normalised(image), torch.from_numpy(mask[None].astype(np.float32))


def _check(split: str, **counts: int) -> None:
    if split not in SPLITS:
        raise ValueError(f"split is {split!r}; allowed: {', '.join(SPLITS)}")
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"{name} is {count!r}; it must be an integer of at least 1")


def _car(photo: Path) -> str:
    return photo.stem.rpartition("_")[0] or photo.stem


def _read(path: Path, mode: str, size: int) -> tuple[np.ndarray, tuple[int, int]]:
    """Pixels (size, size[, 3]) of an image file, and how large it was. A JPEG is decoded no finer than needed."""
    try:
        from PIL import Image
    except ImportError:
        raise DataError(f"{path}: reading it needs Pillow (pip install pillow)") from None
    try:
        with Image.open(path) as image:
            whole = image.size
            image.draft(mode, (size, size))
            way = Image.Resampling.BILINEAR if mode == "RGB" else Image.Resampling.NEAREST
            return np.asarray(image.convert(mode).resize((size, size), way)), whole
    except (OSError, SyntaxError, ValueError, EOFError) as error:
        raise DataError(f"{path}: not a readable image ({error})") from error


def _normalised(image: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray((image - np.float32(MEAN)) / np.float32(STD)))
