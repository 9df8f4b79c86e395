import io
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from helpers.lab.machine import missing_because
from helpers.pipelines.decoders import VARIANTS, Decoder, ImageError, decode
from helpers.pipelines.samples import example_jpegs

USABLE = [name for name, decoder in VARIANTS.items() if not missing_because(*decoder.needs)]
FULL = [name for name in USABLE if VARIANTS[name].scale == 1]


def jpeg(pixels, **options):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", **({"quality": 90} | options))
    return file.getvalue()


def smooth(width, height, seed=0):
    """A colourful picture without sharp edges, as photos are."""
    small = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return np.asarray(Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC))


@pytest.fixture(scope="module")
def photo():
    return example_jpegs(1, (160, 120))[0]


@pytest.mark.parametrize("variant", FULL)
@settings(deadline=None, max_examples=10)
@given(st.integers(1, 90), st.integers(1, 90), st.booleans(), st.integers(0, 2), st.integers(0, 99))
def test_every_variant_gives_the_pixels_of_pillow(variant, width, height, progressive, subsampling, seed):
    data = jpeg(smooth(width, height, seed), progressive=progressive, subsampling=subsampling)
    pixels, expected = decode(variant, data), np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    assert pixels.shape == (height, width, 3)
    assert pixels.dtype == np.uint8
    assert np.abs(pixels.astype(int) - expected).mean() <= 1


@pytest.mark.parametrize("variant", USABLE)
def test_pixels_are_those_that_were_encoded(variant):
    """Not only Pillow's: red is red, and the top is the top."""
    pixels = np.zeros((32, 48, 3), np.uint8)
    pixels[:16, :, 0], pixels[16:, :, 2] = 220, 180
    actual = decode(variant, jpeg(pixels, quality=95, subsampling=0))
    top, bottom = actual[: len(actual) // 2], actual[len(actual) // 2 :]
    np.testing.assert_allclose(top[:-2].mean((0, 1)), [220, 0, 0], atol=6)
    np.testing.assert_allclose(bottom[2:].mean((0, 1)), [0, 0, 180], atol=6)


@pytest.mark.parametrize("variant", USABLE)
def test_grey_becomes_rgb_and_exif_turns_nothing(variant):
    grey = smooth(40, 24)[:, :, 0]
    turned = Image.Exif()
    turned[0x0112] = 6  # a quarter turn
    pixels = decode(variant, jpeg(grey, exif=turned))
    scale = VARIANTS[variant].scale
    assert pixels.shape == (24 // scale, 40 // scale, 3)
    assert (pixels == pixels[:, :, :1]).all()


@pytest.mark.parametrize("side", [64, 63])
def test_a_draft_has_half_the_sides_rounded_up_and_the_mean_of_the_pixels(side):
    data = jpeg(pixels := smooth(side, 41))
    half = decode("Pillow, draft at half size", data)
    assert half.shape == (21, -(-side // 2), 3)
    assert np.abs(half.astype(int) - np.asarray(Image.fromarray(pixels).reduce(2))).mean() <= 3


BROKEN = {
    "empty": lambda data: b"",
    "text": lambda data: b"<html>404</html>",
    "first half": lambda data: data[: len(data) // 2],
    "all but the end": lambda data: data[:-2],
    "header": lambda data: data[: data.find(b"\xff\xda")],
    "nonsense": lambda data: data[:3] + b"\x00" * 50 + data[-2:],
}


@pytest.mark.parametrize("fault", BROKEN)
@pytest.mark.parametrize("variant", USABLE)
def test_a_broken_file_is_refused_by_name(variant, fault, photo):
    with pytest.raises(ImageError, match=f"^{variant}: not a readable JPEG") as caught:
        decode(variant, BROKEN[fault](photo))
    assert "\n" not in str(caught.value)


def test_a_thumbnail_before_and_a_film_behind_the_photo_change_nothing(photo):
    segment = jpeg(smooth(8, 8))  # whose end is not the end of the photo
    with_thumbnail = photo[:2] + b"\xff\xe1" + (len(segment) + 2).to_bytes(2, "big") + segment + photo[2:]
    for variant in USABLE:
        for data in (with_thumbnail, photo + b"a film" * 9):
            assert np.array_equal(decode(variant, data), decode(variant, photo))


def test_a_library_that_returns_nothing_is_named(monkeypatch, photo):
    monkeypatch.setitem(VARIANTS, "silent", Decoder(lambda data: None, ("pillow",)))
    with pytest.raises(ImageError, match=r"silent: .*returns None"):
        decode("silent", photo)


def test_a_library_or_variant_that_is_not_there_is_named(monkeypatch, photo):
    monkeypatch.setitem(sys.modules, "simplejpeg", None)
    with pytest.raises(ImageError, match="simplejpeg: not installed: simplejpeg"):
        decode("simplejpeg", photo)
    with pytest.raises(ValueError, match="variant is 'pil'; valid: 'Pillow', "):
        decode("pil", photo)
