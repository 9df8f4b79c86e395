import subprocess
import sys

from helpers.lab import environment
from helpers.lab.machine import installed, slug


def test_a_device_becomes_a_folder_name():
    assert slug("NVIDIA H200") == "nvidia-h200"
    assert slug("CPU Intel(R) Xeon(R) Gold 6338 @ 2.00GHz") == "cpu-intel-xeon-gold-6338-2-00ghz"


def test_the_environment_says_what_is_measured_by_what():
    facts = environment()
    for name in ("gpu", "driver", "torch", "cuda", "cpu", "date", "commit", "liger-kernel", "apex"):
        assert facts[name]


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


def test_importing_does_no_work_and_measuring_needs_no_jupyter(tmp_path):
    not_here = ["matplotlib", "IPython", "nbconvert", "nbformat", "typst", "pypandoc", "torchtext", "PIL"]
    program = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in sys.argv[2:]:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Block())
import helpers, helpers.amp, helpers.lab, helpers.models, helpers.swiglu, helpers.text, helpers.train, torch
from helpers.__main__ import main
assert not torch.cuda.is_initialized()
assert main(["measure", "swiglu/timing", "amp/zeros", "--preset", "small", "--results", sys.argv[1]]) == 0
"""
    done = subprocess.run([sys.executable, "-c", program, tmp_path, *not_here], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "3 configurations measured" in done.stdout
