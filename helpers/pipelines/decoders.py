"""JPEG decoding by several libraries: speed, differences between their pixels, and behaviour on broken files.

    pixels = decode("simplejpeg", data)         # (H, W, 3) uint8, RGB, as it is stored: no EXIF rotation

A JPEG takes 5 to 10 ms a megapixel on one core, most of it in libjpeg-turbo, which all of these libraries but nvJPEG
use; they differ in their overhead. Decoding at half size skips most of the inverse transform, so it pays if a photo is
resized to a smaller one afterwards.

For a broken file some libraries return None, or grey pixels where data is missing. `decode` checks the first and last
bytes itself (some µs), and raises `ImageError`, which names the library and the fault. It doesn't detect a hole in the
middle: simplejpeg raises, Pillow and OpenCV return pixels (`faults` lists all cases).
"""

import functools
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from helpers.lab.arguments import check_choice, check_positive
from helpers.lab.experiment import FAILED, is_out_of_memory
from helpers.lab.machine import missing_because
from helpers.lab.timing import Disagreement, Timing, compare

REFERENCE = "Pillow"
START, END = b"\xff\xd8\xff", b"\xff\xd9"

# Mean difference from Pillow's pixels over an image, in levels of 256. Builds of libjpeg-turbo differ by 0 or 1;
# another chroma upsampling (nvJPEG) or averaging before it (half size) shows at edges, where single pixels are far
# off. Swapped red and blue would be tens of levels.
MEAN_TOLERANCE = 2.0


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
    return _on_host(decode_all(variant, [data])[0])


def decode_all(variant: str, images: Sequence[bytes]) -> Sequence[np.ndarray | Tensor]:
    """Pixels of many JPEGs; nvJPEG's are tensors (3, H, W) on the GPU. One broken image raises for all of them."""
    decoder = _decoder(variant)
    for data in images:
        if fault := visible_fault(data):
            raise ImageError(f"{variant}: {fault}")
    try:
        decoded = decoder.decode(images)
    except ImportError as error:
        reason = missing_because(*decoder.needs) or _line(error)
        raise ImageError(f"{variant}: {reason}") from None
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


def measure_decoders(
    images: Sequence[bytes], variants: Sequence[str] | None = None, *, rounds: int = 20
) -> list[dict[str, Any]]:
    """A row a variant, timed in turn in one thread of this process on the same images, after a check against Pillow.

    `images_per_s` and `mb_per_s` (of compressed bytes) follow from the median; times are milliseconds an image, means
    over the images of a round. `max_difference` and `mean_difference` are levels of 256 from Pillow's pixels, which at
    half size are averaged two by two. If a variant can't run, fails, or differs too much, its row's `status` says so. A
    visibly broken image raises an `ImageError`.
    """
    if not images:
        raise ValueError("images is empty; it must hold one JPEG or more")
    for number, data in enumerate(images):
        if fault := visible_fault(data):
            raise ImageError(f"image {number}: {fault}")
    check_positive(rounds=rounds)
    variants = list(VARIANTS) if variants is None else list(variants)
    reasons = {variant: missing_because(*_decoder(variant).needs) for variant in variants}
    differences: dict[str, dict[str, float]] = {}
    for variant in variants:
        if not reasons[variant]:
            try:
                differences[variant] = difference(variant, images)
            except (Disagreement, ImageError) as error:
                reasons[variant] = f"{FAILED}{error}"
    calls = {variant: functools.partial(decode_all, variant, images) for variant in differences}
    timed = compare(calls, rounds=rounds, warmup=1, check=False) if calls else None
    rows = []
    for variant in variants:
        if reasons[variant]:
            rows.append({"variant": variant, "status": reasons[variant]})
            continue
        each = Timing.of([ms / len(images) for ms in timed.samples_ms[variant]])
        speed = {
            "images_per_s": 1e3 / each.median_ms,
            "mb_per_s": sum(map(len, images)) / len(images) / each.median_ms / 1e3,
        }
        about = {"variant": variant, "status": "ok", "scale": VARIANTS[variant].scale}
        rows.append(about | speed | each.row() | differences[variant])
    return rows


def difference(variant: str, images: Sequence[bytes]) -> dict[str, float]:
    """Differences from Pillow's pixels, in levels; a `Disagreement` if too large, or if the shape differs."""
    largest, means = 0, []
    for number, data in enumerate(images):
        pixels, expected = decode(variant, data), _reference(data, VARIANTS[variant].scale)  # (H, W, 3) each
        if pixels.shape != expected.shape or pixels.dtype != np.uint8:
            raise Disagreement(f"{variant!r} gives {pixels.dtype} {pixels.shape}, {REFERENCE} uint8 {expected.shape}")
        apart = np.abs(pixels.astype(np.int16) - expected)
        largest, means = max(largest, int(apart.max())), [*means, float(apart.mean())]
        if means[-1] > MEAN_TOLERANCE:
            raise Disagreement(
                f"{variant!r} differs from {REFERENCE} by {means[-1]:.3g} levels on average in image {number}; "
                f"at most {MEAN_TOLERANCE:g} are allowed"
            )
    return {"max_difference": largest, "mean_difference": float(np.mean(means))}


def faults(image: bytes) -> list[dict[str, str]]:
    """What each library does with broken files, and `decode`'s message; a row for each variant and fault.

    `library` is "raises", "returns None" or "returns pixels"; the last silently corrupts training data.
    """
    middle, start = len(image) // 2, image.find(b"\xff\xda")
    broken = {
        "empty": b"",
        "text": b"<html><body>404: not found</body></html>",
        "another format": _png(),
        "header only": image[:start],
        "truncated": image[:middle],
        "a hole": image[:middle] + image[middle + max(64, len(image) // 50) :],
    }
    return [
        {"variant": variant, "fault": fault, "library": _by_itself(variant, data), "decode": _refusal(variant, data)}
        for variant, decoder in VARIANTS.items()
        if not missing_because(*decoder.needs)
        for fault, data in broken.items()
    ]


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


def _decoder(variant: str) -> Decoder:
    check_choice(VARIANTS, variant=variant)
    return VARIANTS[variant]


def _on_host(pixels: np.ndarray | Tensor) -> np.ndarray:
    return pixels.permute(1, 2, 0).cpu().numpy() if isinstance(pixels, Tensor) else pixels


def _reference(data: bytes, scale: int) -> np.ndarray:
    from PIL import Image

    pixels = _pillow(data)
    return pixels if scale == 1 else np.asarray(Image.fromarray(pixels).reduce(scale))


def _scan_start(data: bytes) -> int:
    """The offset at which the header ends and compressed data begin; a thumbnail is inside of a header segment."""
    at = 2
    while at + 4 <= len(data) and data[at] == 0xFF and data[at + 1] != 0xDA:
        at += 1 if data[at + 1] == 0xFF else 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return at


def _by_itself(variant: str, data: bytes) -> str:
    try:
        pixels = VARIANTS[variant].decode([data])[0]
    except Exception:
        return "raises"
    return "returns None" if pixels is None else "returns pixels"


def _refusal(variant: str, data: bytes) -> str:
    try:
        decode(variant, data)
    except ImageError as error:
        return str(error)
    return "returns pixels"


def _png() -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (8, 8), (200, 100, 50)).save(file, "PNG")
    return file.getvalue()


def _line(error: Exception) -> str:
    """An error's type and the first line of its message."""
    return ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])
