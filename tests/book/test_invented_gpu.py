"""A report of two machines: invented records of a GPU beside a CPU's, for whole tables, parts of some, and none."""

import ast
import contextlib
import json
import re
import shutil
from pathlib import Path

import pytest

from helpers import chapters
from helpers.book import Table, notebook, store
from helpers.lab.machine import slug

ROOT = Path(__file__).parents[2]
GPU = {
    "gpu": "NVIDIA Invented GPU",
    "preset": "big-gpu",
    "driver": "580",
    "torch": "2.11.0",
    "cuda": "13.0",
    "commit": "a",
}
SHOWS = ("@when", ".on(", "decide", "import ", "changes.", "goals.", "machines.")
NAMES = re.compile(r"^GPU, CPU = .*$", re.MULTILINE)
DEFINES = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)


def names_a_constant(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign) and all(isinstance(t, ast.Name) and t.id.isupper() for t in node.targets)


def invent(e: Table, cpu: str, share: float) -> None:
    """Rows of the GPU's configurations: each has the figures of the CPU's row that is most like it."""
    there, identity = store.whole_rows(store.path(cpu, e.chapter, e.table)), e.identity("cpu")
    configs = e.configurations("big-gpu")
    rows = []
    for config in configs[: max(1, round(len(configs) * share))]:
        like = max(there, key=lambda row: sum(str(row.get(name)) == str(value) for name, value in config.items()))
        same = [row for row in there if store.key(row, identity) == store.key(like, identity)]
        figures = [{name: value for name, value in row.items() if name not in (*identity, "checksum")} for row in same]
        rows += [row | config | GPU | {"date": "2030-01-01", "method": str(e.version)} for row in figures]
    store.replace(store.path(slug(GPU["gpu"]), e.chapter, e.table), rows)


@pytest.fixture(params=[1.0, pytest.param(0.5, marks=pytest.mark.long)], ids=["whole", "halves of every other table"])
def invented(request, tmp_path, monkeypatch):
    """The CPU's records, and a GPU's that nobody has."""
    (cpu,) = store.devices(cpu=True)
    shutil.copytree(store.folder() / cpu, tmp_path / cpu)
    monkeypatch.setenv("HELPERS_RESULTS", str(tmp_path))
    monkeypatch.setenv("HELPERS_FIGURES", str(tmp_path / "figures"))
    tables = [e for e in chapters.select([]) if store.path(cpu, e.chapter, e.table).exists()]
    for e in tables[:: 1 if request.param == 1.0 else 2]:
        if e.configurations("big-gpu"):
            invent(e, cpu, request.param)
    return tmp_path


@pytest.mark.long
def test_every_cell_that_shows_records_runs(invented, monkeypatch):
    monkeypatch.setattr(notebook, "display", lambda *shown, **options: None)
    monkeypatch.chdir(ROOT)
    (cpu,) = store.devices(cpu=True)
    named = f"GPU, CPU = {slug(GPU['gpu'])!r}, {cpu!r}"
    for file in sorted(ROOT.glob("notebooks/*.ipynb")):
        space: dict = {}
        for number, cell in enumerate(json.loads(file.read_text())["cells"]):
            source = NAMES.sub(named, "".join(cell["source"]).replace("lab.keep_pages()", ""))
            if cell["cell_type"] != "code" or "install.py" in source:
                continue
            if number <= 3 or any(word in source for word in SHOWS):  # the sizes, and what shows records
                exec(compile(source, f"{file.name}:{number}", "exec"), space)
                continue
            for node in ast.parse(source).body:  # of what is measured live only what it defines
                if isinstance(node, DEFINES) or names_a_constant(node):
                    with contextlib.suppress(NameError):
                        exec(compile(ast.Module([node], []), f"{file.name}:{number}", "exec"), space)
