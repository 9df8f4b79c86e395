"""A scratch in place of the user's folder: what is read and written by Python, by compiled code, and by commands."""

import hashlib
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BOOT = """
import os, sys, pathlib, shutil, subprocess
from helpers.script import scratch
folder = scratch.Scratch({scratch!r}, [{home!r}])
os.chdir(folder.mirror_working_folder({home!r}))
scratch.install(folder)
HOME = {home!r}
"""


@pytest.fixture
def home():
    """A user's folder, outside of /tmp, which scripts may write to."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as base:
        home = Path(base) / "project"
        (home / "data").mkdir(parents=True)
        (home / "notes.txt").write_text("mine")
        (home / "data" / "one.txt").write_text("1")
        (home.parent / "elsewhere.txt").write_text("theirs")
        yield home


@pytest.fixture
def run(home, tmp_path):
    def run_in_scratch(body: str) -> str:
        code = BOOT.format(scratch=str(tmp_path / "scratch"), home=str(home)) + textwrap.dedent(body)
        before = digest(home.parent)
        ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=900)
        assert digest(home.parent) == before
        assert ended.returncode == 0, ended.stderr
        return ended.stdout.strip()

    return run_in_scratch


def digest(folder: Path) -> str:
    entries = [(str(p), p.read_bytes() if p.is_file() else b"") for p in sorted(folder.rglob("*"))]
    return hashlib.sha256(repr(entries).encode()).hexdigest()


def test_what_is_written_is_read_back_and_the_users_files_stay(run, home):
    told = run("""
    open("notes.txt", "a").write(" and more")
    with open(HOME + "/data/one.txt", "r+") as file: file.write("2")
    os.makedirs(HOME + "/runs/a", exist_ok=True)
    pathlib.Path("runs/a/log.txt").write_text("hello")
    os.remove("data/one.txt")
    os.chmod(HOME + "/notes.txt", 0o600)
    os.rename(HOME + "/notes.txt", "old.txt")
    print(open("old.txt").read(), os.path.exists("data/one.txt"), os.path.exists(HOME + "/notes.txt"), end=" ")
    print(open(HOME + "/runs/a/log.txt").read(), os.listdir(HOME + "/runs"), end=" ")
    shutil.rmtree("runs"); print(os.path.exists("runs"), end=" ")
    shutil.rmtree(HOME + "/data"); print(os.path.exists("data"), sorted(folder.redirected)[0][len(HOME):])
    import torch
    torch.save({"a": 1}, HOME + "/model.pt"); print(torch.load(HOME + "/model.pt"))
    print(open("../elsewhere.txt").read(), end=" ")
    try: open("../elsewhere.txt", "w")
    except PermissionError as error: print(str(error).split("/")[-1], end=" ")
    open("../new.txt", "w").write("new"); print(open(HOME + "/../new.txt").read())
    """)
    assert told.splitlines() == [
        "mine and more False False hello ['a'] False False /data",
        "{'a': 1}",
        "theirs elsewhere.txt would be overwritten: dlspeed try leaves it as it is new",
    ]


def test_the_kernel_refuses_the_writes_of_commands_and_compiled_code(run, home):
    from helpers.script import landlock

    if landlock.ctypes.CDLL(None).syscall(landlock.CREATE, None, 0, landlock.VERSION) < 2:
        pytest.skip("the kernel has no Landlock")
    told = run("""
    import ctypes
    print(subprocess.run(f"echo x > {HOME}/data/one.txt", shell=True, capture_output=True).returncode, end=" ")
    print(ctypes.CDLL(None).creat((HOME + "/new").encode(), 0o600), end=" ")
    print(subprocess.run("echo x > mine.txt; cat mine.txt", shell=True, capture_output=True, text=True).stdout)
    """)
    assert told in ("1 -1 x", "2 -1 x")
