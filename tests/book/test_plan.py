"""What would be measured, for how long and in how much memory, is told without measuring."""

from dataclasses import replace

import pytest
import torch

from helpers.book import store
from helpers.book.plan import in_order, lines, minutes, missing, plan, total, within
from helpers.book.table import Table, Worth
from helpers.chapters import select
from helpers.cli import main
from helpers.doctor import findings
from helpers.lab import cpu, machine
from helpers.lab.machine import device_name, slug
from helpers.rush import LADDER

ORIGIN = {
    "driver": "none",
    "torch": torch.__version__,
    "cuda": "none",
    "date": "2026-01-02",
    "commit": "0",
    "method": 1,
}


def never(size):
    """Nothing is measured."""
    raise AssertionError


SIZES = {"small": [{"size": 1}], "cpu": [{"size": size} for size in (2, 3, 4)], "gpu": [{"size": 9}], "big-gpu": []}
TABLE = Table("chapter", "table", never, SIZES, version=1)


@pytest.fixture
def record(results):
    def write(preset: str, size: int, name: str = "CPU Other", status: str = "ok", **more) -> None:
        row = {"size": size, "status": status, "gpu": name, "preset": preset} | ORIGIN | more
        store.replace(store.path(slug(name), "chapter", "table"), [row], ["size", "preset"])

    return write


def test_the_time_is_that_of_the_same_configurations_else_the_mean_of_the_class(record):
    record("cpu", 2, seconds=60)
    record("cpu", 3, seconds=120, peak_gib=1.5)
    record("small", 1, seconds=9999, peak_gib=9)
    planned = plan(TABLE, "cpu")
    assert (planned.missing, planned.fresh, planned.gib) == (3, 0, 1.5)
    assert planned.seconds == 60 + 120 + 90
    record("cpu", 3, name=device_name(), seconds=60)  # two machines: their mean; and nothing is left to do here
    planned = plan(TABLE, "cpu")
    assert (planned.missing, planned.fresh, planned.seconds) == (2, 1, 60 + 75)


def test_a_time_that_nobody_recorded_is_unknown(record):
    record("cpu", 2)  # as before times were recorded
    record("cpu", 3, seconds=0.01, status="needs CUDA")
    planned = plan(TABLE, "cpu")
    assert planned.seconds is None and minutes(planned.seconds) == "unknown"
    assert total([planned]).endswith("minutes unknown: no machine of the class has recorded how long these tables take")
    both = [planned, plan(Table("chapter", "other", never, SIZES, 1), "small")]
    assert "unknown" in total(both)


def test_several_rows_of_a_configuration_count_its_time_once(results):
    rows = [{"size": 2, "variant": v, "seconds": 60, "status": "ok", "gpu": "CPU A", "preset": "cpu"} for v in "ab"]
    store.replace(store.path("cpu-a", "chapter", "table"), [row | ORIGIN for row in rows])
    assert plan(TABLE, "cpu").seconds == 3 * 60


def worth(name: str, row: float, seconds: float, **headline) -> Table:
    e = Table("chapter", name, never, SIZES, version=1)
    return replace(e, worth=Worth(row, "Why?", cpu=seconds, gpu=seconds, headline=headline))


def test_rows_come_by_worth_a_second_and_headlines_before_others(results):
    tables = [worth("dear", 50, 100), worth("cheap", 10, 2), worth("ladder", 90, 30, size=(3,))]
    order = [(p.experiment.table, p.config["size"]) for p in in_order(plan(e, "cpu") for e in tables)]
    cheap, dear = ([(name, size) for size in (2, 3, 4)] for name in ("cheap", "dear"))
    assert order == [*cheap, ("ladder", 3), *dear, ("ladder", 2), ("ladder", 4)]


def test_what_does_not_fit_gives_way_to_smaller_rows_and_is_named(results):
    plans = [plan(e, "cpu") for e in (worth("long", 90, 40), worth("short", 1, 8))]
    rows = in_order(plans)
    assert [p.experiment.table for p in within(rows, 100)] == ["long", "long", "short", "short"]
    *_, said, _ = lines(plans, seconds=100)
    assert said == "in 100 s: 4 configurations; 0.8 minutes remain; all in 2 runs"
    total_line, *tables = missing(rows[2:4])
    assert total_line == "missing: 2 rows, 0.8 minutes"
    assert tables == ["  chapter/long: 1 rows, 0.7 minutes", "  chapter/short: 1 rows, 0.1 minutes"]
    assert not missing([])


