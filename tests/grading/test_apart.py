"""What a submission does to itself, to others and to the machine."""

import nbformat.v4
import pytest

from helpers.grading import Graded, Limits, Submission, grade
from helpers.script import landlock

BUSY = Limits(seconds=2, gib=0.5, cells=30, patience=100)
FORGES = 'import sys; apart = next(m for name, m in sys.modules.items() if name.endswith(".grading.apart"))'

# What my_step does when it is called, or a cell of its own, and what is said of it.
DOES = {
    "while True: pass": "no answer within 2 s of CPU time",
    "while True: print('x' * 10_000, flush=True)": "no answer within 2 s of CPU time",
    "import ctypes; ctypes.string_at(0)": "its process was ended by SIGSEGV",
    "raise SystemExit(0)": "SystemExit: 0",
    "kept = [bytearray(2**27) for _ in range(10_000)]": "MemoryError",
    "import torch; kept = [torch.ones(2**25) for _ in range(10_000)]": "can't allocate memory",
    "import os, signal; os.killpg(0, signal.SIGKILL)": "its process was ended by SIGKILL",
}
CALLED = DOES | {
    "import os; os._exit(0)": "no answer",
    "import os, signal; os.kill(os.getppid(), signal.SIGKILL)": "",
    "import os; os.remove({theirs!r})": "PermissionError",
    "import socket; socket.create_connection(('127.0.0.1', 9))": "Error",
    "open({theirs!r}, 'w').write('changed')": "PermissionError",
    "open({theirs!r}).read()": "PermissionError",
    "from helpers.checks.numbers import ANSWERS; ANSWERS.read_text()": "PermissionError",
    "from helpers import checks; raise KeyError(open(checks.__file__).read()[:24])": "Checks that judge any",
}
# What it does when it is defined: answers are left out or made up, or are no answers.
DEFINES = {
    f"{FORGES}; apart.answers = lambda lines: iter(())": "no answer",
    f"{FORGES}; apart.answers = lambda lines: iter([('repeats', '')] * 9)": "no answer",
    f"{FORGES}; apart.answers = lambda lines: iter([('holds', True)] * 9)": "no answer",
    f"{FORGES}; apart.torch.save = lambda _, to: to.write(__import__('pickle').dumps(Runs()))": "that can't be read",
}
# Each ends the cell, some its process; what came before is there again, what comes after runs.
CELLS = DOES | {"exit()": "SystemExit", "import os; os._exit(0)": "its process ended"}
# What is at top level, between definitions and after them.
TOP_LEVEL = """
raise RuntimeError("a cell that measures")
LOW = set()
for number in (1, 2):
    LOW.add(number)
FUNCTIONS = {}
def register(name, function):
    FUNCTIONS[name] = function
register("rest", lambda: 57)
class Total:
    pass
setattr(Total, "compute", lambda self: sum(LOW) + FUNCTIONS["rest"]())
def wrap(function):
    return lambda *arguments: function(*arguments) / 30
pixels_of = lambda sigma: sigma * 2**25 * 30
pixels_of = wrap(pixels_of)
copied_bytes = Total().compute()
pixels = pixels_of(1 / 5)
missed_products, clipped_norm = "two", lambda: 2**-10
LOW.clear()
class MyScaler:
    def __init__(self, init_scale): self.factor = init_scale
setattr(MyScaler, "scale", lambda self, loss: loss * self.factor)
"""
NOTEBOOK = ["%matplotlib inline\ncopied_bytes = 60", "def my_step(:", "!pip list", "copied_bytes = 0"]


def notebook(sources: list[str], slow: int = -1) -> str:
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    if slow >= 0:
        cells[slow].metadata["tags"] = ["slow"]
    return nbformat.v4.writes(nbformat.v4.new_notebook(cells=cells))


