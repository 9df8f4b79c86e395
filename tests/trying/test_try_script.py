"""Scripts as people write them, tried as they are: what each change did, and that nothing of theirs is touched."""

import contextlib
import hashlib
import json
import os
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from helpers.__main__ import main
from helpers.trying import search, try_script
from helpers.trying.search import CannotTry, UnknownChange

ROOT = Path(__file__).resolve().parents[2]
SLOW_LOADER = """
import argparse, os, time, torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--size", type=int, default=8)
options = parser.parse_args()

class Numbers(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, i):
        time.sleep(0.002)
        return torch.full((options.size,), float(i))

torch.manual_seed(3)
model = nn.Sequential(nn.Linear(options.size, 8), nn.Dropout(0.1), nn.Linear(8, 1))
loader = DataLoader(Numbers(), batch_size=8, shuffle=True)
optimizer = torch.optim.AdamW(
    model.parameters(),
    lr=1e-3,
)
os.makedirs("runs", exist_ok=True)
for epoch in range(1000):
    for batch in loader:
        optimizer.zero_grad(set_to_none=False)
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
    torch.save(model.state_dict(), "runs/last.pt")
    with open(os.path.abspath("log.txt"), "a") as log:
        print(epoch, loss.item(), file=log)
"""


def digest(folder: Path) -> str:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return hashlib.sha256(b"".join(str(path).encode() + path.read_bytes() for path in files)).hexdigest()


EDITED = """
import sys, time, torch
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=float(sys.argv[1]))
for _ in range(100_000):
    optimizer.zero_grad()
    model(torch.ones(4, 8)).square().mean().backward()
    optimizer.step()
    time.sleep(float(sys.argv[2]))
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(body: str, name: str = "train.py") -> str:
        (tmp_path / name).write_text(textwrap.dedent(body))
        return name

    return write


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path):
    yield
    assert not ours(tmp_path)


def ours(script_folder: Path) -> list[str]:
    """The processes of scripts that are tried in this folder."""
    living = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (folder / "cmdline").read_bytes()
            if b"helpers.trying.child" in command and str(script_folder).encode() in command:
                living.append(folder.name)
    return living


def test_a_slow_loader_is_named_with_its_edit_and_the_folder_stays_as_it_was(script, tmp_path, capsys):
    name = script(SLOW_LOADER)
    (tmp_path / "log.txt").write_text("mine\n")
    before = digest(tmp_path)
    patch = tmp_path.parent / "workers.diff"
    only = "loader-workers,channels-last"
    code = main(["try", "--seconds", "25", "--only", only, "--json", "--write", str(patch), name, "--size", "16"])
    assert code == 0
    assert digest(tmp_path) == before
    result = json.loads(capsys.readouterr().out)
    rows = {row["change"]: row for row in result["tried"]}
    assert rows["loader-workers"]["verdict"] == "faster"
    assert rows["loader-workers"]["gain_share"] > 0.2
    assert rows["loader-workers"]["losses"].startswith("other batches")  # one random number less an epoch
    assert rows["loader-workers"]["edit"].startswith("train.py:19 DataLoader(…, num_workers=")
    assert {each["change"] for each in result["not_tried"]} >= {"channels-last"}
    assert str(tmp_path / "runs") in result["redirected"]
    assert "+loader = DataLoader(Numbers(), batch_size=8, shuffle=True, num_workers=" in patch.read_text()


@pytest.mark.parametrize(("rate", "losses"), [("0.001", "bitwise equal"), ("0.01", "different")])
def test_an_edit_made_by_hand_is_timed_and_its_losses_are_judged(script, tmp_path, capsys, rate, losses):
    (tmp_path / "mine").mkdir()
    name, edited = script(EDITED), script(EDITED, "mine/edited.py")
    against = f"{edited} {rate} 0.002"
    assert main(["try", "--seconds", "20", "--json", "--against", against, name, "0.001", "0.01"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["tried"]
    assert row["change"] == edited
    assert row["verdict"] == "faster"
    assert 0.5 < row["gain_share"] < 0.85
    assert row["losses"].startswith(losses)


@pytest.mark.parametrize(
    ("against", "said"), [("absent.py", "there is no script absent.py"), ("train.py --only x", "--against compares")]
)
def test_a_wrong_edit_is_one_line(script, capsys, against, said):
    name = script(EDITED)
    command = ["try", "--against", *(shlex.split(against) if "--only" in against else [against]), name]
    assert main(command) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("raise RuntimeError('no data here')", "RuntimeError: no data here"),
        ("print('done')", "ended without a step"),
        ("import sys; sys.exit(3)", "ended with code 3"),
    ],
)
def test_a_script_that_fails_as_it_is_is_one_line(script, body, reason):
    with pytest.raises(CannotTry, match=reason):
        try_script(script(body), seconds=20)


def test_what_the_user_got_wrong_is_one_line(script, capsys):
    with pytest.raises(UnknownChange, match=r"no change 'magic'; valid: matmul-precision, "):
        try_script(script("pass"), only=["magic"])
    assert main(["try", "--only", "magic", "train.py"]) == 2
    assert main(["try", "nowhere.py"]) == 2
    assert main(["try"]) == 2
    assert capsys.readouterr().err.count("\n") == 3


SHORT = """
import logging, sys, time, torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range({steps}):
    optimizer.zero_grad({argument})
    model(torch.randn(2, 4)).square().mean().backward()
    optimizer.step()
    time.sleep({pause})
