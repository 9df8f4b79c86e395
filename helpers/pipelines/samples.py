"""The chapter's generated data: JPEGs and token arrays as samples (key, label, 1-D array), and plain JPEGs."""

import functools
import io
import itertools
from typing import Any

import numpy as np

from helpers.lab.arguments import check_positive
from helpers.text import SyntheticText

from .formats import Sample

DRAWINGS = 64  # distinct drawings; each sample is a crop of one
ROOM = 1.25  # size of a drawing, relative to its crops
QUALITIES = range(70, 95)


def image_samples(count: int, seed: int = 0, size: tuple[int, int] = (160, 213)) -> list[Sample]:
    """`count` JPEGs of width × height: crops of drawn garments.

    There are 64 distinct drawings; samples differ in crop, quality and the number in the file's comment. At 160×213
    (about 7 kB each) it costs 1 s, and about 2 ms a sample.
    """
    check_positive(count=count)
    if min(size) < 16:
        raise ValueError(f"size is {size}; width and height must be 16 or more")
    drawings = _drawings(min(DRAWINGS, count), seed, tuple(int(side * ROOM) for side in size))
    return [_cut(drawings, position, seed, size) for position in range(count)]


def token_samples(count: int, seed: int = 0) -> list[Sample]:
    """`count` samples of synthetic text with the lengths of WikiText: int32, 85 tokens on average.

    A sample's label is its length class, the bits that its length needs: class c has lengths from 2**(c-1) to 2**c - 1.
    """
    texts = enumerate(SyntheticText(count, seed))
    return [Sample(f"text-{position:08d}", len(ids).bit_length(), ids) for position, ids in texts]


def example_jpegs(count: int, size: tuple[int, int] = (400, 300), *, seed: int = 0, quality: int = 85) -> list[bytes]:
    """`count` JPEGs of drawn garments, of a size (width, height); 60 ms each for the default size."""
    check_positive(count=count, width=size[0], height=size[1])
    files = []
    for _, picture in _drawings(count, seed, size):
        stream = io.BytesIO()
        picture.save(stream, "JPEG", quality=quality)
        files.append(stream.getvalue())
    return files


@functools.lru_cache(maxsize=2)
def _drawings(count: int, seed: int, size: tuple[int, int]) -> list[tuple[str, Any]]:
    """`count` pictures with the names of their garments, which alternate."""
    from helpers.pictures import GARMENTS, draw_garment

    names = itertools.islice(itertools.cycle(GARMENTS), count)
    return [(name, draw_garment(np.random.default_rng([seed, at]), name, size)) for at, name in enumerate(names)]


def _cut(drawings: list[tuple[str, Any]], position: int, seed: int, size: tuple[int, int]) -> Sample:
    """Sample `position`, a crop that depends on seed and position only."""
    from helpers.pictures import GARMENTS

    (name, image), rng = drawings[position % len(drawings)], np.random.default_rng([seed, position, 1])
    left, top = (int(rng.integers(room + 1)) for room in (image.width - size[0], image.height - size[1]))
    stream = io.BytesIO()
    cut = image.crop((left, top, left + size[0], top + size[1]))
    cut.save(stream, "JPEG", quality=int(rng.choice(QUALITIES)), comment=str(position).encode())
    data = np.frombuffer(stream.getvalue(), np.uint8)
    return Sample(f"{name}-{position:08d}", list(GARMENTS).index(name), data)
