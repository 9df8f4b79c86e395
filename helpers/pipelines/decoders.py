"""JPEG to pixels by several libraries: what it costs, what they agree on, what they say to a broken file.

    pixels = decode("simplejpeg", data)         # (H, W, 3) uint8, RGB, as it is stored: no EXIF rotation

A JPEG takes 5 to 10 ms a megapixel on one core, most of it in libjpeg-turbo, which all of these libraries but nvJPEG
contain; they differ in what they do around it. Decoding at half the size skips most of the inverse transform, so it
pays where a photo is made smaller afterwards.

Some libraries answer a broken file with None, or with grey pixels where the data ended. `decode` looks at the first
and the last bytes itself (some µs), and raises `ImageError`, which names the way and the fault. What it can't see is a
hole in the middle: simplejpeg and PyTurboJPEG refuse that, Pillow and OpenCV go on (`faults` shows who does what).
"""

import functools
import importlib
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from helpers.lab.arguments import check_positive
from helpers.lab.experiment import FAILED, is_out_of_memory
from helpers.lab.machine import NOT_INSTALLED
from helpers.lab.timing import Disagreement, Timing, compare

REFERENCE = "Pillow"
START, END = b"\xff\xd8\xff", b"\xff\xd9"

# How far pixels may lie from Pillow's, in levels of 256, on average over an image. The builds of libjpeg-turbo differ
# by 0 or 1; another upsampling of colour (nvJPEG) or averaging before it (half size) shows at edges, where single
# pixels are far off. Red and blue in the other order is tens of levels.
MEAN_TOLERANCE = 2.0


class ImageError(ValueError):
    """A JPEG that a way doesn't decode: one line that names the way and the fault."""


@dataclass(frozen=True)
class Way:
    """A package (imported as `module`), and how it decodes many images: arrays (H, W, 3), or tensors on the GPU."""

    package: str
    module: str
    decode: Callable[[Sequence[bytes]], Sequence[np.ndarray | Tensor]]
    scale: int = 1
    cuda: bool = False


def obstacle(way: str) -> str:
    """Why a way can't run here, in a line for a table's status; "" if it can. Imports the way's package."""
    chosen = _way(way)
    if chosen.cuda and not torch.cuda.is_available():
        return "needs CUDA"
    try:
        importlib.import_module(chosen.module)
    except ModuleNotFoundError:
        return NOT_INSTALLED + chosen.package
    except Exception as error:  # torchvision that was made for another torch, OpenCV that lacks a library
        return f"{NOT_INSTALLED}{chosen.package} ({_line(error)})"
    if chosen.module == "turbojpeg":
        try:
            _turbojpeg()
        except Exception:  # the package wraps a library of the system's, version 3 or later, and brings none
            return NOT_INSTALLED + "libturbojpeg"
    return ""


def decode(way: str, data: bytes) -> np.ndarray:
    """The pixels of a JPEG, (H, W, 3) uint8 RGB on the host; those of a way at half size (⌈H/2⌉, ⌈W/2⌉, 3)."""
    return _on_host(decode_all(way, [data])[0])


def decode_all(way: str, images: Sequence[bytes]) -> Sequence[np.ndarray | Tensor]:
    """Many JPEGs. Those of nvJPEG come as tensors (3, H, W) and stay on the GPU. One broken image refuses them all."""
    chosen = _way(way)
    for data in images:
        if fault := visible_fault(data):
            raise ImageError(f"{way}: {fault}")
    try:
        found = chosen.decode(images)
    except ImportError:
        raise ImageError(f"{way}: {obstacle(way)}") from None
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise ImageError(f"{way}: not a readable JPEG ({_line(error)})") from error
    if any(pixels is None for pixels in found):
        raise ImageError(f"{way}: not a readable JPEG (the library returns None)")
    return found


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
    images: Sequence[bytes], ways: Sequence[str] | None = None, *, rounds: int = 20, warmup: int = 1
) -> list[dict[str, Any]]:
    """A row a way, timed in turn in one thread of this process on the same images, after a check against Pillow.

    `images_per_s` and `mb_per_s` (of compressed bytes) follow from the median; the times are a mean over the images of
    a round, in milliseconds. `max_difference` and `mean_difference` are levels of 256 from Pillow's pixels, which for
    a way at half size are averaged two by two. A way that can't run has a row with its obstacle as `status`, one that
    fails, or whose pixels are too far off, a row that says so; the others are timed without it. An image that is
    visibly broken is the caller's fault, and an `ImageError`.
    """
    if not images:
        raise ValueError("images is empty; it must hold one JPEG or more")
    for number, data in enumerate(images):
        if fault := visible_fault(data):
            raise ImageError(f"image {number}: {fault}")
    check_positive(rounds=rounds, warmup=warmup)
    ways = list(WAYS) if ways is None else list(ways)
    obstacles = {way: obstacle(way) for way in ways}
    differences: dict[str, dict[str, float]] = {}
    for way in ways:
        if not obstacles[way]:
            try:
                differences[way] = difference(way, images)
            except (Disagreement, ImageError) as error:
                obstacles[way] = f"{FAILED}{error}"
    usable = list(differences)
    work = {way: functools.partial(decode_all, way, images) for way in usable}
    found = compare(work, rounds=rounds, warmup=warmup, check=False) if work else None
    rows = []
    for way in ways:
        if obstacles[way]:
            rows.append({"way": way, "status": obstacles[way]})
            continue
        each = Timing.of([ms / len(images) for ms in found.samples_ms[way]])
        speed = {
            "images_per_s": 1e3 / each.median_ms,
            "mb_per_s": sum(map(len, images)) / len(images) / each.median_ms / 1e3,
        }
        rows.append({"way": way, "status": "ok", "scale": WAYS[way].scale} | speed | each.row() | differences[way])
    return rows


