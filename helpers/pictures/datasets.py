"""Pictures as a model's input: photos of clothes with labels, cars with masks.

    train, validation = segmentation()       # Carvana from the user's folder, or drawn cars
    image, mask = train[0]                   # (3, H, W) normalised and (1, H, W) of 0 and 1, both float32

A broken photo raises a `PictureError` that names its file.
"""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from . import transforms
from .clothing import SPLITS, PhotoFiles, PictureError, cores, read_photo
from .drawing import draw_car
from .transforms import cut_image, draw_cuts, middle_boxes, normalise, random_boxes, to_tensor


@dataclass(frozen=True)
class DecodedPhotos:
    """Every photo of a split, decoded and squeezed to a square: 3·side² bytes each, 1.0 GiB for 5,461 of 256×256.

    Boxes are shares of a photo's sides, so that cutting one from the square and making that a square again undoes the
    squeeze. What is lost is detail beyond `side` pixels.
    """

    pixels: Tensor  # (N, side, side, 3) uint8
    sizes: np.ndarray  # (N, 2) width and height of the photo, for its shape
    seconds: float


def decode_photos(files: PhotoFiles, side: int) -> DecodedPhotos:
    """Decode a split once, with a thread a core: PIL lets go of Python's lock while it decodes."""
    began = time.perf_counter()
    pixels = torch.empty(len(files), side, side, 3, dtype=torch.uint8)
    sizes = np.ones((len(files), 2))

    def decode(index: int) -> None:
        image = read_photo(files.files[index], least=side)
        sizes[index] = image.size
        pixels[index] = torch.from_numpy(np.array(image.resize((side, side), 2)))

    with ThreadPoolExecutor(cores()) as pool:
        list(pool.map(decode, range(len(files))))  # what one raises is raised here
    return DecodedPhotos(pixels, sizes, time.perf_counter() - began)


class Photos(Dataset):
    """Item (i, cut) is photo i, cut as the row of chance `cut` says or, if that is None, in its middle; and its label.

    From `decoded` if given, else from the file, which is decoded at its full size. `middle_first` cuts the middle out
    before the random part of it, which resamples twice and sees less of the photo. `as_float` normalises here.
    """

    def __init__(
        self,
        files: PhotoFiles,
        side: int,
        *,
        decoded: DecodedPhotos | None = None,
        middle_first: bool = False,
        as_float: bool = False,
    ) -> None:
        self.files, self.side, self.decoded = files, side, decoded
        self.middle_first, self.as_float = middle_first, as_float
        self.constants = transforms.channel_constants()

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, key: tuple[int, np.ndarray | None]) -> tuple[Tensor, int]:
        index, cut = key
        image, size = self._photo(index)
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
        if self.decoded is None:
            image = read_photo(self.files.files[index])
            return image, np.array(image.size)
        return Image.fromarray(self.decoded.pixels[index].numpy()), self.decoded.sizes[index]

    def _middle(self, image, size: np.ndarray):
        """The whole photo made smaller, then its middle: side×side."""
        shorter = round(self.side / transforms.MIDDLE)
        width, height = (round(shorter * length / size.min()) for length in size)
        left, top = (width - self.side) // 2, (height - self.side) // 2
        small = image.resize((width, height), 2)  # bilinear
        return small.crop((left, top, left + self.side, top + self.side))


class EpochOrder(Sampler):
    """Photos of an epoch in random order, each with its chance: both follow from the seed and `epoch` alone.

    An epoch is `passes` such orders, one after another.
    """

    def __init__(self, count: int, seed: int, passes: int = 1) -> None:
        self.count, self.seed, self.epoch, self.passes = count, seed, 0, passes

    def __len__(self) -> int:
        return self.passes * self.count

    def drawn(self) -> tuple[np.ndarray, np.ndarray]:
        """The order (n,), and the chance of every photo (count, 5), by photo."""
        rng = np.random.default_rng([self.seed, self.epoch, 1])
        order = np.concatenate([rng.permutation(self.count) for _ in range(self.passes)])
        return order, draw_cuts(self.count, self.seed, self.epoch)

    def __iter__(self) -> Iterator[tuple[int, np.ndarray]]:
        order, cuts = self.drawn()
        return ((int(index), cuts[index]) for index in order)


# Cars with masks

CAR_MEAN, CAR_STD = 0.5, 0.25  # of every channel: (value in 0 … 1 − mean) / deviation
CARVANA_AT = "https://www.kaggle.com/c/carvana-image-masking-challenge/data"
HELD_OUT = 8  # one car of Carvana in so many is for validation


