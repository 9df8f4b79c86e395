"""A training project with a `helpers` of its own: the installed command profiles it, and reads and plans beside it."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from profiling.recorded import in_steps, read

from helpers.profiling.watch import watch

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
def command(tmp_path_factory):
    """The command in an environment in which the project is installed: a script as pip writes it."""
    folder = tmp_path_factory.mktemp("environment")
    shutil.copytree(ROOT / "helpers", folder / "site/helpers", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "dlspeed.py", folder / "site")
    with open(folder / "site/helpers/profiling/rates.py", "a") as rates:
        rates.write("\n_fastest_s = lambda *_: 1.0\n")  # of products in bf16 and the like: seconds of no interest
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    module, _, function = project["project"]["scripts"]["dlspeed"].partition(":")
    script = folder / "dlspeed"
    lines = [f"#!{sys.executable}", "import sys", f"sys.path.append({str(folder / 'site')!r})"]
    lines += [f"from {module} import {function}", "if __name__ == '__main__':", f"    sys.exit({function}())"]
    script.write_text("\n".join(lines))
    script.chmod(0o755)
    return script


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


def test_a_script_its_workers_and_its_child_processes_import_its_own_module(command, project):
    profile = [command, "profile", "--steps", "2", "--after", "3", "--continue"]
    done = run(*profile, "train.py", "spawn", PYTHONPATH=".")
    assert done.stdout.startswith("4\n 4\n")
    assert "2 steps, median" in done.stdout
    assert done.stderr == f"saved in {project}/profile-train\n"


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
    done = run(*launcher, command, "profile", "--steps", "3", "train.py")
    folder = project / "profile-train"
    names = ["observed0.json", "observed1.json", "places.json.gz", "rank0.json.gz", "rank1.json.gz"]
    assert sorted(file.name for file in folder.iterdir()) == names
    for rank in range(2):
        assert in_steps(folder / f"rank{rank}.json.gz") == [(1, 1)] * 3
        assert read(folder / f"rank{rank}.json.gz")["distributedInfo"]["rank"] == rank
    assert done.stderr.count("saved in") == 1
    assert done.stdout.count("steps, median") == 1
    assert "2 of 2 ranks" in done.stdout


def test_a_folder_without_init_file_that_the_script_adds_to_its_path_is_imported(project):
    """An installed package of the same name would be imported in its place."""
    Path("helpers.py").unlink()
    Path("src/helpers").mkdir(parents=True)
    Path("src/helpers/numbers.py").write_text(HELPERS.replace("import helpers", "import helpers.numbers as helpers"))
    body = TRAIN.replace("from helpers", "sys.path.append('src')\nfrom helpers.numbers")
    Path("train.py").write_text(body.partition("    print(")[0])  # a child process of its own doesn't know the path
    assert watch("train.py", ["fork"], steps=2, after=3).costs


def test_a_step_that_is_compiled_beside_a_module_of_our_name(project):
    compiled = 'torch.compile(lambda: optimizer.step(), backend="eager")()'
    Path("train.py").write_text(TRAIN.replace("optimizer.step()", compiled))
    ours = _modules()
    assert watch("train.py", ["fork"], steps=2, after=3).places
    assert _modules() == ours
    assert all(module.__name__ == name for name, module in ours.items())
    assert not any("dlspeed" in name for name in sys.modules)


def _modules():
    return {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "helpers"}
