"""Which photo files there are, with their classes and splits: the clothing dataset's, or generated garments.

    train, validation = photo_files("clothing-dataset-small")     # or photo_files() for generated ones
    train.files[0], train.classes[train.labels[0]], train.source

A listed file may turn out to be no image; `read_photo` says so.
"""

import csv
import os
import shutil
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from helpers.lab.arguments import check_at_least
from helpers.lab.files import cache_folder

from .drawing import draw_garment
from .shapes import GARMENTS

SPLITS = ("train", "validation")
SUFFIXES = {".jpg", ".jpeg", ".png"}
COLUMNS = ("image", "sender_id", "label", "kids")
UNSURE = ("Not sure", "Other", "Skip")  # labels of the full dataset that name no garment
HELD_OUT = 10  # one photo of the full dataset in so many is for validation
DRAWN = 1  # raise when garments are drawn differently: what lies in the cache is another folder then


class PictureError(ValueError):
    """Pictures that are not where or what they must be: one line that names the file and says what is expected."""


@dataclass(frozen=True)
class PhotoFiles:
    """The photos of a split; `source` says what they are, and which labels of the folder are left out."""

    files: list[Path]
    labels: np.ndarray  # (N,) int64, positions in `classes`
    classes: list[str]
    source: str

    def __len__(self) -> int:
        return len(self.files)


def photo_files(
    path: str | Path | None = None,
    *,
    classes: int = 10,
    samples: int = 5120,
    validation_samples: int = 1024,
    size: tuple[int, int] = (400, 533),
    seed: int = 0,
    cache: str | Path | None = None,
) -> tuple[PhotoFiles, PhotoFiles]:
    """Training and validation photos: the clothing dataset if `path` is given, generated ones otherwise.

    The full dataset (`images.csv`, `images_original/`) has 17 garments; photos labelled "Not sure", "Other" or "Skip"
    are left out. Which of its photos are for validation follows from their names alone. The small one comes split
    (`train/CLASS/`, `validation/CLASS/`); its `test/` is not touched.

    Generated photos, of up to 10 garments, are drawn once, into the cache. Drawing takes 40 ms of one core a photo, on
    all cores.
    """
    if path is None:
        return _generated(classes, (samples, validation_samples), size, seed, cache_folder(cache))
    folder = Path(path)
    if (folder / "images.csv").is_file():
        return _full_dataset(folder)
    if (folder / "train").is_dir() and (folder / "validation").is_dir():
        return _by_folder(folder, f"clothing photos, {folder.name}")
    expected = "images.csv and images_original/, or train/ and validation/ by class"
    raise PictureError(f"{folder}: no clothing dataset; expected {expected}")


def read_photo(file: Path, least: int | None = None) -> Image.Image:
    """The RGB image of PIL in a file, upright. Raises `PictureError` whatever is wrong with it.

    A JPEG is decoded at 1/2, 1/4 or 1/8 of its size where both sides stay `least` pixels long or longer: an eighth
    takes about an eighth of the time.
    """
    return open_image(file, "RGB", least)[0]


def open_image(file: Path, mode: str, least: int | None = None) -> tuple[Image.Image, tuple[int, int]]:
    """An image as `read_photo` reads it, in a mode of PIL's, and how large it is in the file."""
    try:
        with Image.open(file) as image:
            whole = image.size
            if least is not None:
                image.draft(mode, (least, least))
            ImageOps.exif_transpose(image, in_place=True)
            return image.convert(mode), whole
    except Exception as error:  # a decoder that is given nonsense raises anything: struct.error, TypeError, …
        raise PictureError(f"{file}: not a readable image ({type(error).__name__}: {error})") from error


def _full_dataset(folder: Path) -> tuple[PhotoFiles, PhotoFiles]:
    rows = _read_table(folder / "images.csv")
    photos = folder / "images_original"
    if not photos.is_dir():
        raise PictureError(f"{photos}: no such folder; the photos of images.csv are expected in it")
    classes = sorted({label for _, label in rows}.difference(UNSURE))
    chosen = [(photos / f"{name}.jpg", classes.index(label)) for name, label in rows if label not in UNSURE]
    source = f"clothing dataset, {len(classes)} classes, without {', '.join(UNSURE)}"
    splits = []
    for split in SPLITS:
        part = [row for row in chosen if _held_out(row[0]) == (split == "validation")]
        if not part:
            raise PictureError(f"{folder / 'images.csv'}: {len(chosen)} photos of garments, none of them for {split}")
        files, labels = zip(*part, strict=True)
        splits.append(PhotoFiles(list(files), np.array(labels), classes, source))
    return splits[0], splits[1]


