"""Which photo files there are, with their classes and splits: the clothing dataset's, or generated garments.

    train, validation = photo_files("clothing-dataset-small")     # or photo_files() for generated ones
    train.files[0], train.classes[train.labels[0]], train.source

A listed file may turn out to be no image; `read_photo` says so.
"""

import functools
import os
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps
from torch.utils.data import DataLoader
from tqdm import tqdm

from ..lab.arguments import check_at_least
from ..lab.files import building, cache_folder
from .drawing import draw_garment
from .shapes import GARMENTS

SPLITS = ("train", "validation")
SUFFIXES = {".jpg", ".jpeg", ".png"}
DRAWN = 1  # raise when garments are drawn differently: what lies in the cache is another folder then


class PictureError(ValueError):
    """Pictures that are not where or what they must be: one line that names the file and says what is expected."""


@dataclass(frozen=True)
class PhotoFiles:
    """The photos of a split; `source` says what they are."""

    files: list[Path]
    labels: np.ndarray  # (N,) int64, positions in `classes`
    classes: list[str]
    source: str

    def __len__(self) -> int:
        return len(self.files)

    def some(self, count: int) -> "PhotoFiles":
        """At most so many of them, of all classes; the same ones each time."""
        if count >= len(self):
            return self
        chosen = np.sort(np.random.default_rng(0).permutation(len(self))[:count])
        return replace(self, files=[self.files[at] for at in chosen], labels=self.labels[chosen])


def local_photos() -> Path | None:
    """The folder of photos that `$HELPERS_PHOTOS` names, for measurements; None if it isn't set."""
    folder = os.environ.get("HELPERS_PHOTOS")
    return Path(folder) if folder else None


def photo_files(
    path: str | Path | None = None,
    *,
    classes: int = 10,
    samples: int = 5120,
    validation_samples: int = 1024,
    size: tuple[int, int] = (400, 533),
    seed: int = 0,
) -> tuple[PhotoFiles, PhotoFiles]:
    """Training and validation photos: those in the folder `path`, or generated ones.

    A folder has `train/CLASS/*.jpg` and `validation/CLASS/*.jpg`, as the small clothing dataset.

    Generated photos, of up to 10 garments, are drawn once, into the cache. Drawing takes 40 ms of one core a photo, on
    all cores.
    """
    if path is None:
        return _generated(classes, (samples, validation_samples), size, seed)
    folder = Path(path)
    if not (folder / "train").is_dir() or not (folder / "validation").is_dir():
        raise PictureError(f"{folder}: no photos; expected train/CLASS/*.jpg and validation/CLASS/*.jpg")
    return _by_folder(folder, f"clothing photos, {folder.name}")


def read_photo(file: Path, least: int | None = None, mode: str = "RGB") -> Image.Image:
    """The image of PIL in a file, upright, in a mode of PIL's. Raises `PictureError` whatever is wrong with it.

    A JPEG is decoded at 1/2, 1/4 or 1/8 of its size where both sides stay `least` pixels long or longer: an eighth
    takes about an eighth of the time.
    """
    try:
        with Image.open(file) as image:
            if least is not None:
                image.draft(mode, (least, least))
            ImageOps.exif_transpose(image, in_place=True)
            return image.convert(mode)
    except Exception as error:  # a decoder that is given nonsense raises anything: struct.error, TypeError, …
        raise PictureError(f"{file}: not a readable image ({type(error).__name__}: {error})") from error


def _by_folder(folder: Path, source: str) -> tuple[PhotoFiles, PhotoFiles]:
    """`train/CLASS/*.jpg` and `validation/CLASS/*.jpg`. The classes are those of the training photos."""
    classes = sorted(entry.name for entry in (folder / "train").iterdir() if entry.is_dir())
    splits = []
    for split in SPLITS:
        files = [file for name in classes for file in sorted((folder / split / name).glob("*"))]
        files = [file for file in files if file.suffix.lower() in SUFFIXES]
        if not files:
            raise PictureError(f"{folder / split}: no photos; expected {split}/CLASS/*.jpg")
        labels = np.array([classes.index(file.parent.name) for file in files])
        splits.append(PhotoFiles(files, labels, classes, source))
    return splits[0], splits[1]


def _generated(
    classes: int, counts: tuple[int, int], size: tuple[int, int], seed: int
) -> tuple[PhotoFiles, PhotoFiles]:
    check_at_least(1, classes=classes, samples=counts[0], validation_samples=counts[1])
    names = list(GARMENTS)[:classes]
    shape = f"{size[0]}x{size[1]}"
    folder = cache_folder() / "photos" / f"garments-{DRAWN}-{classes}-{counts[0]}-{counts[1]}-{shape}-{seed}"
    if not folder.is_dir():
        _draw_all(folder, names, counts, size, seed)
    train, validation = _by_folder(folder, f"generated garments {size[0]}×{size[1]}, {classes} classes, seed {seed}")
    if (len(train), len(validation)) != tuple(counts) or train.classes != sorted(names):
        raise PictureError(f"{folder}: not the {sum(counts)} photos that were drawn; delete the folder to draw them")
    return train, validation


def _draw_all(folder: Path, names: list[str], counts: tuple[int, int], size: tuple[int, int], seed: int) -> None:
    """Draw every photo; classes take turns. The folder has all photos, or isn't there."""
    try:
        with building(folder) as part:
            for split in SPLITS:
                for name in names:
                    (part / split / name).mkdir(parents=True)
            photos = [(split, at) for split, count in enumerate(counts) for at in range(count)]
            draw = functools.partial(_draw, part, names, size, seed)
            workers = cores() if len(photos) >= 256 else 0
            drawn = DataLoader(photos, batch_size=None, collate_fn=draw, num_workers=workers)
            for _ in tqdm(drawn, desc="drawing photos", unit="photo", disable=None):
                pass
    except OSError as error:
        if folder.is_dir():  # another process was faster, with the same photos
            return
        reason = error.strerror or str(error).strip().splitlines()[-1]  # a worker's error brings its traceback along
        raise PictureError(
            f"{folder}: cannot be written ({reason}); make room, or set HELPERS_CACHE to a folder"
        ) from error


def _draw(folder: Path, names: list[str], size: tuple[int, int], seed: int, photo: tuple[int, int]) -> None:
    """Draw and save a photo, which follows from seed, split and number alone."""
    split, at = photo
    name = names[at % len(names)]
    image = draw_garment(np.random.default_rng([seed, split, at]), name, size)
    image.save(folder / SPLITS[split] / name / f"{at:06d}.jpg", quality=85)


def cores() -> int:
    """How many cores this process may use; 32 at most, for beyond that they wait for the disk."""
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return min(len(usable), 32)
