"""Nothing that is recorded is hidden: each table is shown by a notebook, a GPU's as the GPU's."""

import json
import re

import pytest

from helpers.lab.files import project_root

READ = re.compile(r"chapters\.(\w+)\.(\w+)(?:\.on\((\w+)\))?")
RECORDS = project_root() / "data" / "results"
FILES = sorted(RECORDS.rglob("*.csv"))
# Tables that others' numbers read beside their own
BESIDE = {"rush/pairs": "rush/ladder"}


@pytest.fixture(scope="module")
def shown():
    """Tables with the names of the machines on which they are read, in any notebook; short names are resolved."""
    read: dict[str, set[str]] = {}
    for path in (project_root() / "notebooks").glob("*.ipynb"):
        cells = [
            "".join(cell["source"]) for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"
        ]
        text = "\n".join(cells)
        for name, chapter in re.findall(r"^(\w+) = chapters\.(\w+)$", text, re.MULTILINE):
            text = re.sub(rf"\b{name}\.(?=\w+\.on\()", f"chapters.{chapter}.", text)
        aliases = dict(re.findall(r"^(\w+) = (chapters\.\w+\.\w+)$", text, re.MULTILINE))
        for name, table in aliases.items():
            text = re.sub(rf"\b{name}\.on\(", f"{table}.on(", text)
        for chapter, table, machine in READ.findall(text):
            read.setdefault(f"{chapter}/{table}", set()).update({machine} - {""})
    return read


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(RECORDS)))
def test_a_recorded_table_is_shown_as_its_machines(file, shown):
    name = f"{file.parent.name}/{file.stem}"
    machines = shown.get(BESIDE.get(name, name), None)
    assert machines is not None, f"no notebook shows {name}"
    if not file.parents[1].name.startswith("cpu-"):  # a CPU's may stand back behind a GPU's
        assert "GPU" in machines, f"{name} is shown, but not that of {file.parents[1].name}"