def segmentation(
    path: str | Path | None = None, size: int = 256, samples: int = 4096, validation_samples: int = 512, seed: int = 0
) -> tuple["Carvana | DrawnCars", "Carvana | DrawnCars"]:
    """Training and validation data: Carvana if `path` is given, drawn cars otherwise. `.source` says which."""
    if path is not None:
        return Carvana(path, size, "train"), Carvana(path, size, "validation")
    return DrawnCars(samples, size, seed, "train"), DrawnCars(validation_samples, size, seed, "validation")


def preload(dataset: Dataset, device: torch.device | str = "cpu", workers: int = 0) -> tuple[Tensor, Tensor]:
    """All images (N, 3, H, W) and masks (N, 1, H, W) on the device: 16 bytes per pixel, 1 MiB per 256×256 picture.

    Workers send arrays, which go through a pipe: shared memory is small in many containers.
    """
    whole = [torch.empty(len(dataset), *part.shape, device=device) for part in dataset[0]]
    at = 0
    for batch in DataLoader(dataset, batch_size=32, num_workers=workers, collate_fn=_as_arrays):
        for all_of, part in zip(whole, batch, strict=True):
            all_of[at : at + len(part)] = torch.from_numpy(part).to(device)
        at += len(batch[0])
    return tuple(whole)


def _as_arrays(pictures: list[tuple[Tensor, Tensor]]) -> list[np.ndarray]:
    return [torch.stack(parts).numpy() for parts in zip(*pictures, strict=True)]


class Carvana(Dataset):
    """The Kaggle data set as it is unpacked: `train/ID_NN.jpg` and `train_masks/ID_NN_mask.gif`.

    Resized to size×size as the task does. A car was photographed 16 times; all its photos are in one split, one car
    in eight in validation. Reading one costs 10 to 20 ms of one core: `preload` with workers.
    """

    source = "Carvana"

    def __init__(self, folder: str | Path, size: int = 256, split: str = "train") -> None:
        folder = Path(folder)
        if not (folder / "train").is_dir() or not (folder / "train_masks").is_dir():
            missing = "no folders 'train' and 'train_masks' in it, as Carvana has them"
            raise PictureError(f"{folder}: {missing}: unpack train.zip and train_masks.zip there, from {CARVANA_AT}")
        photos = sorted((folder / "train").glob("*.jpg"))
        cars = sorted({_car(photo) for photo in photos})
        held_out = set(cars[HELD_OUT - 1 :: HELD_OUT] or cars[-1:])
        self.size, self.split = size, split
        self.photos = [photo for photo in photos if (_car(photo) in held_out) == (split == "validation")]
        if not self.photos:
            reason = f"{len(photos)} photos (*.jpg) of {len(cars)} cars, none for {split}"
            raise PictureError(f"{folder / 'train'}: {reason}")
        self.masks = [folder / "train_masks" / f"{photo.stem}_mask.gif" for photo in self.photos]

    def __len__(self) -> int:
        return len(self.photos)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        side = (self.size, self.size)
        photo = read_photo(self.photos[index], least=self.size).resize(side, Image.Resampling.BILINEAR)
        mask = read_photo(self.masks[index], mode="L").resize(side, Image.Resampling.NEAREST)
        return _car_input(np.asarray(photo)), torch.from_numpy(np.asarray(mask)[None] > 127).float()


class DrawnCars(Dataset):
    """Drawn cars in front of clutter, each from its seed, split and index alone: nothing is stored or downloaded.

    Side, oblique and front views; paint that may have the colours behind it; a soft shadow, and boxes and discs that
    belong to no car. About a fifth of the pixels is car. One 256×256 picture costs about 10 ms of one core.
    """

    source = "generated silhouettes"

    def __init__(self, samples: int = 4096, size: int = 256, seed: int = 0, split: str = "train") -> None:
        self.samples, self.size, self.seed, self.split = samples, size, seed, split

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        rng = np.random.default_rng([self.seed, SPLITS.index(self.split), range(self.samples)[index]])
        image, mask = draw_car(rng, self.size)
        return _car_input(image), torch.from_numpy(mask[None].astype(np.float32))


def _car(photo: Path) -> str:
    return photo.stem.rpartition("_")[0] or photo.stem


def _car_input(image: np.ndarray) -> Tensor:
    """Bytes (H, W, 3) as a normalised (3, H, W)."""
    return (to_tensor(image).float() / 255 - CAR_MEAN) / CAR_STD
