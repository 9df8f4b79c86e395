"""JPEG to pixels by several libraries: what it costs, what they agree on, what they say to a broken file.

    pixels = decode("simplejpeg", data)         # (H, W, 3) uint8, RGB, as it is stored: no EXIF rotation

A JPEG takes 5 to 10 ms a megapixel on one core, most of it in libjpeg-turbo, which all of these libraries but nvJPEG
contain; they differ in what they do around it. Decoding at half the size skips most of the inverse transform, so it
pays where a photo is made smaller afterwards.

Some libraries answer a broken file with None, or with grey pixels where the data ended. `decode` looks at the first
and the last bytes itself (some µs), and raises `ImageError`, which names the library and the fault. What it can't see
is a hole in the middle: simplejpeg and PyTurboJPEG refuse that, Pillow and OpenCV go on (`faults` shows who does what).
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

# How far pixels may lie from Pillow's, in levels of 256, on average over an image. The builds of libjpeg-turbo differ
# by 0 or 1; another upsampling of colour (nvJPEG) or averaging before it (half size) shows at edges, where single
# pixels are far off. Red and blue in the other order is tens of levels.
MEAN_TOLERANCE = 2.0


class ImageError(ValueError):
    """A JPEG that a library doesn't decode: one line that names the library and the fault."""


@dataclass(frozen=True)
class Decoder:
    """How many images are decoded: to arrays (H, W, 3), or tensors (3, H, W) on the GPU; and what that needs."""

    decode: Callable[[Sequence[bytes]], Sequence[np.ndarray | Tensor]]
    needs: tuple[str, ...]  # see `lab.machine.missing_because`
    scale: int = 1  # sides are this many times smaller


def decode(variant: str, data: bytes) -> np.ndarray:
    """The pixels of a JPEG, (H, W, 3) uint8 RGB on the host; at half size (⌈H/2⌉, ⌈W/2⌉, 3)."""
    return _on_host(decode_all(variant, [data])[0])


def decode_all(variant: str, images: Sequence[bytes]) -> Sequence[np.ndarray | Tensor]:
    """Many JPEGs. Those of nvJPEG come as tensors (3, H, W) and stay on the GPU. One broken image refuses them all."""
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
    """What the first and last bytes tell: "" for a JPEG that begins and ends as one.

    Behind the end of some photos lies more (a video, a maker's notes), so the end mark need not be last. A thumbnail in
    the header has one of its own, so it has to come after the header.
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

    `images_per_s` and `mb_per_s` (of compressed bytes) follow from the median; the times are a mean over the images of
    a round, in milliseconds. `max_difference` and `mean_difference` are levels of 256 from Pillow's pixels, which
    at half size are averaged two by two. A variant that can't run, that fails, or whose pixels are too far off has a
    row whose `status` says so; the others are timed without it. An image that is
    visibly broken is the caller's fault, and an `ImageError`.
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
    work = {variant: functools.partial(decode_all, variant, images) for variant in differences}
    timed = compare(work, rounds=rounds, warmup=1, check=False) if work else None
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
    """How far pixels are from Pillow's, in levels. `Disagreement` if that is too far, or the shape differs."""
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
    """What each library does by itself with files that are broken, and what `decode` says. Rows of variant and fault.

    `library` is "raises", "returns None" or "returns pixels". The last is what spoils a training silently.
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
        if scale > 1:  # asks for the smallest of 1, 1/2, 1/4, 1/8 that is no smaller than this
            image.draft("RGB", tuple(max(side // scale, 1) for side in image.size))
        return np.asarray(image.convert("RGB"))


def _opencv(data: bytes) -> np.ndarray | None:
    import cv2

    # In OpenCV's own order, BGR, and turned here: IMREAD_COLOR_RGB is new in 4.11.
    pixels = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION)
    return None if pixels is None else cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB)


def _simplejpeg(data: bytes) -> np.ndarray:
    import simplejpeg

    return simplejpeg.decode_jpeg(data, colorspace="RGB")  # strict, so that a warning of libjpeg's is an error


def _pyturbojpeg(data: bytes) -> np.ndarray:
    from turbojpeg import TJPF_RGB

    decoder, strict = _turbojpeg()
    return decoder.decode(data, pixel_format=TJPF_RGB, flags=strict)


@functools.cache
def _turbojpeg() -> tuple[Any, int]:
    """The library's handle, and the flag that makes an error of what is otherwise a Python warning."""
    import turbojpeg

    return turbojpeg.TurboJPEG(), getattr(turbojpeg, "TJFLAG_STOPONWARNING", 0)


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
    "PyTurboJPEG": Decoder(_each(_pyturbojpeg), ("PyTurboJPEG", "libturbojpeg")),
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
    """Where the header ends and compressed data begin. Its segments are walked; a thumbnail lies inside of one."""
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
    """An error's kind, and the first line of what it says."""
    return ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])
