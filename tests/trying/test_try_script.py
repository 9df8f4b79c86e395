"""Scripts as people write them, tried as they are: what each change did, and that nothing of theirs is touched."""

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

import pytest
import torch

from helpers.cli import main
from helpers.lab import estimate
from helpers.lab.trials import programs
from helpers.trying import answer, search, sides, try_script
from helpers.trying.search import CannotTry

ROOT = Path(__file__).resolve().parents[2]
SLOW_LOADER = (ROOT / "data" / "tried" / "slow_loader.py").read_text()
SHORT = (ROOT / "data" / "tried" / "short.py").read_text()


SECONDS = 600  # that no trial needs: each ends when it has decided, however slow the machine


@pytest.fixture(autouse=True)
def _short_trials(monkeypatch):
    monkeypatch.setattr(sides, "TURN_S", 0.05)
    monkeypatch.setattr(search, "OBSERVED_S", 1.0)
    monkeypatch.setattr(search, "LEAST_STEPS", 8)
    monkeypatch.setattr(sides, "PRECISION", 0.5)
    monkeypatch.setattr(sides, "MOST_LOOKS", 1)
    monkeypatch.setattr(estimate, "PRECISION", 0.5)
    monkeypatch.setattr(programs, "LEAST_PAIRS", 2)


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Writes a script into the folder to work in; in the end no process of it may be left."""
    monkeypatch.chdir(tmp_path)

    def write(body: str, name: str = "train.py") -> str:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(body)
        return name

    yield write
    assert not ours(tmp_path)


def ours(script_folder: Path) -> list[str]:
    """The processes of scripts that are tried in this folder."""
    living = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (folder / "cmdline").read_bytes()
            if b"dlspeed.trying.child" in command and str(script_folder).encode() in command:
                living.append(folder.name)
    return living


def digest(folder: Path) -> str:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return hashlib.sha256(b"".join(str(path).encode() + path.read_bytes() for path in files)).hexdigest()


@pytest.mark.long
def test_a_slow_loader_is_named_with_its_edit_and_the_folder_stays_as_it_was(script, tmp_path, capsys):
    name = script(SLOW_LOADER)
    (tmp_path / "log.txt").write_text("mine\n")
    before = digest(tmp_path)
    patch = tmp_path.parent / "workers.diff"
    only = "loader-workers,channels-last"
    code = main(
        ["try", "--seconds", f"{SECONDS}", "--only", only, "--json", "--write", str(patch), name, "--size", "16"]
    )
    assert code == 0
    assert digest(tmp_path) == before
    result = json.loads(capsys.readouterr().out)
    (row,) = result["helped"]
    assert row["change"] == "loader-workers" and row["gain_share"] > 0.2
    assert row["losses"].startswith("within seeds")  # one random number less an epoch
    assert {each["change"] for each in result["not_tried"]} == {"channels-last"}
    assert str(tmp_path / "runs") in result["redirected"]
    assert "+loader = DataLoader(Numbers(), batch_size=8, shuffle=True, num_workers=" in patch.read_text()


@pytest.mark.long
def test_what_the_profile_finds_is_tried_first_and_what_no_change_addresses_by_a_probe(script, tmp_path, monkeypatch):
    """One is tried in any case, however long the profile took; temporary files may lie beside the script."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # this process has looked for its own already
    monkeypatch.setattr(search, "PROFILED_S", (SECONDS, SECONDS))
    tried: list[str] = []
    name = script((ROOT / "data" / "loops" / "figure_each_step.py").read_text())
    result = try_script(name, seconds=5, tell=tried.append)
    assert result.findings[0].finding == "drawing" and tried[2].startswith(
        "no-output "
    )  # after the verdict and the base
    assert sum(line["share"] for line in result.lines) == pytest.approx(1, abs=0.02)
    first = result.yours[0]
    assert (first["finding"], first["by"]) == ("drawing", "no-output") and first["most"] > 0.5
    assert "savefig" in first["where"] and first["advice"] in answer.text(result)


