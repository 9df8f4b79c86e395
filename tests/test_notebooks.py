"""Every notebook runs on the small preset, and the report says what the records say: no more, no less."""

import filecmp
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
from pdf_text import first_differences, pages_of

from helpers.lab.report import build

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU a notebook measures the full preset")


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


@on_cpu
def test_the_committed_report_says_what_a_new_one_says(built):
    committed = ROOT / "report.pdf"
    if built.read_bytes() != committed.read_bytes():
        apart = first_differences(*("\n".join(pages_of(pdf)) for pdf in (built, committed)))
        assert not apart, f"run `make notebooks` and commit what it writes: {apart}"


@on_cpu
def test_the_committed_outputs_give_the_same_report_byte_for_byte(built, tmp_path):
    again = build(execute=False, output=tmp_path / "report.pdf", figures=tmp_path / "figures", progress=False)
    assert filecmp.cmp(again, built, shallow=False)
    assert filecmp.cmp(ROOT / "README.md", built.parent / "README.md", shallow=False)
    for figure in (built.parent / "figures").iterdir():
        assert filecmp.cmp(tmp_path / "figures" / figure.name, figure, shallow=False), figure
        assert filecmp.cmp(ROOT / "figures" / figure.name, figure, shallow=False), figure


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


def test_the_lines_of_code_beside_the_formulas_are_lines_of_the_code():
    """The chapter sets each derivative beside the line that computes it."""
    notebook = nbformat.read(ROOT / "notebooks" / "04_swiglu_checkpointing.ipynb", as_version=4)
    table = next(c.source for c in notebook.cells if "| formula | line of code |" in c.source)
    quoted = re.findall(r"`([^`]+)`", table.split("| formula | line of code |")[1].split("\n\n")[0])
    assert len(quoted) == 8
    rooms = (ROOT / "helpers" / "swiglu").glob("*.py")
    sources = "\n".join(path.read_text() for path in rooms)
    for line in quoted:
        assert line in sources, line


def test_one_notebook_exports_with_nbconvert(tmp_path):
    command = [sys.executable, "-m", "jupyter", "nbconvert", "--to", "helpers.lab.report.ReportExporter"]
    command += ["--output-dir", str(tmp_path), str(ROOT / "notebooks" / "04_swiglu_checkpointing.ipynb")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=os.environ)
    assert done.returncode == 0, done.stderr
    (pdf,) = tmp_path.glob("*.pdf")
    assert "SwiGLU" in "\n".join(pages_of(pdf))
