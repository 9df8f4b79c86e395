"""The command line as a user types it: what it prints, where, and how it exits."""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

from helpers import book
from helpers.book import store
from helpers.chapters import chapters, select, tables_of
from helpers.cli import COMMANDS, main, parser, shared
from helpers.lab.arguments import PRESETS
from helpers.lab.machine import device_name, slug

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["measure", "nothing"], "unknown chapter 'nothing'; valid: "),
        (["measure", "swiglu/nothing"], "unknown table 'nothing' in chapter swiglu; valid: ceilings, peers"),
        (["measure", "--preset", "huge"], "invalid choice: 'huge' (choose from"),
        (["measure", "--seconds", "-3"], "'-3' is not a number above 0"),
        (["measure", "--hurry"], "unrecognized arguments: --hurry"),
        (["report", "--no-execute", "--save-notebooks"], "not allowed with argument --no-execute"),
        (["dance"], "invalid choice: 'dance' (choose from"),
    ],
)
def test_a_wrong_command_is_one_line_that_lists_what_is_valid(arguments, message, capsys):
    try:
        code = main(arguments)
    except SystemExit as end:
        code = end.code
    out, err = capsys.readouterr()
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1
    assert message in err


def test_alone_it_prints_its_commands_a_line_each(capsys):
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines[:-1]} == set(COMMANDS)
    assert all(len(line) <= 120 and len(line.split()) > 3 for line in lines)


def test_measure_records_goes_on_and_begins_nothing_beside_a_damaged_table(tmp_path, capsys):
    command = ["measure", "batching/padding", "--preset", "small", "--results", str(tmp_path)]
    assert main(command) == 0
    (file,) = tmp_path.rglob("padding.csv")
    out = capsys.readouterr().out
    assert "1 configurations measured, 0 were there, 0 left" in out
    assert f"rows in {file.parent.parent}\n" in out
    assert main(command) == 0
    assert "0 configurations measured, 1 were there, 0 left" in capsys.readouterr().out

    file.write_text(file.read_text()[:-20])
    damaged = file.read_bytes()
    assert main(["measure", "amp/exponents", *command[1:]]) == 1
    assert f"{file}, line " in capsys.readouterr().err
    assert not list(tmp_path.rglob("exponents.csv")) and file.read_bytes() == damaged


@pytest.mark.long
def test_a_kill_in_the_middle_keeps_every_finished_row(tmp_path, capsys):
    measure = ["measure", "swiglu/sweep", "--preset", "small", "--results", str(tmp_path)]
    running = subprocess.Popen([sys.executable, "-m", "helpers", *measure], stderr=subprocess.DEVNULL)
    while not (files := list(tmp_path.rglob("sweep.csv"))) and running.poll() is None:
        time.sleep(0.005)
    running.kill()
    running.wait()
    assert files
    there = len(book.read_rows(files[0]))
    assert 1 <= there < 8
    assert main(measure) == 0
    assert f"{8 - there} configurations measured, {there} were there, 0 left" in capsys.readouterr().out
    assert len(book.read_rows(files[0])) == 8


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path, capsys):
    (tmp_path / "results").write_text("a file")
    assert main(["measure", "batching/padding", "--preset", "small", "--results", str(tmp_path / "results")]) == 1
    assert "results" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.long
def test_python_without_assertions_measures_nothing(tmp_path):
    program = """
import sys
from helpers.cli import main
from helpers.lab.machine import check_assertions
assert False, "not there"
try:
    check_assertions()
except ValueError as error:
    print(error)
sys.exit(main(["measure", "batching/padding", "--preset", "small", "--results", sys.argv[1]]))
"""
    done = subprocess.run([sys.executable, "-O", "-c", program, tmp_path], capture_output=True, text=True)
    message = "python -O (or PYTHONOPTIMIZE) removes assert statements"
    assert (done.returncode, message in done.stdout, message in done.stderr.splitlines()[-1]) == (2, True, True)
    assert "UserWarning: python -O removes assert statements" in done.stderr  # at the import
    assert not list(tmp_path.iterdir())