@pytest.fixture(scope="module")
def submissions(tmp_path_factory) -> dict[str, Submission]:
    """All of them in one go, each with a right number beside."""
    folder = tmp_path_factory.mktemp("handed-in")
    (folder / "theirs").write_text("kept")
    sources = {"top level.py": TOP_LEVEL, "notebook.ipynb": notebook(NOTEBOOK, slow=3)}
    for number, does in enumerate(CALLED):
        line = does.replace("{theirs!r}", repr(str(folder / "theirs")))
        sources[f"called{number}.py"] = f"def my_step(*_):\n    {line}\ncopied_bytes = 60\n"
    for number, does in enumerate(DEFINES):
        runs = f"class Runs:\n    def __reduce__(self):\n        return open, ({str(folder / 'ran')!r}, 'w')\n"
        forge = f"def forge():\n    global apart\n    {does}\n"
        sources[f"forged{number}.py"] = f"{runs}{forge}def my_step(*_, forged=forge()): ...\ncopied_bytes = 60\n"
    for number, does in enumerate(CELLS):
        sources[f"cell{number}.ipynb"] = notebook(["kept = 59", does, "copied_bytes = kept + 1"])
    for name, source in sources.items():
        (folder / name).write_text(source)
    graded = grade([folder / name for name in sources], limits=BUSY, seed=0)
    return {submission.path.name: submission for submission in graded}


def graded(submission: Submission) -> dict[str, Graded]:
    return {each.exercise.name: each for each in submission.graded}


@pytest.mark.long
@pytest.mark.parametrize(("name", "says"), [(f"called{n}.py", says) for n, says in enumerate(CALLED.values())])
def test_what_goes_wrong_in_an_exercise_costs_its_own_points_alone(name, says, submissions):
    if says == "PermissionError" and landlock.unlimited():
        pytest.skip("the kernel has no Landlock, or an old one")
    found = graded(submissions[name])
    assert found["my_step"].verdict == "failed" and found["my_step"].points == 0
    assert says in "\n".join(found["my_step"].failures)
    assert found["copied_bytes"].points == 1


@pytest.mark.parametrize(("name", "says"), [(f"forged{n}.py", says) for n, says in enumerate(DEFINES.values())])
def test_who_forges_answers_has_no_points(name, says, submissions):
    assert submissions[name].points == 0
    assert says in "\n".join(graded(submissions[name])["my_step"].failures)


@pytest.mark.parametrize(("name", "says"), [(f"cell{n}.ipynb", says) for n, says in enumerate(CELLS.values())])
def test_what_goes_wrong_in_a_cell_costs_that_cell_alone(name, says, submissions):
    assert graded(submissions[name])["copied_bytes"].points == 1
    (fault,) = submissions[name].faults
    assert fault.startswith("cell 2: ") and says in fault


def test_files_of_others_are_as_before(submissions):
    (folder,) = {submission.path.parent for submission in submissions.values()}
    assert (folder / "theirs").read_text() == "kept"
    assert not (folder / "ran").exists()


def test_code_at_top_level_runs_as_it_stands_until_an_exercise_is_named_last(submissions):
    found = graded(submissions["top level.py"])
    assert found["copied_bytes"].verdict == found["pixels"].verdict == "passed"
    assert {found[name].verdict for name in ("missed_products", "clipped_norm")} == {"failed"}
    assert found["MyScaler"].held[0] and found["MyScaler"].verdict == "failed"
    assert submissions["top level.py"].faults == ["line 2: RuntimeError: a cell that measures"]


def test_a_cell_that_is_no_python_is_told_and_a_slow_one_is_passed_over(submissions):
    assert submissions["notebook.ipynb"].points == 1
    assert len(submissions["notebook.ipynb"].faults) == 1
    assert submissions["notebook.ipynb"].faults[0].startswith("cell 2: ")


@pytest.mark.long
def test_one_that_waits_for_ever_is_ended(tmp_path):
    (tmp_path / "waits.py").write_text("def my_step(*_):\n    import time\n    time.sleep(1e6)\n")
    (submission,) = grade([tmp_path / "waits.py"], limits=Limits(seconds=1))
    assert graded(submission)["my_step"].failures[0].endswith("no answer within 3 s")


@pytest.mark.long
def test_all_cells_together_have_a_limit(tmp_path):
    (tmp_path / "late.ipynb").write_text(notebook(["while True: pass"] * 9 + ["copied_bytes = 60"]))
    (submission,) = grade([tmp_path / "late.ipynb"], limits=Limits(seconds=1, cells=2, patience=100))
    assert "the cells took 2 s of CPU time" in graded(submission)["copied_bytes"].failures[0]
    assert 1 <= len(submission.faults) <= 4
