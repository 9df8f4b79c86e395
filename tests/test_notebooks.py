"""Every notebook runs top to bottom, its cells are short, and the report is a function of notebooks and records."""

import ast
import filecmp
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import torch
import torch.nn.functional as F
from pdf_text import first_differences, pages_of

from helpers.book import build

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "USING.md", "CONTRIBUTING.md")
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.fixture(scope="session")
def built(tmp_path_factory) -> Path:
    """The report as `make report` builds it in another folder: notebooks executed, records as committed."""
    folder = tmp_path_factory.mktemp("a-clone-in-a-folder-with-a-name-of-another-length")
    for name in ("helpers", "notebooks", "data"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    done = subprocess.run([sys.executable, "-m", "helpers", "report"], capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "report.pdf"


@pytest.mark.long
def test_the_committed_report_says_what_a_new_one_says(built):
    committed = ROOT / "report.pdf"
    if built.read_bytes() != committed.read_bytes():
        apart = first_differences(*("\n".join(pages_of(pdf)) for pdf in (built, committed)))
        assert not apart, f"run `make notebooks` and commit what it writes: {apart}"


@pytest.mark.long
def test_the_committed_outputs_give_the_same_report_byte_for_byte(built, monkeypatch):
    names = ["README.md", *(f"figures/{figure.name}" for figure in (built.parent / "figures").iterdir())]
    assert filecmp.cmpfiles(built.parent, ROOT, names, shallow=False) == (names, [], [])
    executed = {name: (built.parent / name).read_bytes() for name in ["report.pdf", *names]}
    monkeypatch.setenv("HELPERS_ROOT", str(built.parent))  # its notebooks are still as they were committed
    build(execute=False)
    assert [name for name, content in executed.items() if (built.parent / name).read_bytes() != content] == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_committed_notebook_is_one_clean_run(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert "widgets" not in notebook.metadata
    outputs = [output for cell in code for output in cell.outputs]
    assert outputs
    assert all(output.output_type != "error" and output.get("name") != "stderr" for output in outputs)
    assert str(Path.home()) not in json.dumps(notebook)


def cells_of(path: Path, kind: str = "code") -> list[str]:
    return [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == kind]


def test_the_first_cell_of_all_is_the_same_and_the_second_has_sizes_to_change():
    first, sizes = zip(*(cells_of(path)[:2] for path in NOTEBOOKS), strict=True)
    assert len(set(first)) == 1
    for source in sizes:
        names = [name.id for node in ast.parse(source).body for name in ast.walk(node) if isinstance(name, ast.Name)]
        assert 3 <= len(names) <= 7, source  # with the two machines
        assert source.startswith("# Sizes")


def test_each_notebook_ends_with_a_link_to_the_next():
    following = [*NOTEBOOKS[1:], NOTEBOOKS[0]]
    for path, after in zip(NOTEBOOKS, following, strict=True):
        last = nbformat.read(path, as_version=4).cells[-1].source
        assert re.search(rf"Next: \[.*\]\({after.name}\)\.$", last), path


@pytest.fixture
def hosted(tmp_path, monkeypatch):
    """The first cell, run in a clone's notebooks/ with some modules missing: what it hands to subprocess.run."""
    (tmp_path / "notebooks").mkdir()
    shutil.copy(ROOT / "notebooks" / "install.py", tmp_path / "notebooks")
    shutil.copy(ROOT / "requirements-notebook.txt", tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")

    def run(*missing: str, folder: Path = tmp_path / "notebooks") -> list[list[str]]:
        find_spec, ran = importlib.util.find_spec, []
        with monkeypatch.context() as patch:
            patch.chdir(folder)
            patch.setattr(importlib.util, "find_spec", lambda name: None if name in missing else find_spec(name))
            patch.setattr(subprocess, "run", lambda command, check: ran.append(command))
            exec(cells_of(NOTEBOOKS[0])[0], {})
        return ran

    return run


def test_where_all_is_there_the_first_cell_only_finds_the_checkouts_library(hosted, tmp_path):
    assert hosted() == []
    assert sys.path[0] == str(tmp_path) and os.environ["PYTHONPATH"] == f"{tmp_path}{os.pathsep}/elsewhere"


@pytest.mark.parametrize("folder", [".", "notebooks"])
@pytest.mark.parametrize("missing", ["pandas", "torchtext"])
def test_on_a_hosted_machine_the_first_cell_installs_and_finds_the_library(missing, folder, hosted, tmp_path):
    (command,) = hosted(missing, folder=tmp_path / folder)
    assert command[:4] == [sys.executable, "-m", "pip", "install"]
    assert command[-1] == str(tmp_path / "requirements-notebook.txt")
    assert sys.path[0] == str(tmp_path)
    assert os.environ["PYTHONPATH"].split(os.pathsep) == [str(tmp_path), "/elsewhere"]


def test_what_a_hosted_machine_installs_leaves_its_torch_and_its_kernel_alone():
    lines = (ROOT / "requirements-notebook.txt").read_text().splitlines()
    names = {re.match(r"[\w-]+", line)[0] for line in lines if not line.startswith("#")}
    assert not names & {"torch", "jupyter", "ipykernel", "ipython", "nbconvert"}
    pinned = {re.match(r"[\w-]+", line)[0] for line in (ROOT / "requirements.txt").read_text().splitlines()[1:-1]}
    assert names <= pinned


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_cells_are_short_and_have_no_guards(path):
    for cell in nbformat.read(path, as_version=4).cells:
        tags = cell.metadata.get("tags", [])
        if cell.cell_type == "code" and "live" not in tags:
            assert len(cell.source.splitlines()) <= (40 if "show-code" in tags else 16), cell.source
            assert "if len(" not in cell.source, cell.source


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_no_figure_of_a_measurement_is_typed_into_what_is_shown(path):
    """Digits in the strings that a cell shows come out of braces, but for names (level 2, bf16) and settings."""
    assert [typed for source in cells_of(path) for typed in typed_figures(source)] == []


def test_every_ratio_that_is_shown_has_an_interval_or_a_derivation():
    for path in NOTEBOOKS:
        shown = json.dumps([cell.get("outputs", []) for cell in json.loads(path.read_text())["cells"]])
        assert "(unpaired)" not in shown, path.name  # with an interval it is "(2.1 to 2.3, unpaired)"


def test_a_typed_figure_is_found():
    shown = (
        'table(rows, "a step takes 12 ms")\nsay(f"level 2 takes {ratio}× in bf16", f"it takes 1.03×, {n} of 20 rows")'
    )
    assert typed_figures(f'{shown}\nprint("15 %")') == ["12 ms", "1.03×"]


SHOWING = ("say", "show_list", "table", "figure", "readme", "reading")
_FIGURE = re.compile(r"\d[\d.,]*\s?(?:×|%|ms\b|s\b|µs|[KMGT]iB|GB/s|TFLOP/s|MB\b|GB\b|times\b|tokens/s)")


def typed_figures(source: str) -> list[str]:
    """Numbers with a unit in the strings handed to what shows text, captions included."""
    calls = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in SHOWING
    ]
    texts = [
        part.value
        for call in calls
        for argument in call.args
        for part in ast.walk(argument)
        if isinstance(part, ast.Constant) and isinstance(part.value, str) and not _is_key(argument, part)
    ]
    return [match[0].strip() for text in texts for match in _FIGURE.finditer(text)]


def _is_key(argument: ast.AST, part: ast.Constant) -> bool:
    """Whether a string only looks something up, or is a format."""
    inside = (node for node in ast.walk(argument) if isinstance(node, (ast.Subscript, ast.FormattedValue)))
    return any(part in ast.walk(node) for node in inside)


def test_the_loop_to_copy_trains(monkeypatch):
    """As it is printed, but for the sizes and a compiler that takes no seconds."""
    (cell,) = [text for text in cells_of(NOTEBOOKS[0], "markdown") if text.startswith("```python")]
    source = cell.removeprefix("```python\n").removesuffix("```").replace("8192", "32")
    source = source.replace("vocab_size,", "20, d_model=8, num_heads=1, num_layers=1,")
    source = source.replace('"cuda"', '"cpu"').replace("lr=3e-4", "lr=1e-3")
    source = source.replace("num_workers=2", "num_workers=0").replace("compile()", 'compile(backend="eager")')
    losses, cross_entropy = [], F.cross_entropy
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda precision: None)
    monkeypatch.setattr(F, "cross_entropy", lambda *of: losses.append(loss := cross_entropy(*of)) or loss)
    texts = [torch.arange(1, length) for length in (20, 12, 9, 15, 3)] * 20
    exec(source, {"texts": texts})
    assert len(losses) > 10
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("path", [*NOTEBOOKS, *map(ROOT.joinpath, PAGES)], ids=lambda path: path.stem)
def test_files_that_are_named_exist(path):
    text = "\n".join(cells_of(path) + cells_of(path, "markdown")) if path in NOTEBOOKS else path.read_text("utf-8")
    named = re.findall(r"(?<![\w/.-])(?:helpers|data|tests|notebooks)/[\w/.-]*\w", text)
    assert [name for name in named if "/x/" not in name and "NN" not in name and not (ROOT / name).exists()] == []


def test_one_notebook_exports_with_nbconvert(tmp_path):
    command = [sys.executable, "-m", "jupyter", "nbconvert", "--to", "dlspeed.book.ReportExporter"]
    command += ["--output-dir", str(tmp_path), str(ROOT / "notebooks" / "04_swiglu_checkpointing.ipynb")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=os.environ)
    assert done.returncode == 0, done.stderr
    (pdf,) = tmp_path.glob("*.pdf")
    assert "SwiGLU" in "\n".join(pages_of(pdf))
