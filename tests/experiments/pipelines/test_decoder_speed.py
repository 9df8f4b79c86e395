import io
import sys

import numpy as np
import pytest
from PIL import Image

from helpers.experiments.pipelines import decoder_speed
from helpers.experiments.pipelines.decoder_speed import MEAN_TOLERANCE, measure_decoders
from helpers.lab import Disagreement
from helpers.lab.machine import missing_because
from helpers.pipelines.decoders import VARIANTS, Decoder
from helpers.pipelines.samples import example_jpegs

USABLE = [name for name, decoder in VARIANTS.items() if not missing_because(*decoder.needs)]


@pytest.fixture(scope="module")
def photo():
    return example_jpegs(1, (160, 120))[0]


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
        assert row["mean_difference"] <= MEAN_TOLERANCE


def test_swapped_colours_are_not_timed_and_the_others_are(monkeypatch, photo):
    def unable(data):
        raise RuntimeError("no such chroma")

    def swapped(data):
        return np.asarray(Image.open(io.BytesIO(data)))[:, :, ::-1]

    monkeypatch.setitem(VARIANTS, "swapped", Decoder(swapped, ("pillow",)))
    monkeypatch.setitem(VARIANTS, "unable", Decoder(unable, ("pillow",)))
    with pytest.raises(Disagreement, match=r"'swapped' differs from Pillow by .* at most 2"):
        decoder_speed.difference("swapped", [photo])
    wrong, failing, right = measure_decoders([photo], ["swapped", "unable", "Pillow"], rounds=2)
    assert wrong["status"].startswith("failed: 'swapped' differs from Pillow by ")
    assert failing["status"] == "failed: unable: not a readable JPEG (RuntimeError: no such chroma)"
    assert right["n"] == 2
    assert set(wrong) == set(failing) == {"variant", "status"}


def test_a_package_that_is_there_and_broken_is_a_row_that_says_so(monkeypatch, photo):
    def broken(data):
        raise ImportError("libGL.so.1: cannot open shared object file")

    monkeypatch.setitem(VARIANTS, "broken", Decoder(broken, ()))
    (row,) = measure_decoders([photo], ["broken"], rounds=1)
    assert row["status"] == "failed: broken: ImportError: libGL.so.1: cannot open shared object file"


def test_without_its_package_a_decoder_has_a_row_that_says_so(monkeypatch, photo):
    monkeypatch.setitem(sys.modules, "simplejpeg", None)
    rows = measure_decoders([photo], ["simplejpeg", "Pillow"], rounds=1)
    assert rows[0]["status"] == "not installed: simplejpeg" and rows[1]["n"] == 1
