import io
import sys
from importlib import import_module

import numpy as np
from PIL import Image

from helpers.chapters.pipelines.decoding import MEAN_TOLERANCE, decoding
from helpers.lab.machine import missing_because
from helpers.pipelines import decoders
from helpers.pipelines.decoders import VARIANTS, Decoder

MODULE = import_module("helpers.chapters.pipelines.decoding")


def test_a_row_tells_speed_spread_and_how_far_from_pillow():
    rows = decoding.measure(160, 120)
    assert [row["variant"] for row in rows] == list(VARIANTS)
    for row in rows:
        if reason := missing_because(*VARIANTS[row["variant"]].needs):
            assert row["status"] == reason
            continue
        assert row["p20_ms"] <= row["median_ms"] <= row["p80_ms"]
        assert row["mean_difference"] <= MEAN_TOLERANCE


def test_a_decoder_that_cannot_run_fails_or_swaps_colours_is_not_timed_and_the_others_are(monkeypatch):
    def unable(data):
        raise RuntimeError("no such chroma")

    def broken(data):
        raise ImportError("libGL.so.1: cannot open shared object file")

    def swapped(data):
        return np.asarray(Image.open(io.BytesIO(data)))[:, :, ::-1]

    chosen = {name: Decoder(fn, ()) for name, fn in (("swapped", swapped), ("unable", unable), ("broken", broken))}
    chosen |= {name: VARIANTS[name] for name in ("simplejpeg", "Pillow")}
    monkeypatch.setattr(MODULE, "VARIANTS", chosen)
    monkeypatch.setattr(decoders, "VARIANTS", chosen)
    monkeypatch.setitem(sys.modules, "simplejpeg", None)
    *others, pillow = decoding.measure(160, 120)
    assert all(set(row) == {"variant", "status"} for row in others) and pillow["median_ms"] > 0
    of_swapped, *statuses = [row["status"] for row in others]
    assert of_swapped.startswith("failed: 'swapped' differs from Pillow by ") and of_swapped.endswith("are allowed")
    assert statuses == [
        "failed: unable: not a readable JPEG (RuntimeError: no such chroma)",
        "failed: broken: ImportError: libGL.so.1: cannot open shared object file",
        "not installed: simplejpeg",
    ]
