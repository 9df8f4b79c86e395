"""What is kept in the formats: JPEGs and token arrays, as samples of a key, a label and a 1-D array."""

import functools
import io
from pathlib import Path

import numpy as np

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
    if count < 1:
        raise ValueError(f"count is {count}; it must be 1 or more")
    if min(size) < 16:
        raise ValueError(f"size is {size}; width and height must be 16 or more")
    kinds, drawings = _drawings(min(DRAWINGS, count), seed, tuple(size))
    return [_cut(kinds, drawings, place, seed, size) for place in range(count)]


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
    return [Sample(f"text-{place:08d}", len(ids).bit_length(), ids) for place, ids in enumerate(text)]


def _photos(folder: Path, count: int | None, seed: int) -> list[Sample]:
    from helpers.pictures import photo_files

    photos = photo_files(folder)[0]
    usable = [place for place, file in enumerate(photos.files) if file.suffix.lower() in (".jpg", ".jpeg")]
    if count is not None and not 1 <= count <= len(usable):
        raise ValueError(f"count is {count}; allowed: 1 to {len(usable)}, the JPEGs for training in {folder}")
    chosen = np.random.default_rng(seed).permutation(usable)[:count]
    return [
        Sample(photos.files[at].stem, int(photos.labels[at]), np.fromfile(photos.files[at], np.uint8)) for at in chosen
    ]


@functools.lru_cache(maxsize=2)
def _drawings(number: int, seed: int, size: tuple[int, int]) -> tuple[list[str], list]:
    from helpers.pictures import GARMENTS, draw_garment

    larger = tuple(int(side * ROOM) for side in size)
    names = [list(GARMENTS)[at % len(GARMENTS)] for at in range(number)]
    return names, [draw_garment(np.random.default_rng([seed, at]), name, larger) for at, name in enumerate(names)]


def _cut(kinds: list[str], drawings: list, place: int, seed: int, size: tuple[int, int]) -> Sample:
    """Sample `place`: it follows from seed and place alone."""
    from helpers.pictures import GARMENTS

    at, rng = place % len(drawings), np.random.default_rng([seed, place, 1])
    image = drawings[at]
    left, top = (int(rng.integers(room + 1)) for room in (image.width - size[0], image.height - size[1]))
    stream = io.BytesIO()
    cut = image.crop((left, top, left + size[0], top + size[1]))
    cut.save(stream, "JPEG", quality=int(rng.choice(QUALITIES)), comment=str(place).encode())
    data = np.frombuffer(stream.getvalue(), np.uint8)
    return Sample(f"{kinds[at]}-{place:08d}", list(GARMENTS).index(kinds[at]), data)