def _read_table(table: Path) -> list[tuple[str, str]]:
    """Name and label of each photo."""
    try:
        with open(table, newline="", encoding="utf-8-sig") as stream:
            reader = csv.DictReader(stream)
            missing = [name for name in COLUMNS if name not in (reader.fieldnames or [])]
            if missing:
                raise PictureError(f"{table}: no column {missing[0]!r}; expected {', '.join(COLUMNS)}")
            rows = [(row["image"], row["label"]) for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise PictureError(f"{table}: cannot be read ({error})") from error
    for at, (name, label) in enumerate(rows, start=2):
        if not name or not label or Path(name).name != name:
            raise PictureError(f"{table}, line {at}: image {name!r}, label {label!r}; both must be plain names")
    return rows


def _held_out(photo: Path) -> bool:
    return zlib.crc32(photo.stem.encode()) % HELD_OUT == 0


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
        others = sorted({entry.name for entry in (folder / split).iterdir() if entry.is_dir()}.difference(classes))
        without = f", without {', '.join(others)}" if others else ""
        splits.append(PhotoFiles(files, labels, classes, source + without))
    return splits[0], splits[1]


def _generated(
    classes: int, counts: tuple[int, int], size: tuple[int, int], seed: int, cache: Path
) -> tuple[PhotoFiles, PhotoFiles]:
    if isinstance(classes, bool) or classes not in range(1, len(GARMENTS) + 1):
        raise PictureError(f"classes is {classes!r}; allowed for generated photos: 1 to {len(GARMENTS)}")
    names = list(GARMENTS)[:classes]
    check_at_least(1, samples=counts[0], validation_samples=counts[1])
    check_at_least(0, seed=seed)
    if len(size) != 2 or min(size) < 32:
        raise PictureError(f"size is {size!r}; it must be width and height, each 32 pixels or more")
    shape = f"{size[0]}x{size[1]}"
    folder = cache / "photos" / f"garments-{DRAWN}-{classes}-{counts[0]}-{counts[1]}-{shape}-{seed}"
    if not folder.is_dir():
        _draw_all(folder, names, counts, size, seed)
    train, validation = _by_folder(folder, f"generated garments {size[0]}×{size[1]}, {classes} classes, seed {seed}")
    if (len(train), len(validation)) != tuple(counts) or train.classes != sorted(names):
        raise PictureError(f"{folder}: not the {sum(counts)} photos that were drawn; delete the folder to draw them")
    return train, validation


def _draw_all(folder: Path, names: list[str], counts: tuple[int, int], size: tuple[int, int], seed: int) -> None:
    """Draw every photo into a folder beside, which takes the name when all are there: whole, or not at all."""
    beside = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    try:
        for split in SPLITS:
            for name in names:
                (beside / split / name).mkdir(parents=True)
        drawings = _Drawings(beside, names, counts, size, seed)
        workers = cores() if len(drawings) >= 256 else 0
        done = DataLoader(drawings, batch_size=None, num_workers=workers)
        for _ in tqdm(done, desc="drawing photos", unit="photo", disable=None):
            pass
        try:
            os.rename(beside, folder)
        except OSError:
            if not folder.is_dir():  # else another process was faster, with the same photos
                raise
    except OSError as error:
        reason = error.strerror or str(error).strip().splitlines()[-1]  # a worker's error brings its traceback along
        raise PictureError(f"{folder}: cannot be written ({reason}); make room, or choose another cache") from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def cores() -> int:
    """How many cores this process may use; 32 at most, for beyond that they wait for the disk."""
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return min(len(usable), 32)


class _Drawings(Dataset):
    """Item i is drawn and saved, from seed, split and i alone. Classes take turns."""

    def __init__(
        self, folder: Path, names: list[str], counts: tuple[int, int], size: tuple[int, int], seed: int
    ) -> None:
        self.folder, self.names, self.counts, self.size, self.seed = folder, names, counts, size, seed

    def __len__(self) -> int:
        return sum(self.counts)

    def __getitem__(self, index: int) -> int:
        split = int(index >= self.counts[0])
        at = index - split * self.counts[0]
        name = self.names[at % len(self.names)]
        rng = np.random.default_rng([self.seed, split, at])
        image = draw_garment(rng, name, self.size)
        image.save(self.folder / SPLITS[split] / name / f"{at:06d}.jpg", quality=85)
        return index
