"""The chapter's generated data: JPEGs and token arrays as samples (key, label, 1-D array), and plain JPEGs."""

import functools
import io
import itertools
from typing import Any

import numpy as np

from ..text import SyntheticText
from .reader import Sample

DRAWINGS, CROPS = 64, 512  # distinct drawings, and crops of them
ROOM = 1.25  # size of a drawing, relative to its crops
QUALITIES = range(70, 95)


def image_samples(count: int, seed: int = 0, size: tuple[int, int] = (160, 213)) -> list[Sample]:
    """`count` JPEGs of width × height: crops of drawn garments, at 160×213 about 7 kB each.

    The first 512 differ in drawing, crop or quality, at 2 ms each; later ones repeat them, but for the number in the
    file's comment.
    """
    drawings = _drawings(min(DRAWINGS, count), seed, tuple(int(side * ROOM) for side in size))
    crops = [_cut(drawings, position, seed, size) for position in range(min(CROPS, count))]
    return [_numbered(*crops[position % len(crops)], position) for position in range(count)]


def token_windows(count: int, length: int = 1024, seed: int = 0) -> list[Sample]:
    """`count` windows of `length` tokens, int32, each from another place of one synthetic text; labels 0 to 9."""
    text = SyntheticText(500, seed).ids
    text = np.resize(text, count + length + len(text))
    return [Sample(f"window-{at:08d}", at % 10, text[at : at + length]) for at in range(count)]


def example_jpegs(count: int, size: tuple[int, int] = (400, 300), *, seed: int = 0, quality: int = 85) -> list[bytes]:
    """`count` JPEGs of drawn garments, of a size (width, height); 60 ms each for the default size."""
    return [_encoded(picture, quality) for _, picture in _drawings(count, seed, size)]


def _encoded(picture: Any, quality: int) -> bytes:
    stream = io.BytesIO()
    picture.save(stream, "JPEG", quality=quality)
    return stream.getvalue()


@functools.lru_cache(maxsize=2)
def _drawings(count: int, seed: int, size: tuple[int, int]) -> list[tuple[str, Any]]:
    """`count` pictures with the names of their garments, which alternate."""
    from ..pictures.drawing import GARMENTS, draw_garment

    names = itertools.islice(itertools.cycle(GARMENTS), count)
    return [(name, draw_garment(np.random.default_rng([seed, at]), name, size)) for at, name in enumerate(names)]


def _cut(drawings: list[tuple[str, Any]], position: int, seed: int, size: tuple[int, int]) -> tuple[str, bytes]:
    """A garment's name and the JPEG of a crop, which depends on seed and position only."""
    (name, image), rng = drawings[position % len(drawings)], np.random.default_rng([seed, position, 1])
    left, top = (int(rng.integers(room + 1)) for room in (image.width - size[0], image.height - size[1]))
    cut = image.crop((left, top, left + size[0], top + size[1]))
    return name, _encoded(cut, int(rng.choice(QUALITIES)))


def _numbered(name: str, jpeg: bytes, position: int) -> Sample:
    """The JPEG with the position as its comment, a segment after the start mark."""
    from ..pictures.shapes import GARMENTS

    text = str(position).encode()
    data = jpeg[:2] + b"\xff\xfe" + (len(text) + 2).to_bytes(2, "big") + text + jpeg[2:]
    return Sample(f"{name}-{position:08d}", list(GARMENTS).index(name), np.frombuffer(data, np.uint8))
