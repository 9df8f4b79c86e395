"""JPEG decoding by several libraries, with one interface and errors that name the fault.

    pixels = decode("simplejpeg", data)         # (H, W, 3) uint8, RGB, as it is stored: no EXIF rotation

A JPEG takes 5 to 10 ms a megapixel on one core, most of it in libjpeg-turbo, which all of these libraries but nvJPEG
use; they differ in their overhead. Decoding at half size skips most of the inverse transform, so it pays if a photo is
resized to a smaller one afterwards.

For a broken file some libraries return None, or grey pixels where data is missing. `decode` checks the first and last
bytes itself (some µs), and raises `ImageError`, which names the library and the fault. It doesn't detect a hole in the
middle: simplejpeg raises, Pillow and OpenCV return pixels.
"""

import functools
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from helpers.lab.arguments import check_choice
from helpers.lab.experiment import is_out_of_memory
from helpers.lab.machine import missing_because

REFERENCE = "Pillow"
START, END = b"\xff\xd8\xff", b"\xff\xd9"


class ImageError(ValueError):
    """A library can't decode a JPEG; one line that names the library and the fault."""


@dataclass(frozen=True)
class Decoder:
    """A function from JPEGs to arrays (H, W, 3), or tensors (3, H, W) on the GPU; its requirements and scale."""

    decode: Callable[[Sequence[bytes]], Sequence[np.ndarray | Tensor]]
    needs: tuple[str, ...]  # see `lab.machine.missing_because`
    scale: int = 1  # sides are this many times smaller


def decode(variant: str, data: bytes) -> np.ndarray:
    """The pixels of a JPEG, (H, W, 3) uint8 RGB on the host; at half size (⌈H/2⌉, ⌈W/2⌉, 3)."""
    (pixels,) = decode_all(variant, [data])
    return pixels.permute(1, 2, 0).cpu().numpy() if isinstance(pixels, Tensor) else pixels


def decode_all(variant: str, images: Sequence[bytes]) -> Sequence[np.ndarray | Tensor]:
    """Pixels of many JPEGs; nvJPEG's are tensors (3, H, W) on the GPU. One broken image raises for all of them."""
    check_choice(VARIANTS, variant=variant)
    decoder = VARIANTS[variant]
    for data in images:
        if fault := visible_fault(data):
            raise ImageError(f"{variant}: {fault}")
    try:
        decoded = decoder.decode(images)
    except ImportError as error:
        raise ImageError(f"{variant}: {missing_because(*decoder.needs) or _line(error)}") from None
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise ImageError(f"{variant}: not a readable JPEG ({_line(error)})") from error
    if any(pixels is None for pixels in decoded):
        raise ImageError(f"{variant}: not a readable JPEG (the library returns None)")
    return decoded


def visible_fault(data: bytes) -> str:
    """A fault that the first and last bytes show; "" for a JPEG with a valid start and an end mark.

    Some photos have more data after the image (a video, a maker's notes), so the end mark need not be last. It must
    come after the header, as a thumbnail there has its own.
    """
    if not data:
        return "the data is empty"
    if not data.startswith(START):
        return f"not a JPEG (it begins with {bytes(data[:4]).hex(' ')}, a JPEG with {START.hex(' ')})"
    if data.rfind(END, _scan_start(data)) < 0:
        return f"truncated: {len(data)} bytes without the end mark {END.hex(' ')}"
    return ""


def _scan_start(data: bytes) -> int:
    """The offset at which the header ends and compressed data begin; a thumbnail is inside of a header segment."""
    at = 2
    while at + 4 <= len(data) and data[at] == 0xFF and data[at + 1] != 0xDA:
        at += 1 if data[at + 1] == 0xFF else 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return at


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


def _torchvision(images: Sequence[bytes], where: str) -> list[Tensor]:
    """Tensors (3, H, W). On CUDA all images go to nvJPEG at once, which is what it is fast at."""
    from torchvision.io import ImageReadMode, decode_jpeg

    files = [torch.frombuffer(bytearray(data), dtype=torch.uint8) for data in images]
    if where == "cuda":
        return decode_jpeg(files, mode=ImageReadMode.RGB, device=where)
    return [decode_jpeg(file, mode=ImageReadMode.RGB) for file in files]


def _each(decode_one: Callable[[bytes], np.ndarray | None]) -> Callable[[Sequence[bytes]], list]:
    return lambda images: [decode_one(data) for data in images]


VARIANTS: dict[str, Decoder] = {
    REFERENCE: Decoder(_each(_pillow), ("pillow",)),
    "Pillow, draft at half size": Decoder(_each(functools.partial(_pillow, scale=2)), ("pillow",), scale=2),
    "OpenCV": Decoder(_each(_opencv), ("opencv-python-headless",)),
    "simplejpeg": Decoder(_each(_simplejpeg), ("simplejpeg",)),
    "torchvision": Decoder(functools.partial(_torchvision, where="cpu"), ("torchvision",)),
    "nvJPEG": Decoder(functools.partial(_torchvision, where="cuda"), ("CUDA", "torchvision")),
}


def _line(error: Exception) -> str:
    """An error's type and the first line of its message."""
    return ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])
