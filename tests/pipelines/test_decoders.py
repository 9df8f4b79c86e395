import io
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from helpers.lab import Disagreement
from helpers.lab.machine import missing_because
from helpers.pipelines import decoders
from helpers.pipelines.decoders import (
    VARIANTS,
    Decoder,
    ImageError,
    decode,
    decode_all,
    difference,
    faults,
    measure_decoders,
    visible_fault,
)
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
@settings(deadline=None, max_examples=25)
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
    data = jpeg(smooth(side, 41))
    assert decode("Pillow, draft at half size", data).shape == (21, -(-side // 2), 3)
    assert difference("Pillow, draft at half size", [data])["mean_difference"] < decoders.MEAN_TOLERANCE


BROKEN = {
    "empty": (lambda data: b"", "the data is empty"),
    "text": (lambda data: b"<html>404</html>", "not a JPEG"),
    "PNG": (lambda data: decoders._png(), "not a JPEG"),
    "first half": (lambda data: data[: len(data) // 2], "truncated"),
    "all but the end": (lambda data: data[:-2], "truncated"),
    "header": (lambda data: data[: data.find(b"\xff\xda")], "truncated"),
    "first bytes": (lambda data: data[:5], "truncated"),
    "no pixels": (lambda data: data[:20] + b"\xff\xd9", "truncated|not a readable JPEG"),
    "nonsense": (lambda data: data[:3] + b"\x00" * 50 + data[-2:], "not a readable JPEG"),
}


@pytest.mark.parametrize("fault", BROKEN)
@pytest.mark.parametrize("variant", USABLE)
def test_a_broken_file_is_refused_by_name(variant, fault, photo):
    make, message = BROKEN[fault]
    with pytest.raises(ImageError, match=f"^{variant}: .*({message})") as caught:
        decode(variant, make(photo))
    assert "\n" not in str(caught.value)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_a_jpeg_cut_anywhere_is_seen_to_be_cut(data):
    photo = jpeg(smooth(40, 30), progressive=data.draw(st.booleans()))
    assert visible_fault(photo) == ""
    assert visible_fault(photo[: data.draw(st.integers(0, len(photo) - 1))]) != ""


def test_a_thumbnail_before_and_a_film_behind_the_photo_change_nothing(photo):
    segment = jpeg(smooth(8, 8))  # whose end is not the end of the photo
    with_thumbnail = photo[:2] + b"\xff\xe1" + (len(segment) + 2).to_bytes(2, "big") + segment + photo[2:]
    assert visible_fault(with_thumbnail) == ""
    assert "truncated" in visible_fault(with_thumbnail[:-2])
    for variant in USABLE:
        for data in (with_thumbnail, photo + b"a film" * 9):
            assert np.array_equal(decode(variant, data), decode(variant, photo))


def test_faults_tell_who_goes_on_silently(photo):
    actual = {(row["variant"], row["fault"]): row for row in faults(photo)}
    assert len(actual) == len(USABLE) * 6
    assert actual["Pillow", "a hole"]["library"] == "returns pixels"
    if "simplejpeg" in USABLE:
        assert actual["simplejpeg", "a hole"]["library"] == "raises"
    if "OpenCV" in USABLE:
        assert actual["OpenCV", "text"]["library"] == "returns None"
        assert actual["OpenCV", "another format"]["library"] == "returns pixels"
    assert all(row["decode"].startswith(f"{row['variant']}: ") for row in actual.values() if row["fault"] != "a hole")


def test_a_row_tells_speed_spread_and_how_far_from_pillow():
    images = example_jpegs(2, (64, 48))
    rows = measure_decoders(images, rounds=3)
    assert [row["variant"] for row in rows] == list(VARIANTS)
    for row in rows:
        if row["variant"] not in USABLE:
            assert row["status"] == missing_because(*VARIANTS[row["variant"]].needs)
            continue
        assert row["n"] == 3
        assert row["p20_ms"] <= row["median_ms"] <= row["p80_ms"]
        assert row["images_per_s"] == pytest.approx(1e3 / row["median_ms"])
        assert row["mb_per_s"] == pytest.approx(row["images_per_s"] * sum(map(len, images)) / 2e6)
        assert row["mean_difference"] <= decoders.MEAN_TOLERANCE


def test_swapped_colours_are_not_timed_and_the_others_are(monkeypatch):
    def unable(images):
        raise RuntimeError("no such chroma")

    swapped = Decoder(lambda images: [decoders._pillow(images[0])[:, :, ::-1]], ("pillow",))
    monkeypatch.setitem(VARIANTS, "swapped", swapped)
    monkeypatch.setitem(VARIANTS, "unable", Decoder(unable, ("pillow",)))
    with pytest.raises(Disagreement, match=r"'swapped' differs from Pillow by .* at most 2"):
        decoders.difference("swapped", [jpeg(smooth(32, 32))])
    wrong, failing, right = measure_decoders([jpeg(smooth(32, 32))], ["swapped", "unable", "Pillow"], rounds=2)
    assert wrong["status"].startswith("failed: 'swapped' differs from Pillow by ")
    assert failing["status"] == "failed: unable: not a readable JPEG (RuntimeError: no such chroma)"
    assert right["status"] == "ok" and right["n"] == 2
    assert set(wrong) == set(failing) == {"variant", "status"}


def test_one_broken_image_among_many_is_refused(photo):
    with pytest.raises(ImageError, match="Pillow: the data is empty"):
        decode_all("Pillow", [photo, b""])
    with pytest.raises(ImageError, match="image 1: truncated"):  # it is the caller's fault
        measure_decoders([photo, photo[:-2]], ["Pillow"])


def test_a_package_that_is_there_and_broken_is_a_row_that_says_so(monkeypatch, photo):
    def broken(images):
        raise ImportError("libGL.so.1: cannot open shared object file")

    monkeypatch.setitem(VARIANTS, "broken", Decoder(broken, ()))
    (row,) = measure_decoders([photo], ["broken"], rounds=1)
    assert row["status"] == "failed: broken: ImportError: libGL.so.1: cannot open shared object file"


def test_a_library_that_returns_nothing_is_named(monkeypatch, photo):
    monkeypatch.setitem(VARIANTS, "silent", Decoder(lambda images: [None], ("pillow",)))
    with pytest.raises(ImageError, match=r"silent: .*returns None"):
        decode("silent", photo)


def test_without_its_package_a_decoder_has_a_row_that_says_so(monkeypatch, photo):
    monkeypatch.setitem(sys.modules, "simplejpeg", None)
    with pytest.raises(ImageError, match="simplejpeg: not installed: simplejpeg"):
        decode("simplejpeg", photo)
    rows = measure_decoders([photo], ["simplejpeg", "Pillow"], rounds=1)
    assert [row["status"] for row in rows] == ["not installed: simplejpeg", "ok"]


def test_wrong_arguments_are_named(photo):
    with pytest.raises(ValueError, match="variant is 'pil'; valid: 'Pillow', "):
        decode("pil", photo)
    with pytest.raises(ValueError, match="images is empty"):
        measure_decoders([])
    with pytest.raises(ValueError, match="rounds is 0"):
        measure_decoders([photo], rounds=0)
