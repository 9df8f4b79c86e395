"""A training project with a `helpers` of its own: every command leaves that name to it.

The commands are what pip installs, in an environment that has nothing else of this project, and `python -m helpers` of
a checkout.
"""

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from script.recorded import in_steps, read

ROOT = Path(__file__).parents[2]
HELPERS = """
SIZE = 4
def size():
    import helpers  # as late as in a worker
    return helpers.SIZE
class Numbers:
    def __len__(self): return 60
    def __getitem__(self, i): return [float(i)] * size()
"""
TRAIN = """
import subprocess, sys, torch
from helpers import Numbers, size
if __name__ == "__main__":
    model = torch.nn.Linear(size(), 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for start in sys.argv[1:]:
        for batch in torch.utils.data.DataLoader(Numbers(), 4, num_workers=1, multiprocessing_context=start):
            model(torch.stack(batch).float().T).sum().backward()
            optimizer.step()
    print(subprocess.check_output([sys.executable, "-c", "import helpers; print(helpers.SIZE)"], text=True), size())
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """What the wheel holds, unpacked, with a command as pip writes it."""
    folder = tmp_path_factory.mktemp("environment")
    source = shutil.copytree(ROOT / "helpers", folder / "source/helpers", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source.parent)
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, source.parent]
    subprocess.run(pip, check=True, capture_output=True)
    with zipfile.ZipFile(*folder.glob("*.whl")) as wheel:
        wheel.extractall(folder / "site")
    with open(folder / "site/dlspeed/script/rates.py", "a") as rates:
        rates.write("\n_fastest_s = lambda *_: 1.0\n")  # of products in bf16 and the like: seconds of no interest
    module, _, function = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"][
        "dlspeed"
    ].partition(":")
    lines = [f"#!{sys.executable}", "import sys", f"sys.path.insert(1, {str(folder / 'site')!r})"]
    lines += [f"from {module} import {function}", "if __name__ == '__main__':", f"    sys.exit({function}())"]
    (folder / "dlspeed").write_text("\n".join(lines))
    (folder / "dlspeed").chmod(0o755)
    return folder / "site"


@pytest.fixture
def command(site):
    return [site.with_name("dlspeed")]


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with a training script and the module that it imports."""
    monkeypatch.chdir(tmp_path)
    Path("helpers.py").write_text(HELPERS)
    Path("train.py").write_text(TRAIN)
    return tmp_path


def run(*command, **environment):
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=os.environ | environment)
    assert done.returncode == 0, done.stderr
    return done


def test_the_wheel_owns_one_name_and_all_its_folders(site):
    top = {path.name for path in site.iterdir()}
    assert {name for name in top if not name.endswith(".dist-info")} == {"dlspeed"}
    ours = {file.parent.relative_to(ROOT / "helpers") for file in (ROOT / "helpers").rglob("*.py")}
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert listed == sorted(".".join(("dlspeed", *folder.parts)) for folder in ours)
    assert {file.parent.relative_to(site / "dlspeed") for file in (site / "dlspeed").rglob("*.py")} == ours


