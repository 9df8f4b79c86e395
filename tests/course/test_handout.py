"""The handout holds no answer, says what is missing, and takes its reader's pieces."""

import ast
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import nbformat
import pytest
from solution_cases import BEFORE, solutions, solved_cells

from helpers.book.build import execute
from helpers.checks.numbers import ANSWERS
from helpers.cli import main
from helpers.course.cutting import without_pieces
from helpers.course.handout import call, notebook
from helpers.grading import EXERCISES, grade

ROOT = Path(__file__).parents[2]
NOTEBOOKS = {int(path.name[:2]): path for path in (ROOT / "notebooks").glob("*.ipynb")}
TEXTS = ".py", ".ipynb", ".md", ".toml", ".json"
TELLING = 40  # letters of a line that is in two places for one reason
ENOUGH = {  # lines of cut pieces that stand elsewhere, too: of others' bookkeeping
    "ifself._plannedisNoneorself._planned[0]!=(epoch,ranks):",
    "random=np.random.default_rng((self.seed,epoch))",
    "raiseValueError(therearenosamples;thedatasetmustholdatleastone)",
    "check_choice(STRATEGIES,strategy=self.strategy)",
    "parameters=[pforgroupinoptimizer.param_groupsforpingroup[params]]",
}
TRAINS = """
from helpers.pieces import use
from helpers.train import Setup, train
%s
for setup in (Setup(precision="dynamic", data="balanced", clip=1.0), Setup(task="segmentation", precision="static")):
    print(train(setup, progress=False)["diverged"])
"""
USES_FORMS = """
from helpers.pieces import use
from helpers.batching import pack
from helpers.models import PositionalEncoding
from helpers.models.gpt import sinusoids
use(%s)
print([list(map(int, each)) for each in pack([5, 4, 3, 2, 1], 6, "first-fit")])
q, k, v = torch.randn(3, 1, 2, 9, 8)
attend = packed_attention(PackedLayout([0, 4, 9]), "varlen", "cpu")
changed = attend(q, k, torch.cat([v[:, :, :4] + 1, v[:, :, 4:]], 2)) - attend(q, k, v)
print([bool(part.abs().max() > 0.5) for part in changed.split([4, 5], 2)])
print(torch.equal(sinusoids(20, 8), PositionalEncoding(8, 20).table))
"""


