"""What a solution does to itself, to others and to the machine."""

import textwrap
from pathlib import Path

import nbformat.v4
import pytest

from helpers.grading import Graded, Limits, Submission, grade

BUSY = Limits(seconds=2, gib=0.5, wall=600)
FORGES = 'import sys; apart = next(m for name, m in sys.modules.items() if name.endswith(".grading.apart"))'

# What my_step does when it is called, and what is said of it.
DOES = {
    "while True: pass": "no answer within 2 s of CPU time",
    "while True: print('x' * 10_000, flush=True)": "no answer within 2 s of CPU time",
    "import ctypes; ctypes.string_at(0)": "its process was ended by SIGSEGV",
    "import os; os._exit(0)": "its process ended",
    "raise SystemExit(0)": "SystemExit: 0",
    "kept = [bytearray(2**27) for _ in range(10_000)]": "MemoryError",
    "import torch; kept = [torch.ones(2**25) for _ in range(10_000)]": "can't allocate memory",
    "import os, signal; os.killpg(0, signal.SIGKILL)": "its process was ended by SIGKILL",
    "import os, signal; os.kill(os.getppid(), signal.SIGKILL)": "",
    "import os; os.remove({theirs!r})": "PermissionError",
    "import socket; socket.create_connection(('127.0.0.1', 9))": "Error",
    "open({theirs!r}, 'w').write('changed')": "PermissionError",
}
# What it does when it is defined: answers are left out or made up, or are no answers.
DEFINES = {
    f"{FORGES}; apart.answers = lambda lines: iter(())": "its process ended",
    f"{FORGES}; apart.answers = lambda lines: iter([('repeats', '')] * 9)": "no answer",
    f"{FORGES}; apart.answers = lambda lines: iter([('holds', True)] * 9)": "no answer",
    f"{FORGES}; apart._send = lambda to, _: to.send_bytes(__import__('pickle').dumps(Runs()))": "that can't be read",
}


def script(folder: Path, name: str, source: str) -> Path:
    path = folder / f"{name}.py"
    path.write_text(textwrap.dedent(source))
    return path


@pytest.fixture(scope="module")
def submissions(tmp_path_factory) -> dict[str, Submission]:
    """All of them in one go, each with a right number beside."""
    folder = tmp_path_factory.mktemp("handed-in")
    (folder / "theirs").write_text("kept")
    sources = {}
    for does in DOES:
        line = does.replace("{theirs!r}", repr(str(folder / "theirs")))
        sources[does] = f"def my_step(*_):\n    {line}\ncopied_bytes = 60\n"
    for does in DEFINES:
        runs = f"class Runs:\n    def __reduce__(self):\n        return open, ({str(folder / 'ran')!r}, 'w')\n"
        forge = f"def forge():\n    global apart\n    {does}\n"
        sources[does] = f"{runs}{forge}def my_step(*_, forged=forge()): ...\ncopied_bytes = 60\n"
    paths = [script(folder, f"{number:02d}", source) for number, source in enumerate(sources.values())]
    return dict(zip(sources, grade(paths, limits=BUSY), strict=True))


def graded(submission: Submission) -> dict[str, Graded]:
    return {each.exercise.name: each for each in submission.graded}


@pytest.mark.parametrize(("does", "told"), [*DOES.items(), *DEFINES.items()])
def test_what_goes_wrong_costs_its_own_points_alone(does, told, submissions):
    found = graded(submissions[does])
    assert found["my_step"].verdict == "failed" and found["my_step"].points == 0
    assert told in "\n".join(found["my_step"].failures)
    assert found["copied_bytes"].points == 1


def test_files_of_others_are_as_before(submissions):
    (folder,) = {submission.path.parent for submission in submissions.values()}
    assert (folder / "theirs").read_text() == "kept"
    assert not (folder / "ran").exists()


def test_a_solution_that_waits_for_ever_is_ended(tmp_path):
    path = script(tmp_path, "waits", "def my_step(*_):\n    import time\n    time.sleep(1e6)\n")
    (submission,) = grade([path], limits=Limits(wall=2))
    assert graded(submission)["my_step"].failures[0].endswith("no answer within 2 s")


def test_only_what_an_exercise_needs_runs_and_a_number_is_a_number(tmp_path):
    needed = script(
        tmp_path,
        "needed",
        """
        raise RuntimeError("a cell that measures")
        LOW = {1}
        LOW |= {2}
        LOW.add(57)
        unused = 1 / 0
        def total(): return sum(LOW)
        copied_bytes = total()
        missed_products, clipped_norm, pixels = "two", lambda: 2**-10, float("nan")
        LOW = set()
    """,
    )
    (submission,) = grade([needed])
    found = graded(submission)
    assert found["copied_bytes"].verdict == "passed"
    assert {found[name].verdict for name in ("missed_products", "clipped_norm", "pixels")} == {"failed"}


def test_a_cell_that_is_no_python_is_told_and_the_others_count(tmp_path):
    sources = ["%matplotlib inline\ncopied_bytes = 60", "def my_step(:", "!pip list"]
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    path = tmp_path / "solution.ipynb"
    path.write_text(nbformat.v4.writes(nbformat.v4.new_notebook(cells=cells)))
    (submission,) = grade([path])
    assert submission.points == 1
    assert len(submission.faults) == 1 and submission.faults[0].startswith("cell 2: ")