def test_doctor_says_what_is_here_and_goes_on_after_a_damaged_table(tmp_path, capsys):
    file = store.path(slug(device_name()), "batching", "padding", tmp_path)
    file.parent.mkdir(parents=True)
    file.write_text("garbage")
    assert main(["doctor", "--results", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    faults = [line for line in out.splitlines() if "FAULT" in line]
    assert faults and all(f"{file}, line 1" in line for line in faults)
    for name in ("gpu", "torch", "liger-kernel", "notebooks and report", "measure would run"):
        assert name in out


def test_a_report_without_its_packages_says_what_to_install(tmp_path, monkeypatch, capsys):
    def absent(name):
        raise ModuleNotFoundError("no nbformat", name="nbformat")

    without = types.ModuleType("helpers.book")
    without.__getattr__ = absent
    monkeypatch.setitem(sys.modules, "helpers.book", without)
    assert main(["report", "--output", str(tmp_path / "report.pdf")]) == 1
    assert "the report needs nbformat: pip install" in capsys.readouterr().err


def test_a_failing_notebook_is_one_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "notebooks" / "01_bad.ipynb").write_text("{}")
    monkeypatch.setenv("HELPERS_ROOT", str(tmp_path))
    assert main(["report", "--output", str(tmp_path / "report.pdf")]) == 1
    err = capsys.readouterr().err
    assert "01_bad.ipynb" in err and err.count("\n") == 1
    assert not (tmp_path / "report.pdf").exists()


def test_chapters_are_found_and_tables_selected_once():
    assert "swiglu" in chapters()
    assert [e.table for e in select(["swiglu/peers", "swiglu"])][:2] == ["peers", "ceilings"]
    assert len(select(["swiglu", "swiglu/peers"])) == len(tables_of("swiglu"))
    everything = select([])
    by_chapter = [e for name in chapters() for e in tables_of(name)]
    assert len(everything) == len(by_chapter)
    assert all(e in everything for e in by_chapter)


def test_every_experiment_says_what_it_measures_and_has_sizes_for_each_class():
    of_cpus = "rush/allocator rush/distributed rush/memory_plan tool/loops tool/profilers tool/strangers "
    of_cpus += "batching/padding batching/sampler_scaling pipelines/formats pipelines/loader pipelines/jit "
    of_cpus += "pipelines/forgetting compilers/training summary/stages"
    for e in select([]):
        assert e.worth.answers and 1 <= e.worth.row <= 100
        of_big_gpu = e.configurations("big-gpu")
        headlines = [config for config in of_big_gpu if e.worth.of(config) == e.worth.row]
        assert bool(headlines) == bool(of_big_gpu) == bool(e.worth.seconds("big-gpu")), e.name
        for preset in PRESETS:
            configs = e.configurations(preset)
            absent = {
                "cpu",
                "gpu",
                *(["big-gpu"] if e.name in of_cpus.split() else []),
                *(["small"] if e.table == "loops" else []),
            }  # whole trials, of which none is small
            assert configs or preset in absent  # what needs a GPU, or a big one
            assert all(list(config) == list(configs[0]) for config in configs)
            assert len({tuple(config.values()) for config in configs}) == len(configs)
            assert all(isinstance(e.missing_because(config), str) for config in configs)  # on any machine


@pytest.mark.parametrize("place", ["parser", "_run"])
def test_ctrl_c_while_modules_are_imported_is_one_line(place, monkeypatch, capsys):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(f"helpers.cli.{place}", interrupted)
    assert main(["doctor"]) == 130
    assert capsys.readouterr().err == "dlspeed: stopped\n"


def test_sigterm_stops_as_ctrl_c_does_but_not_a_fork(monkeypatch, capsys):
    forked = []

    def terminated(options):
        fork = multiprocessing.get_context("fork")
        begun = fork.Event()
        child = fork.Process(target=lambda: (begun.set(), time.sleep(1000)))
        child.start()
        begun.wait()
        child.terminate()
        child.join()
        forked.append(child.exitcode)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1000)

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("helpers.cli._run", terminated)
    assert main(["doctor"]) == 143
    assert capsys.readouterr().err == "dlspeed: stopped\n"
    assert forked == [-signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_sigterm_in_a_destructor_or_that_a_script_catches_comes_again_and_what_is_put_in_order_is_left_alone(
    monkeypatch, capsys
):
    tidied = []

    class Loses:
        def __del__(self):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01)

    def terminated(options):
        try:
            Loses()
            with contextlib.suppress(KeyboardInterrupt):
                time.sleep(1000)
            time.sleep(1000)
        finally:
            time.sleep(0.3)  # in which it comes several times
            tidied.append(True)

    monkeypatch.setattr("helpers.cli.AGAIN_S", 0.05)
    monkeypatch.setattr("helpers.cli._run", terminated)
    assert main(["doctor"]) == 143
    assert tidied == [True]
    assert capsys.readouterr().err == "dlspeed: stopped\n"