@pytest.mark.long
def test_pytest_has_the_guards_fixture_and_starts_without_torch(site, tmp_path):
    (tmp_path / "test_start.py").write_text(
        f"""
import sys
def test_before_it_is_used():
    assert sys.modules["dlspeed.guard.plugin"].__file__.startswith({str(site)!r}) and "torch" not in sys.modules
def test_when_it_is_used(speed_guard):
    assert "torch" in sys.modules
"""
    )
    done = run(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", tmp_path, PYTHONPATH=str(site))
    assert "2 passed" in done.stdout


@pytest.mark.long
@pytest.mark.parametrize("as_module", [False, True], ids=["dlspeed", "python -m helpers"])
def test_a_script_its_workers_and_its_child_processes_import_its_own_module(command, project, as_module):
    profile = ["profile", "--steps", "2", "--after", "3", "--continue", "train.py", "spawn"]
    if as_module:  # Python imports the checkout's `helpers` for it, so the project's comes from the script's folder
        Path("train.py").write_text(TRAIN.partition("    print(")[0] + "    print('4\\n', size())")
        command = [sys.executable, "-c", f"import sys; sys.path[:0] = [{str(ROOT)!r}]; {MODULE}"]
    done = run(*command, *profile, PYTHONPATH="." if not as_module else "")
    assert done.stdout.startswith("4\n 4\n")
    assert "2 steps, median" in done.stdout
    assert done.stderr == f"saved in {project}/profile-train\n"


MODULE = "import runpy; runpy.run_module('helpers', run_name='__main__', alter_sys=True)"


@pytest.mark.long
def test_two_ranks_that_torchrun_starts_stop_together_and_the_first_prints(command, project):
    Path("train.py").write_text(
        """
import torch
from helpers import size
torch.distributed.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(size(), 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(200):
    model(torch.ones(2, size())).square().mean().backward(); optimizer.step()
"""
    )
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    done = run(*launcher, *command, "profile", "--steps", "3", "train.py")
    folder = project / "profile-train"
    names = ["observed0.json", "observed1.json", "places.json.gz", "rank0.json.gz", "rank1.json.gz"]
    assert sorted(file.name for file in folder.iterdir()) == names
    for rank in range(2):
        assert in_steps(folder / f"rank{rank}.json.gz") == [(1, 1)] * 3
        assert read(folder / f"rank{rank}.json.gz")["distributedInfo"]["rank"] == rank
    assert done.stderr.count("saved in") == 1
    assert done.stdout.count("steps, median") == 1
    assert "2 of 2 ranks" in done.stdout or "late rank" in done.stdout  # on a busy machine one may be


@pytest.mark.long
def test_a_folder_without_init_file_that_the_script_adds_to_its_path_is_imported(command, project):
    Path("helpers.py").unlink()
    Path("src/helpers").mkdir(parents=True)
    Path("src/helpers/numbers.py").write_text(HELPERS.replace("import helpers", "import helpers.numbers as helpers"))
    body = TRAIN.replace("from helpers", "sys.path.append('src')\nfrom helpers.numbers")
    Path("train.py").write_text(body.partition("    print(")[0])  # a child process of its own doesn't know the path
    assert "2 steps, median" in run(*command, "profile", "--steps", "2", "--after", "3", "train.py", "fork").stdout


SOON = """
import sys; sys.path.insert(1, {site!r})
from dlspeed.lab import estimate
from dlspeed.lab.trials import programs
from dlspeed.trying import search, sides
estimate.PRECISION, sides.PRECISION, sides.MOST_LOOKS = 0.5, 0.5, 1
programs.LEAST_PAIRS, search.OBSERVED_S, sides.TURN_S, search.LEAST_STEPS = 2, 1.0, 0.05, 8
from dlspeed.cli import main; sys.exit(main())
"""


@pytest.mark.long
def test_what_a_change_gains_is_tried_beside_an_installed_module_of_our_old_name(site, project, tmp_path):
    """The script steps for ever; `try` starts it in processes of its own."""
    (tmp_path / "other").mkdir()
    Path("helpers.py").rename(tmp_path / "other" / "helpers.py")
    Path("train.py").write_text(
        """
import time, torch
from helpers import size
model = torch.nn.Linear(size(), 4)
optimizer = torch.optim.Adam(model.parameters())
while True:
    model(torch.ones(2, size())).square().mean().backward()
    optimizer.step()
    time.sleep(0.002)
"""
    )
    options = ["--seconds", "600", "--only", "matmul-precision", "train.py"]
    done = run(sys.executable, "-c", SOON.format(site=str(site)), "try", *options, PYTHONPATH="other")
    assert "matmul-precision" in done.stdout


@pytest.mark.long
def test_it_reads_plans_and_examines_where_there_is_no_checkout(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "largest batch that fits" in run(*command, "fit", "--model", "tiny", "--sequence", "64").stdout
    assert "class of machine" in run(*command, "doctor").stdout
    trace = ROOT / "tests/findings/traces"
    assert run(*command, "diagnose", next(file for file in trace.rglob("*.json.gz"))).stdout


def test_both_names_in_one_process_do_no_harm(site):
    both = "import helpers.batching, helpers.swiglu, helpers.kernels, dlspeed.batching, dlspeed.swiglu, dlspeed.kernels"
    done = run(sys.executable, "-c", f"{both}; print(dlspeed.__file__)", PYTHONPATH=f"{ROOT}:{site}")
    assert done.stdout
