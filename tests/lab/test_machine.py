import importlib.metadata
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from helpers.lab import environment, machine
from helpers.lab.machine import installed, slug


def test_a_device_becomes_a_folder_name():
    assert slug("NVIDIA H200") == "nvidia-h200"
    assert slug("CPU Intel(R) Xeon(R) Gold 6338 @ 2.00GHz") == "cpu-intel-xeon-gold-6338-2-00ghz"


def test_the_environment_says_what_is_measured_by_what():
    facts = environment()
    for name in ("gpu", "driver", "torch", "cuda", "cpu", "date", "commit", "liger-kernel", "apex"):
        assert facts[name]


def test_the_driver_is_that_of_the_first_card(monkeypatch):
    monkeypatch.setattr(machine, "_output", lambda *command: "570.86.15\n570.90.00")
    assert machine._driver() == "570.86.15"
    monkeypatch.setattr(machine, "_output", lambda *command: "")
    assert machine._driver() == "unknown"


def test_peers_are_looked_up_without_importing_them(tmp_path, monkeypatch):
    (tmp_path / "liger_kernel").mkdir()
    (tmp_path / "liger_kernel" / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert installed("liger-kernel") == "unknown version"


def test_the_index_package_apex_is_not_nvidias(tmp_path, monkeypatch):
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    assert installed("apex") is None
    (tmp_path / "apex" / "optimizers").mkdir()
    assert installed("apex") is not None


@pytest.mark.parametrize(
    ("package", "module"),
    [("scikit-learn", "sklearn"), ("pillow", "PIL"), ("opencv-python-headless", "cv2"), ("simplejpeg", "simplejpeg")],
)
def test_what_a_status_says_is_not_installed_is_found_once_it_is(package, module, monkeypatch):
    found, spec = {module}, SimpleNamespace(submodule_search_locations=None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec if name in found else None)
    assert installed(package) is not None
    found.clear()
    assert installed(package) is None


def test_a_package_without_a_module_of_its_own_is_found_by_its_name(monkeypatch):
    there = {"onnxruntime-gpu": "1.2.3"}

    def version(name):
        if name not in there:
            raise importlib.metadata.PackageNotFoundError(name)
        return there[name]

    monkeypatch.setattr("importlib.metadata.version", version)
    assert installed("onnxruntime-gpu") == "1.2.3"
    there.clear()
    assert installed("onnxruntime-gpu") is None
    assert installed("torch (ImportError: libc10.so.1: cannot open shared object file)") is None  # there, but broken


def test_what_is_no_package_is_looked_for_where_it_would_be(tmp_path, monkeypatch):
    for name in ("pypy3", "c++-of-ours"):
        (tmp_path / name).touch(mode=0o755)
    (tmp_path / "Python.h").touch()
    folders = {"include": "", "platinclude": ""}
    monkeypatch.setattr("sysconfig.get_path", folders.get)
    monkeypatch.setenv("CXX", "c++-of-ours")
    for variable in ("PATH", "CPATH", "CPLUS_INCLUDE_PATH"):
        monkeypatch.setenv(variable, "")
    names = ("pypy3", "C++ compiler", "Python.h")
    assert [installed(name) for name in names] == [None] * 3
    monkeypatch.setenv("PATH", str(tmp_path))
    folders["include"] = str(tmp_path)
    assert [installed(name) is not None for name in names] == [True, True, True]


def test_an_installed_copy_has_no_commit_of_the_repository_around_it(tmp_path, monkeypatch):
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@x"]
    for arguments in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "another project"]):
        subprocess.run([*git, *arguments], check=True)
    for where in (tmp_path / "venv", tmp_path):  # at the repository's top the sources still aren't tracked
        copy = where / "helpers" / "lab" / "machine.py"
        copy.parent.mkdir(parents=True)
        copy.write_text("")
        monkeypatch.setattr(machine, "__file__", str(copy))
        assert machine.commit.__wrapped__().startswith("source-")


def test_importing_does_no_work_and_measuring_needs_no_optional_package(tmp_path):
    not_here = ["matplotlib", "IPython", "nbconvert", "nbformat", "typst", "pypandoc", "torchtext", "pyarrow"]
    program = """
import sys
import time
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in sys.argv[2:]:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Block())
import helpers, helpers.amp, helpers.lab, helpers.models, helpers.swiglu, helpers.text, helpers.train, torch
from helpers.cli import main
from helpers.chapters import chapters, tables_of
assert all(tables_of(chapter) for chapter in chapters())
assert not torch.cuda.is_initialized()
assert not {"sklearn", "numba", "onnx", "webdataset", "transformers", "torch._dynamo"} & set(sys.modules)
assert main(["measure", "batching/padding", "amp/exponents", "--preset", "small", "--results", sys.argv[1]]) == 0
"""
    done = subprocess.run([sys.executable, "-c", program, tmp_path, *not_here], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "2 configurations measured" in done.stdout


def test_what_this_process_starts_is_its_own():
    with subprocess.Popen(["sleep", "100"]) as child:
        found = machine.descendants()
        child.kill()
    assert str(child.pid) in found


@pytest.mark.skipif(sys.platform != "linux", reason="of Linux's /proc")
def test_cpu_time_is_that_of_the_process_and_of_its_children_that_ended():
    subprocess.run([sys.executable, "-c", "sum(range(3_000_000))"], check=True)
    spent = os.times()
    ticks = machine.cpu_ticks(str(os.getpid()))
    assert ticks == pytest.approx(sum(spent[:4]) * os.sysconf("SC_CLK_TCK"), abs=10)
    assert spent.children_user > 0 and machine.cpu_ticks("0") == 0


@pytest.mark.skipif(sys.platform != "linux", reason="of Linux's /proc")
def test_what_others_use_of_the_cores_is_known_and_our_own_is_not_in_it():
    with machine.OthersLoad() as load:
        time.sleep(0.05)
    assert load.cores >= 0  # the kernel counts by 10 ms
