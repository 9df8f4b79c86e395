"""Chapter 5's experiments on the small preset."""

import pkgutil
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

from helpers.chapters import rush
from helpers.chapters.rush import bandwidth, setups, transformers_llama
from helpers.kernels import swaps
from helpers.rush import CPU_LADDER, LADDER, Setup, build_trainer
from helpers.rush.setup import CHANGES, LADDERS, START, stands_on


@pytest.mark.parametrize("e", [rush.ladder, rush.checkpointing])
def test_setups_are_measured_or_say_why_not(e, monkeypatch):
    (row,) = e.rows(e.configurations("small")[-1])
    assert row["status"] == "ok" and row["tokens_per_s"] > 0 and 1 < row["loss"] < 10
    monkeypatch.setattr(Setup, "missing_because", lambda setup, device: "no reason")
    assert e.rows(e.configurations("small")[-1])[0]["status"] == "not here: no reason"


@pytest.mark.parametrize(("preset", "kind", "rungs"), [("cpu", "cpu", CPU_LADDER), ("big-gpu", "cuda", LADDER)])
def test_the_ladder_is_that_of_the_machine(preset, kind, rungs, monkeypatch, made_up_gpu):
    if kind == "cuda":
        made_up_gpu((9, 0))
    asked, below, other_seed = [], [], []
    for module in (vars(setups), rush.ladder.measure.__globals__):
        run_apart = lambda s, baseline=None, **_: asked.append(s) or below.append(baseline) or {}  # noqa: E731
        monkeypatch.setitem(module, "run_apart", run_apart)
        monkeypatch.setitem(module, "apart", lambda _, fn, setup, seed: other_seed.append(setup))
        monkeypatch.setitem(module, "device", lambda: torch.device(kind))
    for config in rush.ladder.configurations(preset):
        rush.ladder.measure(**config)
    assert asked[: len(rungs)] == list(rungs.values())
    paired = [rungs[stands_on(name)].possible(torch.device(kind)) for name in rungs if name != START and kind == "cuda"]
    assert [setup for setup in below[: len(rungs)] if setup] == paired
    assert all(setup.model == asked[0].model for setup in asked)
    changing = [name for name, reason in LADDERS[kind][1].items() if reason == CHANGES]
    baselines = [rungs[stands_on(name, kind)].possible(torch.device(kind)) for name in changing]
    assert other_seed == baselines


def test_a_step_of_another_devices_ladder_is_a_row_that_says_so(monkeypatch):
    monkeypatch.setattr(setups, "device", lambda: torch.device("cpu"))
    config = {"model": "tiny", "sequence": 64, "step": "TF32"}
    assert rush.ladder.missing_because(config) == "not here: no step of the ladder on cpu"


def test_a_rung_of_a_cpu_runs_in_a_process_with_its_allocator(monkeypatch):
    apart = []
    monkeypatch.setattr(setups, "in_fresh_process", lambda *given, **options: apart.append((given, options)) or {})
    setup = CPU_LADDER["huge pages"]
    rush.ladder.measure(model=setup.model, sequence=setup.sequence, step="huge pages")
    ((given, options),) = apart
    assert given == (setups.run, setup)
    assert options["environment"] == setup.environment
    assert setup.environment["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=1"


def test_a_peer_is_timed_beside_ours_and_their_losses_are_of_the_same_tokens(monkeypatch):
    monkeypatch.setattr(transformers_llama, "training_step", lambda variant, setup: build_trainer(setup).step)
    row = rush.peers.measure(model="tiny", sequence=64, variant="transformers")
    assert row["baseline"] == "ours"
    assert 1 / 3 < row["ratio"] / (row["median_ms"] / row["baseline_ms"]) < 3  # of other moments
    assert row["loss"] == pytest.approx(row["ours_loss"], abs=1e-2)


@pytest.mark.parametrize("name", ["norms", "adam", "lecture"])
def test_kernels_are_compared_and_those_that_lack_something_say_so(name, monkeypatch):
    monkeypatch.setattr(swaps, "VARIANTS", [variant for variant in swaps.VARIANTS if variant != swaps.COMPILED])
    monkeypatch.setattr(bandwidth, "large_copy", lambda on_cpu: 1)
    ahead = []
    e = getattr(rush, name)
    monkeypatch.setitem(e.measure.__globals__, "queue_ahead", lambda: ahead.append(1))
    rows = pd.DataFrame(e.rows(e.configurations("small")[0]))
    ran = rows[rows["status"] == "ok"]
    assert ran["median_ms"].gt(0).all() and not ran["variant"].duplicated().any()
    assert rows.loc[rows["status"] != "ok", "status"].str.match("not installed: |not here: ").all()
    assert bool(ahead) == (name != "lecture")  # kernels are timed, not their launches
    assert name != "lecture" or ran["peak_gib"].gt(0).all()


def test_strategies_are_trained_by_one_set_of_ranks_and_those_that_do_not_fit_them_say_so(monkeypatch):
    row = {"step_ms": 1.0, "parameter_bytes": 1, "gradient_bytes": 1, "optimizer_bytes": 2, "losses": [7.0, 6.0]}
    module = rush.distributed.measure.__globals__
    monkeypatch.setitem(module, "measure_ranks", lambda jobs, _: [row | {"strategy": job.strategy} for job in jobs])
    (alone,) = rush.distributed.rows({"ranks": 1})
    assert (alone["strategy"], alone["last_loss"]) == ("single", 6.0)
    rows = pd.DataFrame(rush.distributed.rows({"ranks": 3})).set_index("strategy")
    assert set(rows.index) == {"ddp", "zero2", "zero3"}
    assert rows["status"].str.startswith("not here: ").all()


def test_the_allocator_is_tried_in_processes_that_start_with_it(monkeypatch):
    sides, module = [], rush.allocator.measure.__globals__
    monkeypatch.setitem(module, "trial", lambda *given, **_: sides.extend(given) or SimpleNamespace(row=dict))
    rush.allocator.measure(**rush.allocator.configurations("small")[0])
    given, kept = sides
    assert (given.name, dict(given.environment), kept.name) == ("default", {}, "kept")
    assert kept.environment == CPU_LADDER[START].environment != {}
    pkgutil.resolve_name(kept.function)(**kept.arguments)()


def test_on_a_cpu_without_bf16_a_rung_in_it_is_not_emulated(monkeypatch):
    monkeypatch.setattr("helpers.lab.machine.multiplies_half", lambda: False)
    said = {step: setups.missing(model="tiny", sequence=64, step=step) for step in (START, "mixed precision")}
    assert said[START] == "" and "needs a CPU with instructions for bf16" in said["mixed precision"]
