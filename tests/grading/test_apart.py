"""What a solution does to itself, to others and to the machine."""

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


NEEDED = """
raise RuntimeError("a cell that measures")
LOW = {1}
LOW |= {2}
LOW.add(57)
unused = 1 / 0
def total(): return sum(LOW)
copied_bytes = total()
missed_products, clipped_norm, pixels = "two", lambda: 2**-10, float("nan")
LOW = set()
"""
CELLS = ["%matplotlib inline\ncopied_bytes = 60", "def my_step(:", "!pip list"]


@pytest.fixture(scope="module")
def submissions(tmp_path_factory) -> dict[str, Submission]:
    """All of them in one go, each with a right number beside."""
    folder = tmp_path_factory.mktemp("handed-in")
    (folder / "theirs").write_text("kept")
    sources = {"needed": NEEDED}
    for does in DOES:
        line = does.replace("{theirs!r}", repr(str(folder / "theirs")))
        sources[does] = f"def my_step(*_):\n    {line}\ncopied_bytes = 60\n"
    for does in DEFINES:
        runs = f"class Runs:\n    def __reduce__(self):\n        return open, ({str(folder / 'ran')!r}, 'w')\n"
        forge = f"def forge():\n    global apart\n    {does}\n"
        sources[does] = f"{runs}{forge}def my_step(*_, forged=forge()): ...\ncopied_bytes = 60\n"
    paths = [folder / f"{number:02d}.py" for number in range(len(sources))] + [folder / "cells.ipynb"]
    for path, source in zip(paths, sources.values(), strict=False):
        path.write_text(source)
    cells = [nbformat.v4.new_code_cell(source) for source in CELLS]
    paths[-1].write_text(nbformat.v4.writes(nbformat.v4.new_notebook(cells=cells)))
    return dict(zip([*sources, "cells"], grade(paths, limits=BUSY), strict=True))


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
    (tmp_path / "waits.py").write_text("def my_step(*_):\n    import time\n    time.sleep(1e6)\n")
    (submission,) = grade([tmp_path / "waits.py"], limits=Limits(wall=2))
    assert graded(submission)["my_step"].failures[0].endswith("no answer within 2 s")


def test_only_what_an_exercise_needs_runs_and_a_number_is_a_number(submissions):
    found = graded(submissions["needed"])
    assert found["copied_bytes"].verdict == "passed"
    assert {found[name].verdict for name in ("missed_products", "clipped_norm", "pixels")} == {"failed"}


def test_a_cell_that_is_no_python_is_told_and_the_others_count(submissions):
    assert submissions["cells"].points == 1
    assert len(submissions["cells"].faults) == 1 and submissions["cells"].faults[0].startswith("cell 2: ")
