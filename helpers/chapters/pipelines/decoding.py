"""JPEG decoders compared: speed, and differences between their pixels."""

import math
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pandas as pd

from ...book.experiment import FAILED, Worth
from ...book.table import table
from ...book.values import Number
from ...lab.machine import missing_because
from ...lab.rows import STATUS, Row
from ...lab.timing import Disagreement, Timing, compare
from ...pipelines.decoders import REFERENCE, VARIANTS, ImageError, decode
from ...pipelines.samples import example_jpegs

# Mean difference from Pillow's pixels over an image, in levels of 256. Builds of libjpeg-turbo differ by 0 or 1;
# averaging before chroma upsampling (half size) shows at edges, where single pixels are far off. Swapped red and blue
# would be tens of levels.
MEAN_TOLERANCE = 2.0


@table(
    small=[{"width": 160, "height": 120}],
    cpu=[{"width": 400, "height": 300}, {"width": 160, "height": 120}],
    gpu=[],
    columns="variant scale median_ms p20_ms p80_ms n mean_difference",
    worth=Worth(3, "decoders of images", cpu=2.3),
)
def decoding(width: int, height: int) -> list[Row]:
    """A row a decoder, timed in turn in one thread of this process on the same images, after a check against Pillow.

    Times are milliseconds an image, means over the images of a round. `mean_difference` is in levels of 256 from
    Pillow's pixels, which at half size are averaged two by two. If a decoder can't run, fails, or differs too much, its
    row's `status` says so.
    """
    images = example_jpegs(16, (width, height))
    rows: dict[str, Row] = {variant: {"variant": variant} for variant in VARIANTS}
    calls = {}
    for variant, row in rows.items():
        if missing := missing_because(*VARIANTS[variant].needs):
            row[STATUS] = missing
            continue
        try:
            row |= {"scale": VARIANTS[variant].scale, "mean_difference": difference(variant, images)}
            calls[variant] = lambda variant=variant: [decode(variant, image) for image in images]
        except (Disagreement, ImageError) as error:
            row[STATUS] = f"{FAILED}{error}"
    timed = compare(calls, check=False)
    for variant in calls:
        rows[variant] |= Timing.of([ms / len(images) for ms in timed.samples_ms[variant]]).row()
    return list(rows.values())


def difference(variant: str, images: Sequence[bytes]) -> float:
    """The mean difference from Pillow's pixels, in levels; a `Disagreement` if too large, or if the shape differs."""
    from PIL import Image

    means: list[float] = []
    for number, data in enumerate(images):
        pixels, expected = decode(variant, data), decode(REFERENCE, data)  # (H, W, 3) each
        if VARIANTS[variant].scale > 1:
            expected = np.asarray(Image.fromarray(expected).reduce(VARIANTS[variant].scale))
        if pixels.shape != expected.shape or pixels.dtype != np.uint8:
            raise Disagreement(f"{variant!r} gives {pixels.dtype} {pixels.shape}, {REFERENCE} uint8 {expected.shape}")
        means.append(float(np.abs(pixels.astype(np.int16) - expected).mean()))
        if means[-1] > MEAN_TOLERANCE:
            raise Disagreement(
                f"{variant!r} differs from {REFERENCE} by {means[-1]:.3g} levels on average in image {number}; "
                f"at most {MEAN_TOLERANCE:g} are allowed"
            )
    return float(np.mean(means))


# Numbers


@decoding.numbers()
def _(rows: pd.DataFrame) -> SimpleNamespace:
    """Milliseconds an image by decoder and size, speedups over Pillow, differences from its pixels."""
    shown = pd.DataFrame({"decoder": rows["variant"].unique()})
    for (width, height), images in rows.groupby(["width", "height"], sort=False):
        size, images = f"{width:.0f}×{height:.0f}", images.set_index("variant").reindex(shown["decoder"])
        shown[f"{size}, ms"] = images["median_ms"].to_numpy()
        spread = images["p20_ms"].map("{:.3f}".format) + "–" + images["p80_ms"].map("{:.3f}".format)
        shown[f"{size}, p20–p80"] = spread.to_numpy()
        pillow = images["median_ms"].get("Pillow", math.nan)
        shown[f"{size}, speedup"] = (pillow / images["median_ms"]).to_numpy()
    apart = {name: of["mean_difference"].max() for name, of in rows.groupby(rows["scale"] > 1)}
    full, half = (Number(apart.get(scaled, math.nan), "levels", missing="decoders", decimals=1) for scaled in (0, 1))
    return SimpleNamespace(table=shown, full_size_difference=full, half_size_difference=half)