def test_a_table_of_one_run_is_measured_whole_in_its_own_order_or_not_at_all(record):
    ladder = worth("table", 90, 30, size=(3,))
    ladder = replace(ladder, worth=replace(ladder.worth, one_run=True))
    for size in (2, 3):
        record("cpu", size, name=device_name(), seconds=30)
    other, rows = worth("other", 1, 30), [plan(ladder, "cpu")]
    assert [job.config["size"] for job in in_order(rows)] == [2, 3, 4]
    assert plan(replace(ladder, worth=Worth(90, "Why?")), "cpu").missing == 1
    record("cpu", 2, name=device_name(), run=machine.BEGAN)
    assert [job.config["size"] for job in plan(ladder, "cpu").jobs] == [3, 4]
    record("cpu", 4, name=device_name(), status="failed: it broke")
    assert [job.config["size"] for job in in_order([plan(ladder, "cpu")])] == [4]  # the others are of one run
    both = in_order([*rows, plan(other, "cpu")])
    assert [job.experiment.table for job in within(both, 80)] == ["other", "other"]
    assert [job.experiment.table for job in within(both, 100)] == ["table"] * 3
    record("cpu", 4, name=device_name(), seconds=30)
    assert plan(ladder, "cpu").missing == 0  # of whichever run


def test_noisy_rows_come_again_after_all_that_is_missing(record):
    noisy, other = worth("table", 90, 1), worth("other", 1, 50)
    for size in (2, 3, 4):
        record("cpu", size, name=device_name(), seconds=1, noisy="others used 2 cores" if size == 3 else "")
    assert plan(noisy, "cpu").missing == 0 and not plan(noisy, "cpu").again
    plans = [plan(e, "cpu", again=True) for e in (noisy, other)]
    assert plans[0].missing == 0
    *first, last = in_order(plans)
    assert [job.experiment.table for job in first] == ["other"] * 3
    assert (last.experiment.table, last.config["size"], last.worth) == ("table", 3, 9)
    said = lines(plans, seconds=110)
    assert said[3:7] == [
        "run 1: 101 s",
        "  chapter/other: 2 rows, 100 s",
        "  chapter/table: 1 noisy rows, 1 s",
        "run 2: 50 s",
    ]
    assert not plan(replace(noisy, timed=False), "cpu", again=True).again


def test_a_declared_time_counts_until_a_row_of_the_class_is_recorded(record):
    declared = worth("table", 1, 50)
    assert plan(declared, "cpu").seconds == 150 and plan(declared, "gpu").seconds == 50
    record("cpu", 2, seconds=10)
    assert plan(declared, "cpu").seconds == 30 and plan(declared, "gpu").seconds == 50


def test_what_is_simulated_tells_no_memory(record):
    record("cpu", 2, seconds=60, peak_gib=80.0)
    assert plan(replace(TABLE, memory_here=False), "cpu").gib is None


