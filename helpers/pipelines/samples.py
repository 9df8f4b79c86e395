"""What this chapter reads: JPEGs and token arrays, as samples of a key, a label and a 1-D array; and JPEGs alone."""

import functools
import io
import itertools
from pathlib import Path
from typing import Any

import numpy as np

from helpers.lab.arguments import check_positive
from helpers.text import SyntheticText, corpus

from .formats import Sample

DRAWINGS = 64  # distinct drawings, of which every sample is another cut
ROOM = 1.25  # a drawing is so much larger than what is cut from it
QUALITIES = range(70, 95)


def image_samples(
    count: int | None = None,
    seed: int = 0,
    size: tuple[int, int] = (160, 213),
    folder: str | Path | None = None,
) -> list[Sample]:
    """`count` JPEGs of width × height: cuts of drawn garments; or the training photos of a clothing dataset's folder.

    Of drawn ones 64 are distinct drawings; a sample is a cut of one at a place, and with a quality, of its own, with
    its number in the file's comment, so that no two are alike. At 160×213, of about 7 kB each, that costs 1 s and about
    2 ms a sample. Photos are taken as they are, the first `count` after a shuffle by `seed`; all, if no count is given.
    """
    if folder is not None:
        return _photos(Path(folder), count, seed)
    count = 1000 if count is None else count
    check_positive(count=count)
    if min(size) < 16:
        raise ValueError(f"size is {size}; width and height must be 16 or more")
    drawings = _drawings(min(DRAWINGS, count), seed, tuple(int(side * ROOM) for side in size))
    return [_cut(drawings, position, seed, size) for position in range(count)]


def token_samples(count: int, seed: int = 0, path: str | Path | None = None, split: str = "train") -> list[Sample]:
    """`count` samples of WikiText in a folder, or of synthetic text with its lengths: int32, 85 tokens on average.

    A sample's label is its length class, the bits that its length needs: class c has lengths from 2**(c-1) to 2**c - 1.
    """
    if path is None:
        text = SyntheticText(count, seed)
    else:
        text = corpus(split, path, max_samples=count)
        if len(text) < count:
            raise ValueError(f"count is {count}; {path} has {len(text)} samples in its {split} split")
    return [Sample(f"text-{position:08d}", len(ids).bit_length(), ids) for position, ids in enumerate(text)]


def example_jpegs(count: int, size: tuple[int, int] = (400, 300), *, seed: int = 0, quality: int = 85) -> list[bytes]:
    """Generated pictures of garments of so many pixels, width and height; 60 ms each for the default size."""
    check_positive(count=count, width=size[0], height=size[1])
    files = []
    for _, picture in _drawings(count, seed, size):
        stream = io.BytesIO()
        picture.save(stream, "JPEG", quality=quality)
        files.append(stream.getvalue())
    return files


def _photos(folder: Path, count: int | None, seed: int) -> list[Sample]:
    from helpers.pictures import photo_files

    photos = photo_files(folder)[0]
    usable = [at for at, file in enumerate(photos.files) if file.suffix.lower() in (".jpg", ".jpeg")]
    if count is not None and not 1 <= count <= len(usable):
        raise ValueError(f"count is {count}; allowed: 1 to {len(usable)}, the JPEGs for training in {folder}")
    chosen = np.random.default_rng(seed).permutation(usable)[:count]
    return [
        Sample(photos.files[at].stem, int(photos.labels[at]), np.fromfile(photos.files[at], np.uint8)) for at in chosen
    ]


@functools.lru_cache(maxsize=2)
def _drawings(count: int, seed: int, size: tuple[int, int]) -> list[tuple[str, Any]]:
    """So many pictures with the names of what they show, in turn."""
    from helpers.pictures import GARMENTS, draw_garment

    names = itertools.islice(itertools.cycle(GARMENTS), count)
    return [(name, draw_garment(np.random.default_rng([seed, at]), name, size)) for at, name in enumerate(names)]


def _cut(drawings: list[tuple[str, Any]], position: int, seed: int, size: tuple[int, int]) -> Sample:
    """Sample `position`: it follows from seed and position alone."""
    from helpers.pictures import GARMENTS

    (name, image), rng = drawings[position % len(drawings)], np.random.default_rng([seed, position, 1])
    left, top = (int(rng.integers(room + 1)) for room in (image.width - size[0], image.height - size[1]))
    stream = io.BytesIO()
    cut = image.crop((left, top, left + size[0], top + size[1]))
    cut.save(stream, "JPEG", quality=int(rng.choice(QUALITIES)), comment=str(position).encode())
    data = np.frombuffer(stream.getvalue(), np.uint8)
    return Sample(f"{name}-{position:08d}", list(GARMENTS).index(name), data)
