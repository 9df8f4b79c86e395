import contextlib
import dataclasses
import gc
import os
import subprocess
import sys
import time

import pytest
import torch

from helpers import book
from helpers.book import measure, runner, store
from helpers.book.table import Table, Worth, table
from helpers.lab import Disagreement, machine
from helpers.lab.arguments import PRESETS
from helpers.lab.files import project_root
from helpers.lab.machine import OthersLoad, device_name, slug

CALLS = []


def square(size):
    """Squares."""
    CALLS.append(size)
    if size == 3:
        raise torch.OutOfMemoryError("CUDA out of memory")
    return {"area": size * size}


def variants(size):
    return [{"variant": "a", "time_ms": 1.0}, {"variant": "b", "time_ms": 2.0}]


SIZES = [{"size": 2}, {"size": 3}, {"size": 4}]
SQUARES = Table("chapter", "squares", square, {"small": SIZES[:1], "cpu": SIZES}, version=1)


class Quiet(contextlib.nullcontext):
    """A machine on which nothing else runs."""

    cores = 0.0

    def __enter__(self):
        return self


@pytest.fixture(autouse=True, scope="module")
def _small_heap():
    """Each row collects garbage, which takes a second where other tests have imported much."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _forget_calls(monkeypatch):
    CALLS.clear()
    monkeypatch.setattr(machine, "OthersLoad", Quiet)


def read(e, results):
    return book.read(slug(device_name()), e.chapter, e.table, results)


def test_calling_an_experiment_measures_its_preset():
    assert SQUARES("small").to_dict("records") == [{"size": 2, "status": "ok", "area": 4}]


def test_an_unknown_preset_lists_the_valid_ones():
    with pytest.raises(ValueError, match="unknown preset 'huge'; valid: small, cpu"):
        SQUARES("huge")


def test_out_of_memory_is_a_row_and_the_others_are_kept(tmp_path):
    measure([SQUARES], "cpu", results=tmp_path)
    table = read(SQUARES, tmp_path)
    assert table["status"].tolist() == ["ok", "out of memory", "ok"]
    assert table["area"].fillna(0).tolist() == [4, 0, 16]


def test_every_row_says_where_it_comes_from_and_presets_do_not_replace_each_other(tmp_path):
    measure([SQUARES], "small", results=tmp_path)
    (row,) = read(SQUARES, tmp_path).to_dict("records")
    assert row["torch"] == torch.__version__
    assert row["gpu"] == device_name()
    assert all(row[name] for name in store.PROVENANCE)
    measure([SQUARES], "cpu", results=tmp_path)
    assert sorted(read(SQUARES, tmp_path)["preset"]) == ["cpu", "cpu", "cpu", "small"]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (Disagreement("'b' differs from 'a'"), "failed: 'b' differs from 'a'"),
        (RuntimeError("no kernel for this\nat line 1"), "failed: RuntimeError: no kernel for this"),
        (RuntimeError(f"{project_root()}/data/a.py is broken"), "failed: RuntimeError: data/a.py is broken"),
    ],
)
def test_an_error_is_a_failed_row_which_is_tried_again_and_the_others_go_on(error, status, tmp_path, capsys):
    done = measure([breaking(error)], "cpu", results=tmp_path)
    assert (done.measured, done.failed) == (3, 1)
    assert read(breaking(error), tmp_path)["status"].tolist() == [status, "out of memory", "ok"]
    assert ("raise error" in capsys.readouterr().err) == ("RuntimeError" in status)  # with its traceback
    assert measure([breaking(error)], "cpu", results=tmp_path).measured == 1


def breaking(error):
    def breaks(size):
        if size == 2:
            raise error
        return square(size)

    return Table("chapter", "breaks", breaks, SQUARES.presets, 1)


def test_nothing_is_recorded_of_a_device_that_is_lost(tmp_path, monkeypatch):
    def lost():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(runner, "synchronize", lost)
    with pytest.raises(RuntimeError, match="no kernel for this"):
        measure([breaking(RuntimeError("no kernel for this"))], "cpu", results=tmp_path)
    assert not CALLS and not store.path(slug(device_name()), "chapter", "breaks", tmp_path).exists()


def test_a_new_method_makes_old_records_stale(tmp_path):
    measure([SQUARES], "cpu", results=tmp_path)
    newer = Table("chapter", "squares", square, SQUARES.presets, version=2)
    assert measure([newer], "cpu", results=tmp_path).measured == 3
    assert read(newer, tmp_path)["method"].tolist() == ["2"] * 3


def test_a_table_whose_next_row_would_take_too_long_gives_way_to_the_others(tmp_path, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(runner.time, "perf_counter", lambda: clock[0])

    def slow(size):
        clock[0] += 60.0
        return square(size)

    takes_long = Table("chapter", "slow", slow, SQUARES.presets, 1)
    done = measure([takes_long, SQUARES], "cpu", results=tmp_path, seconds=100.0)
    assert CALLS == [2, 2, 3, 4]
    assert (done.measured, done.left) == (4, 2)


def test_a_row_holds_the_seconds_that_its_configuration_took(tmp_path, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(runner.time, "perf_counter", lambda: clock[0])

    def slow(size):
        clock[0] += 1.5 * size
        return variants(size)

    measure([Table("chapter", "slow", slow, {"cpu": SIZES[:2]}, 1)], "cpu", results=tmp_path)
    file = store.path(slug(device_name()), "chapter", "slow", tmp_path)
    assert [row["seconds"] for row in book.read_rows(file)] == ["3", "3", "4.5", "4.5"]


def test_one_configuration_may_give_several_rows(tmp_path):
    several = Table("chapter", "variants", variants, {"cpu": SIZES[:2]}, version=1)
    measure([several], "cpu", results=tmp_path)
    assert measure([several], "cpu", results=tmp_path).fresh == 2
    assert read(several, tmp_path)["variant"].tolist() == ["a", "b", "a", "b"]


def test_a_peer_that_has_been_installed_since_is_measured(tmp_path):
    def with_peer(size):
        CALLS.append(size)
        return {"status": "not installed: liger-kernel"}

    e = Table("chapter", "peer", with_peer, {"cpu": SIZES[:1]}, version=1)
    measure([e], "cpu", results=tmp_path)
    measure([e], "cpu", results=tmp_path)
    assert len(CALLS) == 1
    store.replace(
        store.path(slug(device_name()), "chapter", "peer", tmp_path),
        [read(e, tmp_path).iloc[0].to_dict() | {"status": "not installed: torch"}],
        ["size"],
    )
    measure([e], "cpu", results=tmp_path)
    assert len(CALLS) == 2


def test_a_folder_that_cannot_be_written_is_found_before_anything_is_measured(tmp_path):
    (tmp_path / slug(device_name())).mkdir()
    (tmp_path / slug(device_name()) / "late").write_text("a file in place of a chapter's folder")
    late = Table("late", "squares", square, SQUARES.presets, version=1)
    with pytest.raises(OSError, match="late"):
        measure([SQUARES, late], "cpu", results=tmp_path)
    assert CALLS == []


def test_two_measurements_at_once_are_refused(tmp_path):
    def measured_inside(size):
        """Another `measure` while this one runs."""
        with pytest.raises(BlockingIOError, match="another `measure` runs on this machine"):
            measure([SQUARES], "cpu", results=tmp_path)
        return square(size)

    outer = Table("chapter", "outer", measured_inside, {"cpu": SIZES[:1]}, version=1)
    assert measure([outer], "cpu", results=tmp_path).failed == 0
    assert CALLS == [2]
    assert measure([SQUARES], "cpu", results=tmp_path).measured == 3  # the lock is free again


def test_a_row_beside_slow_products_is_noisy(monkeypatch):
    rates = iter([0.2, 0.12])
    monkeypatch.setattr(runner.ceilings, "rate_beside", lambda: next(rates))
    e = Table("chapter", "rates", lambda: {"status": "ok"}, {"small": [{}]}, version=1)
    before = [0.2, 0.21, 0.2]
    (row,), excess = runner.measured_rows(e, {}, rates=before)
    assert (row["matmul_tflops"], row["noisy"], excess) == (0.2, "", 0.0)
    (row,), excess = runner.measured_rows(e, {}, rates=before)
    assert row["noisy"] == "matrix products ran at 0.60 of their usual rate" and excess > 1
    assert before == [0.2, 0.21, 0.2, 0.2, 0.12]


def test_a_noisy_row_is_measured_again_after_the_others_and_the_quietest_attempt_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "AGAIN_SHARE", 1e6)
    spreads, order = {1: iter([2.0, 1.5, 1.6]), 2: iter([1.0]), 3: iter([2.0, 1.1])}, []

    def noisy(size):
        order.append(size)
        return {"median_ms": 1.0, "p20_ms": 1.0, "p80_ms": next(spreads[size])}

    e = Table("chapter", "noise", noisy, {"cpu": [{"size": size} for size in spreads]}, version=1)
    progress = measure([e], "cpu", results=tmp_path)
    table = read(e, tmp_path).set_index("size")
    assert order == [1, 2, 3, 1, 3, 1] and progress.measured == 3
    assert table["attempts"].to_dict() == {1: 3, 2: 1, 3: 2}
    assert table["p80_ms"].to_dict() == {1: 1.5, 2: 1.0, 3: 1.1}
    assert "p80 is 1.50 times p20" in table["noisy"][1] and table["noisy"][3] == ""


def test_a_repeat_that_fails_does_not_replace_a_noisy_row(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "AGAIN_SHARE", 1e6)
    spreads = iter([2.0])
    e = Table("chapter", "noise", lambda: {"p20_ms": 1.0, "p80_ms": next(spreads)}, {"cpu": [{}]}, version=1)
    assert measure([e], "cpu", results=tmp_path).failed == 0
    assert read(e, tmp_path)[["status", "p80_ms"]].values.tolist() == [["ok", 2.0]]


def test_repeats_take_a_share_of_the_time_at_most(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "AGAIN_SHARE", -1.0)
    e = Table("chapter", "noise", lambda: {"p20_ms": 1.0, "p80_ms": 2.0}, {"cpu": [{}]}, version=1)
    measure([e], "cpu", results=tmp_path)
    assert read(e, tmp_path)["attempts"].tolist() == [1]


def test_a_spread_that_is_of_the_work_is_no_noise():
    e = Table("chapter", "batches", lambda: {"p20_ms": 1.0, "p80_ms": 9.0}, {}, version=1, same_work=False)
    (row,), _ = runner.measured_rows(e, {})
    assert "p80" not in row["noisy"]


@pytest.mark.parametrize(("timed", "noisy"), [(True, "others used 9 cores"), (False, "")])
def test_a_row_measured_beside_others_work_says_so_but_a_loss_is_as_good(monkeypatch, timed, noisy):
    monkeypatch.setattr(Quiet, "cores", 9.0)
    (row,), _ = runner.measured_rows(dataclasses.replace(SQUARES, timed=timed), {"size": 2})
    assert (row["load"], row["noisy"]) == (9.0, noisy)


def test_what_this_process_started_counts_as_its_own_work():
    spin = [sys.executable, "-c", "while True: pass"]
    with OthersLoad() as own:
        child = subprocess.Popen(spin)
        limit = time.monotonic() + 300
        while own._clocks()[2] - sum(os.times()[:4]) <= 0.1 and time.monotonic() < limit:
            time.sleep(0.01)
    child.kill()
    child.wait()
    assert time.monotonic() < limit
    assert own.cores is not None


def test_each_class_of_machine_has_its_sizes():
    def three(size):
        """Sizes."""

    three.__module__ = "helpers.chapters.chapter.three"
    of_both = table(small=[{"size": 1}], cpu=[{"size": 2}], big_gpu=[{"size": 3}])(three)
    assert [of_both.configurations(name)[0]["size"] for name in PRESETS] == [1, 2, 3, 3]
    of_gpus = table(small=[{"size": 1}], big_gpu=[{"size": 3}])(three)
    assert of_gpus.configurations("cpu") == []
    of_all = table(small=[{"size": 1}], cpu=[{"size": 2}])(three)
    assert of_all.configurations("big-gpu") == [{"size": 2}]


@pytest.mark.parametrize(("spread", "recorded"), [(1.1, 1.1), (1.9, 2.0), (None, 2.0)])
def test_with_seconds_left_a_noisy_row_is_measured_once_more_and_replaced_if_it_is_quiet(
    spread, recorded, tmp_path, monkeypatch
):
    monkeypatch.setattr(runner, "ATTEMPTS", 1)
    spreads = iter([2.0] if spread is None else [2.0, spread])
    e = Table("chapter", "noise", lambda: {"p20_ms": 1.0, "p80_ms": next(spreads)}, {"cpu": [{}]}, version=1)
    measure([e], "cpu", results=tmp_path)
    measure([e], "cpu", results=tmp_path)  # without seconds it is left as it is
    assert measure([e], "cpu", results=tmp_path, seconds=60).left == 0
    assert read(e, tmp_path)["p80_ms"].tolist() == [recorded]
    assert [bool(noise) for noise in read(e, tmp_path)["noisy"]] == [recorded != 1.1]


def test_rows_name_their_run_and_a_table_of_one_run_is_begun_only_if_all_of_it_fits(tmp_path):
    ladder = dataclasses.replace(SQUARES, worth=Worth(9, "Why?", cpu=10, one_run=True))
    assert measure([ladder], "cpu", results=tmp_path, seconds=29).measured == 0 == len(CALLS)
    assert measure([ladder], "cpu", results=tmp_path, seconds=40).measured == 3
    assert read(ladder, tmp_path)["run"].tolist() == [machine.BEGAN] * 3