def difference(way: str, images: Sequence[bytes]) -> dict[str, float]:
    """How far a way's pixels are from Pillow's, in levels. `Disagreement` if that is too far, or the shape differs."""
    largest, means = 0, []
    for number, data in enumerate(images):
        found, expected = decode(way, data), _reference(data, _way(way).scale)
        if found.shape != expected.shape or found.dtype != np.uint8:
            raise Disagreement(f"{way!r} gives {found.dtype} {found.shape}, {REFERENCE} uint8 {expected.shape}")
        apart = np.abs(found.astype(np.int16) - expected)
        largest, means = max(largest, int(apart.max())), [*means, float(apart.mean())]
        if means[-1] > MEAN_TOLERANCE:
            raise Disagreement(
                f"{way!r} differs from {REFERENCE} by {means[-1]:.3g} levels on average in image {number}; "
                f"at most {MEAN_TOLERANCE:g} are allowed"
            )
    return {"max_difference": largest, "mean_difference": float(np.mean(means))}


def faults(image: bytes, ways: Sequence[str] | None = None) -> list[dict[str, str]]:
    """What each library does by itself with files that are broken, and what `decode` says. Rows of way and fault.

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
    rows = []
    for way in WAYS if ways is None else ways:
        if obstacle(way):
            continue
        for fault, data in broken.items():
            rows.append({"way": way, "fault": fault, "library": _by_itself(way, data), "decode": _refusal(way, data)})
    return rows


def example_jpegs(count: int, size: tuple[int, int] = (400, 300), *, seed: int = 0, quality: int = 85) -> list[bytes]:
    """Generated pictures of garments of so many pixels, width and height; 60 ms each for the default size."""
    from helpers.pictures import GARMENTS, draw_garment

    check_positive(count=count, width=size[0], height=size[1])
    kinds, files = list(GARMENTS), []
    for at in range(count):
        file = io.BytesIO()
        picture = draw_garment(np.random.default_rng([seed, at]), kinds[at % len(kinds)], size)
        picture.save(file, "JPEG", quality=quality)
        files.append(file.getvalue())
    return files


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


WAYS: dict[str, Way] = {
    REFERENCE: Way("pillow", "PIL.Image", _each(_pillow)),
    "Pillow, draft at half size": Way("pillow", "PIL.Image", _each(functools.partial(_pillow, scale=2)), scale=2),
    "OpenCV": Way("opencv-python-headless", "cv2", _each(_opencv)),
    "simplejpeg": Way("simplejpeg", "simplejpeg", _each(_simplejpeg)),
    "PyTurboJPEG": Way("PyTurboJPEG", "turbojpeg", _each(_pyturbojpeg)),
    "torchvision": Way("torchvision", "torchvision.io", functools.partial(_torchvision, where="cpu")),
    "nvJPEG": Way("torchvision", "torchvision.io", functools.partial(_torchvision, where="cuda"), cuda=True),
}


def _way(way: str) -> Way:
    if way not in WAYS:
        raise ValueError(f"unknown way {way!r}; valid: {'; '.join(WAYS)}")
    return WAYS[way]


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


def _by_itself(way: str, data: bytes) -> str:
    try:
        found = _way(way).decode([data])[0]
    except Exception:
        return "raises"
    return "returns None" if found is None else "returns pixels"


def _refusal(way: str, data: bytes) -> str:
    try:
        decode(way, data)
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
