"""Chapter 6's numbers, from rows as the experiments record them."""

import math

import pandas as pd
import pytest

from helpers.chapters import pipelines


def format_rows(**samples_per_s):
    row = {"kind": "image", "order": "sequential", "cached": "cold", "build_s": 1.0, "files": 4}
    row |= {"payload_bytes": 2e6, "bytes_allocated": 3e6, "mb_per_s": 5.0, "raw_s": 0.5, "subset_s": 0.1, "find_s": 0.2}
    row |= {"samples_per_s_p20": math.nan, "samples_per_s_p80": math.nan, "n": 3}
    return pd.DataFrame([row | {"format": name, "samples_per_s": speed} for name, speed in samples_per_s.items()])


def test_a_format_is_compared_with_small_files():
    rows = format_rows(files=1e4, mapped=1e5)
    numbers = pipelines.formats.of_rows(pd.concat([rows, rows.assign(cached="warm")]))
    assert f"{numbers.mapped}" == "10.0× (unpaired)" and float(numbers.largest_mapped) == pytest.approx(10)
    assert f"{numbers.files_us.cold}" == "100 µs" and f"{numbers.reader_mb_per_s}" == "5 MB/s"
    assert numbers.times["cold, in order, µs"].tolist() == pytest.approx([100, 10])
    assert numbers.times["format"].tolist() == ["small files", "mapped file"]
    assert numbers.sizes["disk / data"].tolist() == [1.5, 1.5]


def test_raw_reads_of_small_files_are_no_rate_of_the_disk():
    rows = format_rows(files=1e4, mapped=1e5, tfrecord=1e5).assign(raw_s=[2.0, 0.5, 0.25])
    numbers = pipelines.formats.of_rows(rows)
    assert (f"{numbers.least_raw}", f"{numbers.raw_mb_per_s}") == ("4", "8 MB/s")


def test_a_format_that_is_not_measured_has_numbers_that_say_so():
    numbers = pipelines.formats.of_rows(format_rows(mapped=1e5))
    assert "not measured" in f"{numbers.mapped}" and "not measured" in f"{numbers.largest_mapped}"
    assert numbers.tar.at_least(6).outcome == "not measured"
    assert math.isnan(numbers.times["speedup, in order"].iloc[0])


def test_idle_shares_are_of_plain_loaders_or_of_others():
    row = {"step_ms": 10.0, "prefetch": 2, "decode": "Pillow", "workers": 0, "sample_ms": 1.0}
    row |= {"idle_share": 0.6, "predicted_idle_share": 0.5, "samples_per_s": 1.0, "wait_ms": 1.0, "startup_s": 1.0}
    deep = row | {"prefetch": 8, "workers": 2, "idle_share": 0.1}
    numbers = pipelines.loader.of_rows(pd.DataFrame([row, row | {"workers": 2, "idle_share": 0.5}, deep]))
    assert (f"{numbers.no_workers}", f"{numbers.two_workers}", f"{numbers.prefetched}") == ("60%", "50%", "10%")
    assert len(numbers.lines["step of 10 ms"]) == 2
    assert float(numbers.median_error) == pytest.approx(10) and float(numbers.largest_error) == pytest.approx(40)
    assert not numbers.simplejpeg.measured


def test_a_metrics_growth_is_from_the_first_to_the_last_tenth():
    rows = [{"variant": "scikit-learn, each step", "step": at, "ms": at / 10, "until_s": at} for at in range(1, 21)]
    numbers = pipelines.metrics_cost.of_rows(pd.DataFrame(rows))
    assert float(numbers.sklearn_first) == pytest.approx(0.15) and float(numbers.sklearn_last) == pytest.approx(1.95)
    assert numbers.table["growth, µs/step"].tolist() == pytest.approx([100]) and not numbers.counts_last.measured


def test_lost_points_have_the_interval_of_their_seeds():
    row = {"budget": "epochs", "share": 0.3, "unforgettable_share": 0.9}
    points = {"least forgotten": [0.0, 0.2, 0.4], "random": [0.4, 0.5, 0.6]}
    rows = [row | {"variant": v, "seed": at, "lost_points": p} for v, ps in points.items() for at, p in enumerate(ps)]
    numbers = pipelines.forgetting.of_rows(pd.DataFrame(rows))
    assert float(numbers.least) == pytest.approx(0.2) and numbers.least.n == 3
    assert numbers.least.high == pytest.approx(0.2 + 4.303 * 0.2 / math.sqrt(3), rel=0.05)  # Student's t of 2 degrees
    assert numbers.least.at_most(0.5).outcome == "undecided" and numbers.random.at_most(1).outcome == "holds"
    assert not numbers.most.measured and numbers.seeds == 3
    assert numbers.table["least forgotten"].tolist() == ["0.20 ± 0.12"]


def test_a_loop_is_shown_at_its_largest_size():
    rows = [{"program": "p", "size": size, "variant": "CPython", "median_ms": 2.0 * size} for size in (1, 10)]
    rows += [rows[1] | {"variant": "numba", "median_ms": 1.0, "speedup": 20.0, "compile_s": 0.3, "turns": 99.0}]
    numbers = pipelines.jit.of_rows(pd.DataFrame(rows))
    assert numbers.table[["iterations", "CPython, ms", "numba's speedup"]].to_numpy().tolist() == [[10, 20.0, 20.0]]
