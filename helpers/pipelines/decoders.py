"""JPEG decoding by several libraries, with one interface and errors that name the fault.

    pixels = decode("simplejpeg", data)         # (H, W, 3) uint8, RGB, as it is stored: no EXIF rotation

A JPEG takes 5 to 10 ms a megapixel on one core, most of it in libjpeg-turbo, which all of these libraries use; they
differ in their overhead. Decoding at half size skips most of the inverse transform, so it pays if a photo is
resized to a smaller one afterwards.

All of them refuse a file that is empty or cut off, and `decode` raises `ImageError`, which names the library. For a
hole in the middle simplejpeg raises; Pillow and OpenCV return pixels.
"""

import functools
import io
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..lab.arguments import check_choice
from ..lab.machine import missing_because

REFERENCE = "Pillow"


class ImageError(ValueError):
    """A library can't decode a JPEG; one line that names the library and the fault."""


@dataclass(frozen=True)
class Decoder:
    """A function from a JPEG to an array (H, W, 3), None if it can't be decoded; its package and scale."""

    decode: Callable[[bytes], np.ndarray | None]
    needs: tuple[str, ...]  # see `lab.machine.missing_because`
    scale: int = 1  # sides are this many times smaller


def decode(variant: str, data: bytes) -> np.ndarray:
    """The pixels of a JPEG, (H, W, 3) uint8 RGB; at half size (⌈H/2⌉, ⌈W/2⌉, 3)."""
    check_choice(VARIANTS, variant=variant)
    decoder = VARIANTS[variant]
    try:
        pixels = decoder.decode(data)
    except ImportError as error:
        raise ImageError(f"{variant}: {missing_because(*decoder.needs) or _line(error)}") from None
    except Exception as error:
        raise ImageError(f"{variant}: not a readable JPEG ({_line(error)})") from error
    if pixels is None:
        raise ImageError(f"{variant}: not a readable JPEG (the library returns None)")
    return pixels


def _pillow(data: bytes, scale: int = 1) -> np.ndarray:
    from PIL import Image

    with Image.open(io.BytesIO(data), formats=["JPEG"]) as image:
        if scale > 1:  # `draft` chooses the smallest of 1, 1/2, 1/4, 1/8 that is at least as large as this
            image.draft("RGB", tuple(max(side // scale, 1) for side in image.size))
        return np.asarray(image.convert("RGB"))


def _opencv(data: bytes) -> np.ndarray | None:
    import cv2

    # Decoded as BGR and converted, as IMREAD_COLOR_RGB exists only since 4.11.
    pixels = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION)
    return None if pixels is None else cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB)


def _simplejpeg(data: bytes) -> np.ndarray:
    import simplejpeg

    return simplejpeg.decode_jpeg(data, colorspace="RGB")  # strict, so that a warning of libjpeg's is an error


VARIANTS: dict[str, Decoder] = {
    REFERENCE: Decoder(_pillow, ("pillow",)),
    "Pillow, draft at half size": Decoder(functools.partial(_pillow, scale=2), ("pillow",), scale=2),
    "OpenCV": Decoder(_opencv, ("opencv-python-headless",)),
    "simplejpeg": Decoder(_simplejpeg, ("simplejpeg",)),
}


def _line(error: Exception) -> str:
    """An error's type and the first line of its message."""
    return ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])
