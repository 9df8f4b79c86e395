"""The action for pull requests: its shell steps, run as GitHub's runner does, on a script of a few iterations."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / ".github" / "actions" / "speed"
ACTION = yaml.safe_load((FOLDER / "action.yml").read_text(encoding="utf-8"))
SHELL = ("bash", "--noprofile", "--norc", "-eo", "pipefail")  # of `shell: bash`

SCRIPT = """
import sys, torch
layer = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
for _ in range(int(sys.argv[1])):
    loss = layer(torch.ones(4, 8)).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    # log
"""
# It keeps what it is given, and lists one comment of an earlier run.
GH = """#!/bin/sh
echo "$@" >> "$CALLS"
case "$*" in *--paginate*) echo 17 ;; esac
exit $GH_CODE
"""
DLSPEED = f"""#!/bin/sh
PYTHONPATH='{ROOT}' exec '{sys.executable}' -m helpers "$@"
"""
FAILS = "#!/bin/sh\necho no torch here >&2\nexit 1\n"


class Runner:
    """Runs the steps in order until one fails, each with its own environment and what earlier ones left."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.files = folder, {name: folder / name.lower() for name in ("SUMMARY", "OUTPUT", "CALLS")}
        (folder / "bin").mkdir()
        self.program("gh", GH)
        self.program("dlspeed", DLSPEED)

    def program(self, name: str, text: str) -> None:
        (self.folder / "bin" / name).write_text(text)
        (self.folder / "bin" / name).chmod(0o755)

    def run(self, number: str = "", gh_code: int = 0, **inputs: str) -> int:
        for file in self.files.values():
            file.write_text("")
        given = {name: str(each.get("default", "")) for name, each in ACTION["inputs"].items()} | inputs
        values = {f"inputs.{name}": value for name, value in given.items()}
        values |= {"github.token": "secret", "github.event.pull_request.number": number}
        environment = os.environ | {
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}", "RUNNER_TEMP": str(self.folder),
            "GITHUB_STEP_SUMMARY": str(self.files["SUMMARY"]), "GITHUB_OUTPUT": str(self.files["OUTPUT"]),
            "GITHUB_ACTION_PATH": str(FOLDER), "GITHUB_REPOSITORY": "owner/name", "GH_CODE": str(gh_code),
            "CALLS": str(self.files["CALLS"]),
        }  # fmt: skip
        for step in ACTION["runs"]["steps"]:
            assert step["shell"] == "bash" and "${{" not in step["run"]  # an input in a program could be a program
            own = {name: evaluated(text, values) for name, text in step.get("env", {}).items()}
            file = self.folder / "step.sh"
            file.write_text(step["run"])
            code = subprocess.run([*SHELL, file], cwd=self.folder, env=environment | own).returncode
            if code:
                return code
            if name := step.get("id"):
                lines = self.files["OUTPUT"].read_text().splitlines()
                values |= {f"steps.{name}.outputs.{key}": value for key, _, value in (x.partition("=") for x in lines)}
        return 0

    def read(self, name: str) -> str:
        return self.files[name].read_text()


def evaluated(text: str, values: dict[str, str]) -> str:
    """An expression's value; an input's default may be one itself."""
    while "${{" in text:
        text = re.sub(r"\$\{\{ ([\w.]+) \}\}", lambda match: values[match[1]], text)
    return text


@pytest.fixture
def runner(tmp_path):
    return Runner(tmp_path)


@pytest.mark.long
def test_a_step_with_more_to_do_fails_the_job_with_a_summary_and_a_comment(runner):
    (runner.folder / "train.py").write_text(SCRIPT)
    assert runner.run(script="train.py 9", options="--steps 2") == 0
    assert "nothing to compare with" in runner.read("SUMMARY")
    assert runner.read("CALLS") == ""  # no pull request

    (runner.folder / "train.py").write_text(SCRIPT.replace("# log", "loss.item()"))
    assert runner.run(number="5", script="train.py 9", options="--steps 2") == 3
    assert "| `train.py:10 loss.item()` | host waits | 0 → 1 a step |" in runner.read("SUMMARY")
    comment = (runner.folder / "dlspeed-comment.md").read_text()
    assert comment == f"<!-- dlspeed train.py 9 -->\n{runner.read('SUMMARY')}"
    asked, sent = runner.read("CALLS").splitlines()
    assert "repos/owner/name/issues/5/comments" in asked
    assert sent.startswith("api --method PATCH repos/owner/name/issues/comments/17 --field body=@")


RECORDS = """#!/bin/sh
printf '%s\\n' "$@" > arguments
while [ "$1" != --markdown ]; do shift; done
echo "### undecided" > "$2"
exit 4
"""


def test_a_base_is_timed_beside_the_edit_and_what_cannot_be_told_is_allowed_by_default(runner):
    runner.program("dlspeed", RECORDS)
    inputs = {"script": "train.py --lr 1", "base": "base/train.py --lr *", "options": "--seconds 9", "token": ""}
    assert runner.run(number="5", **inputs) == 0
    summary = str(runner.folder / "dlspeed.md")
    arguments = (runner.folder / "arguments").read_text().splitlines()
    assert arguments == [
        "try", "--markdown", summary, "--against", "train.py --lr 1", "--seconds", "9", "base/train.py", "--lr", "*",
    ]  # fmt: skip
    assert runner.read("SUMMARY") == "### undecided\n" and runner.read("CALLS") == ""
    assert runner.run(allow="", **inputs) == 4


def test_a_fault_is_told_though_it_writes_no_summary_nor_the_token_a_comment(runner):
    runner.program("dlspeed", FAILS)
    (runner.folder / "dlspeed.md").write_text("of an earlier run")
    assert runner.run(number="5", gh_code=1, script="train.py", allow="3 4") == 1
    assert runner.read("SUMMARY") == "### dlspeed: no result (exit code 1); the job's log says why\n"
    assert "--method POST repos/owner/name/issues/5/comments" in runner.read("CALLS")


def test_it_installs_the_package_that_it_belongs_to(runner):
    runner.program("pip", '#!/bin/sh\ncd "$2" && pwd > "$CALLS"\n')
    step = ACTION["runs"]["steps"][0]["run"]
    environment = {"PATH": f"{runner.folder / 'bin'}:/usr/bin:/bin", "GITHUB_ACTION_PATH": str(FOLDER)}
    environment |= {"CALLS": str(runner.files["CALLS"])}
    (runner.folder / "bin" / "dlspeed").unlink()
    subprocess.run([*SHELL, "-c", step], env=environment, check=True)
    assert runner.read("CALLS").strip() == str(ROOT)