@pytest.mark.long
def test_an_edit_made_by_hand_is_timed_and_its_losses_are_judged_also_of_scripts_that_end_soon(script, capsys):
    name, edited = script(SHORT), script(SHORT, "mine/edited.py")
    assert main(["try", "--seconds", f"{SECONDS}", "--json", "--against", f"{edited} 9 0.005", name, "9", "0.05"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["beside"]
    assert (row["change"], row["losses"]) == (edited, "bitwise equal, 8 steps")
    assert row["gain_share"] == pytest.approx(0.9, rel=1e-3)


@pytest.mark.long
def test_two_environments_take_turns_and_what_differs_is_told(script, tmp_path, capsys, monkeypatch):
    """The other one lacks pandas and sets its threads; our package comes without our own packages."""
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    venv.create(tmp_path.parent / "other")
    (packages,) = (tmp_path.parent / "other").glob("lib/*/site-packages")
    for entry in Path(torch.__file__).parents[1].iterdir():
        if "pandas" not in entry.name and not (packages / entry.name).exists():
            (packages / entry.name).symlink_to(entry)
    (packages / "threads.pth").write_text("import os; os.environ['OMP_NUM_THREADS'] = '1'")
    alone = (
        "import importlib.util, os\nassert importlib.util.find_spec('pandas') or os.environ['OMP_NUM_THREADS'] == '1'\n"
    )
    python = str(tmp_path.parent / "other" / "bin" / "python")
    name = script(alone + SHORT)
    code = main(["try", "--seconds", f"{SECONDS}", "--json", "--python", python, name, "1000000", "0.002"])
    assert code == 4  # they are as fast, which so short a trial can't tell
    result = json.loads(capsys.readouterr().out)
    (row,) = result["beside"]
    assert row["change"] == python and row["losses"].startswith("bitwise equal")
    assert result["differs"]["OMP_NUM_THREADS"] == ["2", "1"]


@pytest.mark.long
def test_a_step_that_takes_longer_as_the_training_goes_on_passes_for_no_effect(script):
    name = script(SHORT.replace("for _ in", "for i in").replace("float(sys.argv[2])", "0.002 * 1.02**min(i, 200)"))
    (row,) = try_script(name, [10**6], seconds=SECONDS, only=["matmul-precision"]).tried
    assert row.gain_share == pytest.approx(0, abs=1e-3) and row.verdict not in ("faster", "slower")


@pytest.mark.long
def test_pages_are_kept_on_both_sides_and_what_that_gains_is_measured_beside_starts_without(script):
    pages = 'import os\nPAGES = "MALLOC_MMAP_MAX_" in os.environ\n'
    name = script(pages + SHORT.replace("float(sys.argv[2])", "0.002 if PAGES else 0.02"))
    result = try_script(name, [10**6], seconds=SECONDS, only=["allocator", "matmul-precision"])
    kept, other = sorted(result.tried, key=lambda tried: tried.change)
    assert kept.verdict == "faster" and kept.gain_share == pytest.approx(0.9, rel=1e-3) and result.kept == ["allocator"]
    assert (result.step_ms, other.gain_share) == pytest.approx((2, 0), abs=1e-2)
    assert "pages kept" in answer.text(result)


@pytest.mark.long
def test_a_change_that_raises_in_a_module_with_arguments_is_a_row_with_its_reason(script):
    script("", "package/__init__.py")
    fault = "import torch\nif torch.get_float32_matmul_precision() == 'medium':\n    raise ValueError('not so')\n"
    script(fault + SHORT, "package/task.py")
    only = ["matmul-precision", "loader-workers"]
    result = try_script("package.task", [10**6, 0.002], module=True, seconds=SECONDS, only=only)
    (row,) = result.tried
    assert (row.verdict, row.reason) == ("failed", FAILED)
    reason = "no DataLoader of the training lacks it"
    assert result.not_tried == [{"change": "loader-workers", "reason": reason, "applies": False}]
    assert result.step_ms == pytest.approx(2, rel=1e-3) and FAILED in answer.text(result)


FAILED = "matmul-precision ended with code 1: ValueError: not so (task.py:3)"


@pytest.mark.long
@pytest.mark.parametrize(
    ("body", "reason"),
    [("raise RuntimeError('no data here')", "RuntimeError: no data here"), ("print('done')", "ended without a step")],
)
def test_a_script_that_fails_as_it_is_is_one_line(script, body, reason):
    with pytest.raises(CannotTry, match=reason):
        try_script(script(body), seconds=SECONDS)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--only", "magic", "train.py"], "change is 'magic'; valid: 'matmul-precision', "),
        (["nowhere.py"], "there is no script nowhere.py"),
        ([], "try what? SCRIPT"),
        (["--against", "absent.py", "train.py"], "there is no script absent.py"),
        (["--against", "train.py", "--only", "optimizer", "train.py"], "--against and --python compare"),
        (["--markdown", "-", "train.py"], "--markdown needs --against or --python"),
        (["--markdown", "-", "--json", "--against", "train.py", "train.py"], "choose one"),
    ],
)
def test_what_the_user_got_wrong_is_one_line(script, arguments, said, capsys):
    script("pass")
    assert main(["try", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_kill_leaves_no_process(script, tmp_path, number):
    soon = "from helpers.trying import search; search.OBSERVED_S = 1; from helpers.cli import main; main()"
    command = [sys.executable, "-c", soon, "try", "--seconds", f"{SECONDS}", "--only", "optimizer"]
    command += [script(SHORT), str(10**6), "0.002"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stderr=subprocess.PIPE, env=environment, text=True) as running:
        assert running.stderr.readline().startswith("base: ")
        running.send_signal(number)
        running.wait()
    end = time.monotonic() + SECONDS
    while ours(tmp_path):
        assert time.monotonic() < end
        time.sleep(0.1)