@pytest.mark.parametrize("buffered", [True, False])
def test_what_nobody_reads_ends_quietly_and_a_full_disk_is_one_line(buffered):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    environment |= {} if buffered else {"PYTHONUNBUFFERED": "1"}
    reads, writes = os.pipe()
    os.close(reads)
    command = {"args": [sys.executable, "-m", "helpers"], "cwd": ROOT, "env": environment}
    with os.fdopen(writes, "wb") as unread, open("/dev/full", "wb") as full:
        ends = [subprocess.run(**command, stdout=place, stderr=subprocess.PIPE) for place in (unread, full)]
    assert [end.returncode for end in ends] == [128 + signal.SIGPIPE, 1]
    assert [end.stderr for end in ends] == [b"", b"dlspeed: [Errno 28] No space left on device\n"]


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_takes_half_a_second_and_no_torch(command):
    program = """
import os, runpy, sys
runpy.run_path("helpers/boot.py")["load"]()
from dlspeed.cli import main
try:
    main([*sys.argv[1:], "--help"])
except SystemExit as end:
    ours = [name for name in sys.modules if name.startswith("dlspeed")]
    print(end.code, "torch" in sys.modules, os.times().user + os.times().system < 0.5, len(ours) < 10, file=sys.stderr)
"""
    line = [sys.executable, "-c", program, *filter(None, [command])]
    done = subprocess.run(line, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.startswith("usage: dlspeed") and done.stderr == f"0 False True {bool(command)}\n"


STEPS = """
import torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range({steps}):
    model(torch.randn(2, 4)).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.long
@pytest.mark.parametrize(("command", "steps", "most"), [(["profile"], 40, 36), (["try", "--only", "compile"], 0, 45)])
def test_a_command_for_a_script_reads_few_files_of_the_tool(tmp_path, command, steps, most):
    (tmp_path / "train.py").write_text(STEPS.format(steps=steps))
    program = f"""
import runpy, sys
runpy.run_path({str(ROOT / "helpers/boot.py")!r})["load"]()
from dlspeed.cli import main
main(sys.argv[1:])
rooms = ("dlspeed.script.", "dlspeed.findings.", "dlspeed.trying.", "dlspeed.faults")
files = [name for name, module in sys.modules.items() if name.startswith(rooms) and not hasattr(module, "__path__")]
print(*files, sep="\\n", file=sys.stderr)
"""
    line = [sys.executable, "-c", program, *command, "train.py"]
    done = subprocess.run(line, capture_output=True, text=True, cwd=tmp_path)
    files = [name for name in done.stderr.splitlines() if name.startswith("dlspeed.")]
    assert "dlspeed.findings.diagnose" in files and len(files) <= most


def test_diagnose_names_a_time_that_is_no_number_in_a_line(tmp_path, capsys):
    for time_us in ("1" * 400, "1e999"):
        trace = tmp_path / "trace.json"
        event = '{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "dur": 1, "ts": '
        trace.write_text(f'{{"traceEvents": [{event}{time_us}}}]}}')
        assert main(["diagnose", str(trace)]) == 1
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and "trace.json is no trace, or cut off or damaged" in err


def test_an_option_behind_the_script_goes_to_the_script_and_that_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    options = parser().parse_args(["try", "--json", "train.py", "--lr", "1", "--seconds=5"])
    assert shared.script_of(options) == ["train.py", "--lr", "1", "--seconds=5"]
    assert "--seconds=5 goes to train.py; what try takes stands before it" in capsys.readouterr().err