"""


def test_a_script_that_ends_soon_begins_anew(script):
    name = script(SHORT.format(steps=9, pause=0.002, argument="set_to_none=False"))
    result = try_script(name, seconds=20, only=["set-to-none"])
    assert [(row.change, row.losses) for row in result.tried] == [("set-to-none", "bitwise equal, 8 steps")]
    assert result.tried[0].edit == "train.py:6 zero_grad()"
    assert 2 < result.step_ms < 50


@pytest.mark.parametrize("says", ["print(sys.argv[1])", "logging.getLogger('a').error(sys.argv[1])"])
def test_a_module_with_arguments_that_prints_or_logs(script, tmp_path, says):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    script(SHORT.format(steps=10**6, pause=0.002, argument="") + f"    {says}", "package/task.py")
    result = try_script("package.task", ["--fast"], module=True, seconds=12, only=["no-output", "loader-workers"])
    assert [(row.change, row.kind, row.losses) for row in result.tried] == [("no-output", "probe", "another training")]
    assert result.not_tried == [{"change": "loader-workers", "reason": "no DataLoader of the training lacks it"}]
    assert result.json()


def test_a_change_that_hangs_or_raises_is_a_row_with_its_reason(script, monkeypatch):
    body = """
    import torch, time
    if torch.get_float32_matmul_precision() == "medium":
        {fault}
    """
    rest = SHORT.format(steps=10**6, pause=0.002, argument="")
    name = script(textwrap.dedent(body).format(fault="raise ValueError('not so')") + rest)
    row = try_script(name, seconds=8, only=["matmul-precision"]).tried[0]
    assert (row.verdict, row.reason) == (
        "failed",
        "matmul-precision ended with code 1: ValueError: not so (train.py:4)",
    )
    name = script(textwrap.dedent(body).format(fault="time.sleep(1000)") + rest)
    monkeypatch.setattr(search, "PATIENCE_S", 0.0)
    row = try_script(name, seconds=8, only=["matmul-precision"]).tried[0]
    assert row.verdict == "failed" and "hangs" in row.reason


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_kill_leaves_no_process(script, tmp_path, number):
    name = script(SHORT.format(steps=10**6, pause=0.002, argument=""))
    command = [sys.executable, "-m", "helpers", "try", "--only", "optimizer", name]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stderr=subprocess.PIPE, env=environment, text=True) as running:
        assert running.stderr.readline().startswith("base: ")
        running.send_signal(number)
        running.wait(30)
    deadline = time.monotonic() + 10
    while ours(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not ours(tmp_path)