@pytest.fixture(scope="module")
def handout(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("course") / "handout"
    assert main(["course", str(folder), "--zip", "--address", "https://example.org/course.zip"]) == 0
    return folder


def solved(chapter: int) -> dict[str, str]:
    return {name: cell for name, cell in solved_cells().items() if EXERCISES[name].chapter == chapter}


def closed(text: str) -> str:
    """Without what layout, quotes and JSON add."""
    return re.sub(r"[\s\"'\\]+", "", text.replace("\\n", ""))


def statements(source: str, name: str) -> list[str]:
    """The lines of a definition's body, without docstrings."""
    (node,) = (part for part in ast.parse(source).body if getattr(part, "name", "") == name)
    for part in ast.walk(node):
        if isinstance(part, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(part) is not None:
            part.body = part.body[1:] or [ast.Pass()]
    lines = [line for part in node.body for line in ast.unparse(part).splitlines()]
    return [line for line in map(closed, lines) if len(line) >= TELLING and not line.startswith(("def", "class"))]


def test_nothing_of_an_answer_is_in_a_handout(handout):
    answers = {line for chapter in NOTEBOOKS for n, s in solved(chapter).items() for line in statements(s, n)}
    for exercise in EXERCISES.values():
        for piece in exercise.cut:
            module, _, name = piece.rpartition(".")
            source = (ROOT / "helpers" / Path(*module.split("."))).with_suffix(".py").read_text()
            answers |= set(statements(source, name))
    assert len(answers) > 50
    texts = {path: closed(path.read_text()) for path in handout.rglob("*") if path.suffix in TEXTS}
    assert [(path, answer) for path, text in texts.items() for answer in answers - ENOUGH if answer in text] == []
    assert not list(handout.rglob("solutions")) and not list(handout.rglob("answers.toml"))


def test_no_number_to_hand_in_stands_near_its_name(handout):
    cells = [cell for path in handout.rglob("*.ipynb") for cell in json.loads(path.read_text())["cells"]]
    sources = ["".join(cell["source"]) for cell in cells] + [str(cell.get("outputs")) for cell in cells]
    for name, answer in tomllib.loads(ANSWERS.read_text()).items():
        right = [answer["right"]] if isinstance(answer["right"], str) else answer["right"]
        forms = {closed(form) for end in right for form in (end, f"{eval(end):.4g}", f"{eval(end):,.0f}")}
        near = [closed(source) for source in sources if re.search(rf"\b{name}\b", source)]
        assert near and not [(name, form) for form in forms for text in near if len(form) > 3 and form in text]


def test_outputs_that_give_an_answer_away_are_gone(handout):
    for path in handout.rglob("*.ipynb"):
        for cell in nbformat.validate(book := nbformat.read(path, 4)) or book.cells:
            tags = set(cell.metadata.get("tags", []))
            if cell.cell_type == "code" and (tags & {"exercise", "live"} or "solution" in tags):
                assert cell.outputs == []
    assert any(cell.get("outputs") for cell in nbformat.read(handout / "notebooks" / "01_amp.ipynb", 4).cells)


@pytest.mark.parametrize(
    "exercise", [e for e in EXERCISES.values() if e.name in solved(e.chapter)], ids=lambda e: e.name
)
def test_a_solved_cell_is_a_stub_with_its_points_and_its_check(exercise):
    sources = [
        "".join(cell["source"]) for cell in notebook(json.loads(NOTEBOOKS[exercise.chapter].read_text()))["cells"]
    ]
    (stub,) = (source for source in sources if re.search(rf"^(class|def) {exercise.name}\b", source, re.M))
    assert "raise NotImplementedError  # your code" in stub
    used = [source for source in sources if "import use; use(" in source and exercise.name in source]
    assert bool(used) is bool(exercise.piece)
    assert call(exercise) in sources and any(f"`{exercise.name}` ({exercise.points:g} points)" in s for s in sources)


@pytest.mark.long
def test_the_notebooks_run_and_attempt_nothing(handout):
    for one in grade(sorted((handout / "notebooks").glob("0[1-7]*.ipynb"))):
        assert {each.verdict for each in one.graded} == {"not attempted"} and one.points == 0
        faults = [fault for fault in one.faults if "NotImplementedError" not in fault]
        assert [fault for fault in faults if "NameError" not in fault] == []  # what a stub leaves out
        assert {each.exercise.name for each in one.graded} >= set(solved(int(one.path.name[:2])))


def run(handout: Path, source: str) -> subprocess.CompletedProcess:
    environment = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "HELPERS_CACHE": str(handout.parent / "cache")}
    command = [sys.executable, "-c", source]
    return subprocess.run(command, cwd=handout, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("room", "piece", "exercise"),
    [
        ("amp", "DynamicGradScaler()", "DynamicScaler"),
        ("amp", "Autocast()", "TinyAutocast"),
        ("batching", "pack([3, 2], 5)", "best_fit"),
        ("batching", "packed_attention(PackedLayout([0, 2]), 'varlen', 'cpu')", "my_attention"),
        ("models.gpt", "sinusoids(4, 2)", "MyPositionalEncoding"),
    ],
)
def test_a_piece_that_is_missing_names_its_exercise(handout, room, piece, exercise):
    done = run(handout, f"from helpers.{room} import *; {piece}")
    assert f"solve {exercise}, then `use({exercise})`" in done.stderr.splitlines()[-1]


def test_pieces_that_are_called_otherwise_take_the_readers_solutions(handout):
    names = "first_fit", "best_fit", "my_attention", "MyPositionalEncoding"
    done = run(handout, "\n".join([BEFORE, *map(right, names), USES_FORMS % ", ".join(names)]))
    assert done.stdout.split() == ["[[0,", "4],", "[1,", "3],", "[2]]", "[True,", "False]", "True"], done.stderr


@pytest.mark.long
def test_all_rooms_of_a_handout_import(handout):
    walk = "for m in pkgutil.walk_packages(helpers.__path__, 'helpers.'): '__main__' in m.name or __import__(m.name)"
    assert run(handout, f"import helpers, pkgutil\n{walk}").returncode == 0


def right(name: str) -> str:
    """The notebook's own solution, or one of data/solutions."""
    return solved_cells().get(name) or next(s.source for s in solutions() if s.exercise == name and not s.says)


def solve(book: nbformat.NotebookNode) -> list[str]:
    """Put right solutions into a notebook's exercises, and use them; the names of those that are put in."""
    names = []
    for cell in [cell for cell in book.cells if "exercise" in cell.metadata.get("tags", [])]:
        if defined := [name for name in EXERCISES if re.search(rf"^(class|def) {name}\b", cell.source, re.M)]:
            checked = re.findall(r"^checks\..*", cell.source, re.M)
            cell.source = "\n".join([right(defined[0]), *checked])
            names += defined
        cell.source = cell.source.replace("# from helpers.pieces import use;", "from helpers.pieces import use;")
    return names


@pytest.mark.long
@pytest.mark.parametrize("chapter", range(1, 8))
def test_a_notebook_runs_top_to_bottom_with_right_solutions(handout, chapter):
    path = handout / "notebooks" / NOTEBOOKS[chapter].name
    book = nbformat.read(path, 4)
    names = solve(book)
    others = [each.name for each in EXERCISES.values() if each.piece and each.chapter != chapter]
    (handout / "mine.py").write_text("\n".join([BEFORE, *dict.fromkeys(map(right, others))]))
    book.cells = [cell for cell in book.cells if "slow" not in cell.metadata.get("tags", [])]
    environment = {"HELPERS_CACHE": str(handout.parent / "cache"), "PYTHONPATH": str(handout), "OMP_NUM_THREADS": "1"}
    execute(book, path, environment, lambda: None)
    judged = [cell for cell in book.cells if cell.cell_type == "code" and "checks." in cell.source]
    judged = [cell for cell in judged if "leaking" not in cell.source]  # which is wrong on purpose
    printed = [json.dumps(cell.outputs) for cell in judged]
    assert len(printed) > 2 and not [text for text in printed if "FAILS" in text]
    in_words = {"number", "reading"}
    asked = {each.name for each in EXERCISES.values() if each.chapter == chapter}
    assert set(names) == {name for name in asked if EXERCISES[name].check.__name__ not in in_words}


@pytest.mark.long
def test_our_trainers_use_the_readers_pieces(handout):
    cells = "\n".join(dict.fromkeys([*solved(1).values(), *solved(2).values()]))
    pieces = [name for chapter in (1, 2) for name in solved(chapter) if EXERCISES[name].piece]
    done = run(handout, BEFORE + TRAINS % f"{cells}\nuse({', '.join(pieces)})")
    assert done.stdout.split() == ["False", "False"], done.stderr


MODULE = """import os
_A = 1

def _b():
    return _A

@register
def _():
    return 3

@cache
def _d():
    return _A

@_d.register
def _():
    return 4

_d.more(5)

def piece(x):
    'Says.'
    return _b() + _d()

def c():
    return 2
"""


def test_what_only_a_piece_used_goes_with_it():
    left = without_pieces(MODULE, {"piece": "Mine"}, 1)
    assert [node.name for node in ast.parse(left).body if hasattr(node, "name")] == ["_", "piece", "c"]
    assert "_A" not in left and '@cut("Mine")' in left and "Says." in left and "from ..pieces import cut" in left