def test_a_dry_run_measures_nothing(tmp_path, capsys):
    command = ["measure", "batching/padding", "swiglu/accuracy", "--preset", "small", "--results", str(tmp_path)]
    assert main([*command, "--dry-run"]) == 0
    head, *tables, said = capsys.readouterr().out.splitlines()
    assert head.split() == ["table", "preset", "missing", "fresh", "worth", "GiB", "minutes"]
    assert ["batching/padding", "small", "1", "0", "2", "-", "unknown"] in [line.split() for line in tables]
    assert "configurations missing, 0 fresh; minutes unknown" in said
    assert not list(tmp_path.iterdir())

    assert main(command[:2] + command[3:]) == 0
    capsys.readouterr()
    assert main([*command, "--dry-run"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("batching/padding")]
    assert line.split()[2:4] == ["0", "1"]


def test_a_table_that_took_more_memory_than_there_is_says_so(results, capsys, monkeypatch):
    row = {"batch": 16, "status": "ok", "gpu": "CPU Server", "preset": "cpu", "peak_gib": 12.5} | ORIGIN
    store.replace(store.path("cpu-server", "swiglu", "sweep"), [row])
    monkeypatch.setattr("helpers.fit.this_memory_gib", lambda: 7.6)  # a laptop of 8 GB
    assert main(["measure", "swiglu", "--preset", "cpu", "--dry-run"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "more memory than the 7.6 GiB here" in line]
    assert line.split()[0] == "swiglu/sweep" and "12.50" in line


MACHINES = {  # compute capability and GiB; none: a CPU
    "T4": ((7, 5), 15.6, "gpu"),
    "laptop": (None, None, "cpu"),
    "A100": ((8, 0), 39.4, "big-gpu"),
    "Mac": (None, None, "cpu"),
}


@pytest.fixture
def as_if_on(made_up_gpu, monkeypatch, results):
    """Be on one of the machines; whatever would use its device raises."""

    def used(*_, **__):
        raise AssertionError("planning used the device")

    def be(name: str) -> str:
        capability, gib, preset = MACHINES[name]
        if capability:
            made_up_gpu(capability, gib, ("sm_75", "sm_80", "sm_90"))
            monkeypatch.setattr(torch.cuda, "_lazy_init", used)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: name == "Mac")
        monkeypatch.setattr(cpu, "name", lambda: {"Mac": "Apple M2"}.get(name, "Made-up"))
        monkeypatch.setattr(machine, "_output", lambda *_: "1.0")  # no nvidia-smi, no git
        monkeypatch.setattr(Table, "rows", used)
        return preset

    return be


@pytest.mark.parametrize("name", ["T4", "Mac"])
def test_each_machine_is_told_what_it_would_run(name, as_if_on, capsys):
    preset = as_if_on(name)
    assert main(["measure", "--dry-run"]) == 0
    _head, *tables, said = capsys.readouterr().out.splitlines()
    shown = [line.split() for line in tables if not line.startswith(" ")]
    assert sorted(line[0] for line in shown) == sorted(e.name for e in select([]))
    assert all(line[1] == preset for line in shown)
    assert sum(int(line[2]) for line in shown) == int(said.split()[0]) > 300
    assert dict(findings())["measure would run"] == f"{preset} sizes, {said}"


def test_a_plan_for_a_gpu_that_is_not_there_has_its_order_and_its_torch(results, capsys):
    row = {"step": "TF32", "status": "ok", "gpu": "NVIDIA H200", "preset": "big-gpu"} | ORIGIN
    store.replace(store.path("nvidia-h200", "rush", "ladder"), [row | {"torch": "2.11.0+cu130"}])
    command = ["measure", "--dry-run", "--machine", "nvidia-h200", "--seconds", "1500"]  # where all fits into one
    assert main(command) == 0
    head, *said = capsys.readouterr().out.splitlines()
    assert head.startswith("as if on h200")
    assert "  1 can't run here: F.linear_cross_entropy isn't in torch 2.11.0+cu130" in said
    assert "; 1 of the missing can't run here; " in said[-1]
    runs = said[said.index(next(line for line in said if line.startswith("run 1: "))) :]
    tables = list(dict.fromkeys(line.split(":")[0].strip() for line in runs if line.startswith("  ")))
    asked = "rush/ladder rush/without summary/time_to_loss rush/device_time compilers/fusion amp/quality "
    asked += "batching/training swiglu/sweep rush/checkpointing"
    declared = asked.split()
    assert [name for name in tables if name in declared] == declared
    assert tables[-1] == "compilers/latency"
    assert not {"pipelines/formats", "tool/loops", "summary/stages"} & {*tables}
    (ladder,) = [line for line in runs if line.startswith("  rush/ladder")]
    assert runs.index(ladder) == 1 and ladder.startswith(f"  rush/ladder: {len(LADDER)} rows")
    assert all(int(line.split()[2]) <= 1500 for line in runs if line.startswith("run "))
    assert hasattr(torch.nn.functional, "linear_cross_entropy") and not torch.cuda.is_available()


def test_a_plan_is_only_for_a_card_that_is_known(results, capsys):
    assert main(["measure", "--dry-run", "--machine", "abacus"]) == 2
    assert "no card is known by the name of 'abacus'" in capsys.readouterr().err
    assert main(["measure", "--machine", "nvidia-h200"]) == 2
    assert "--machine goes with --dry-run" in capsys.readouterr().err


def left_out(targets: list[str]) -> dict[str, dict[str, int]]:
    return {planned.experiment.name: planned.left_out for planned in map(plan, select(targets))}


def test_what_a_gpu_without_bf16_and_tf32_cannot_run_says_why(as_if_on):
    as_if_on("T4")
    no_bf16 = "needs a GPU with bf16 units (compute capability 8.0)"
    ladder = left_out(["rush/ladder"])["rush/ladder"]
    assert ladder["not here: precision 'tf32': needs a GPU of compute capability 8.0"] == 1
    assert any("bf16" in reason for reason in ladder)
    assert plan(*select(["swiglu/peers"])).missing == 4  # and the two of them in fp16 run
    assert left_out(["swiglu/peers"]) == {"swiglu/peers": {no_bf16: 2}}


def test_without_triton_the_compiled_steps_say_so(as_if_on, monkeypatch, capsys):
    as_if_on("A100")
    monkeypatch.setattr(machine, "installed", lambda peer: None if peer == "triton" else "1.0")
    reasons = left_out(["rush/ladder"])["rush/ladder"]
    assert set(reasons) == {reason for reason in reasons if reason.endswith("not installed: triton")} != set()
    assert main(["measure", "rush/ladder", "--dry-run"]) == 0
    assert "can't run here: " in capsys.readouterr().out


def test_a_cpu_has_no_rows_that_need_cuda(as_if_on):
    as_if_on("laptop")
    assert not [reason for reasons in left_out([]).values() for reason in reasons if "CUDA" in reason]


def test_a_row_that_cannot_run_says_what_was_planned(made_up_gpu):
    made_up_gpu((7, 5), gib=15)
    e = Table("chapter", "table", never, SIZES, 1, missing=lambda size: "too large" if size > 2 else "")
    assert e.missing_because({"size": 2}) == ""
    assert e.rows({"size": 3}) == [{"size": 3, "status": "too large"}]
