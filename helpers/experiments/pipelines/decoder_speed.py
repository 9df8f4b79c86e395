"""JPEG decoders compared: speed, differences between their pixels, and behaviour on broken files."""

import functools
import io
from collections.abc import Sequence

import numpy as np

from helpers.lab.experiment import FAILED
from helpers.lab.machine import missing_because
from helpers.lab.records import STATUS, Row
from helpers.lab.timing import Disagreement, Timing, compare
from helpers.pipelines.decoders import REFERENCE, VARIANTS, ImageError, decode, decode_all

# Mean difference from Pillow's pixels over an image, in levels of 256. Builds of libjpeg-turbo differ by 0 or 1;
# another chroma upsampling (nvJPEG) or averaging before it (half size) shows at edges, where single pixels are far
# off. Swapped red and blue would be tens of levels.
MEAN_TOLERANCE = 2.0


def measure_decoders(images: Sequence[bytes], variants: Sequence[str] = tuple(VARIANTS), rounds: int = 20) -> list[Row]:
    """A row a variant, timed in turn in one thread of this process on the same images, after a check against Pillow.

    `images_per_s` and `mb_per_s` (of compressed bytes) follow from the median; times are milliseconds an image, means
    over the images of a round. `max_difference` and `mean_difference` are levels of 256 from Pillow's pixels, which at
    half size are averaged two by two. If a variant can't run, fails, or differs too much, its row's `status` says so.
    """
    status = {variant: missing_because(*VARIANTS[variant].needs) for variant in variants}
    differences: dict[str, Row] = {}
    for variant in variants:
        if not status[variant]:
            try:
                differences[variant] = difference(variant, images)
            except (Disagreement, ImageError) as error:
                status[variant] = f"{FAILED}{error}"
    calls = {variant: functools.partial(decode_all, variant, images) for variant in differences}
    timed = compare(calls, rounds=rounds, warmup=1, check=False) if calls else None
    rows = []
    for variant in variants:
        if status[variant]:
            rows.append({"variant": variant, STATUS: status[variant]})
            continue
        times = Timing.of([ms / len(images) for ms in timed.samples_ms[variant]])
        mb_per_s = sum(map(len, images)) / len(images) / times.median_ms / 1e3
        speed = {"images_per_s": 1e3 / times.median_ms, "mb_per_s": mb_per_s} | times.row()
        rows.append({"variant": variant, "scale": VARIANTS[variant].scale} | speed | differences[variant])
    return rows


def difference(variant: str, images: Sequence[bytes]) -> Row:
    """Differences from Pillow's pixels, in levels; a `Disagreement` if too large, or if the shape differs."""
    from PIL import Image

    largest, means = 0, []
    for number, data in enumerate(images):
        pixels, expected = decode(variant, data), decode(REFERENCE, data)  # (H, W, 3) each
        if VARIANTS[variant].scale > 1:
            expected = np.asarray(Image.fromarray(expected).reduce(VARIANTS[variant].scale))
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


def broken_files(image: bytes) -> dict[str, bytes]:
    """A JPEG, broken in several ways."""
    from PIL import Image

    middle, png = len(image) // 2, io.BytesIO()
    Image.new("RGB", (8, 8), (200, 100, 50)).save(png, "PNG")
    return {
        "empty": b"",
        "text": b"<html><body>404: not found</body></html>",
        "another format": png.getvalue(),
        "header only": image[: image.find(b"\xff\xda")],
        "truncated": image[:middle],
        "a hole": image[:middle] + image[middle + max(64, len(image) // 50) :],
    }


def measure_faults(image: bytes) -> list[Row]:
    """What each library does with broken files, and `decode`'s message; a row for each variant and fault.

    `library` is "raises", "returns None" or "returns pixels"; the last silently corrupts training data.
    """
    return [
        {"variant": variant, "fault": fault, "library": _by_itself(variant, data), "decode": _refusal(variant, data)}
        for variant, decoder in VARIANTS.items()
        if not missing_because(*decoder.needs)
        for fault, data in broken_files(image).items()
    ]


def _by_itself(variant: str, data: bytes) -> str:
    try:
        (pixels,) = VARIANTS[variant].decode([data])
    except Exception:
        return "raises"
    return "returns None" if pixels is None else "returns pixels"


def _refusal(variant: str, data: bytes) -> str:
    try:
        decode(variant, data)
    except ImageError as error:
        return str(error)
    return "returns pixels"
