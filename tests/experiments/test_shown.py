"""Nothing that is recorded is hidden: each table is shown by a notebook, a GPU's as the GPU's."""

import json
import re

import pytest

from helpers.chapters import select
from helpers.lab.machine import project_root
from helpers.lab.records import devices, folder
from helpers.lab.records.results import recorded

NAMED = re.compile(r"(?:(?:experiments|chapters)\.(\w+)|\b(RUSH))\.(\w+)")
RECORDS = project_root() / "data" / "results"
FILES = sorted(RECORDS.rglob("*.csv"))


@pytest.fixture(scope="module")
def cells():
    """The sources of all code cells, and of the summary's claims, which read tables; each with those that it names."""
    notebooks = (json.loads(path.read_text()) for path in (project_root() / "notebooks").glob("*.ipynb"))
    sources = ["".join(cell["source"]) for book in notebooks for cell in book["cells"] if cell["cell_type"] == "code"]
    sources.append((project_root() / "helpers" / "claims" / "summary.py").read_text())
    return [(text, {f"{a or b.lower()}/{table}" for a, b, table in NAMED.findall(text)}) for text in sources]


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(RECORDS)))
def test_a_recorded_table_is_shown_as_its_machines(file, cells, monkeypatch):
    monkeypatch.delenv("HELPERS_RESULTS", raising=False)
    assert folder() == RECORDS
    machine, name = file.parents[1].name, f"{file.parent.name}/{file.stem}"
    showing = [text for text, named in cells if name in named]
    assert showing, f"no notebook shows {name}"
    (experiment,) = select([name])
    if machine in devices() and recorded(experiment).machine != machine:
        chapter, table = file.parent.name, file.stem
        shown = re.findall(rf"^(\w+) = results\(experiments\.{chapter}\.{table}\)", "\n".join(showing), re.MULTILINE)
        of_gpu = [text for text, _ in cells if ".on_gpu" in text and any(f"@when({it})" in text for it in shown)]
        named = any(re.search(rf"chapters\.{chapter}\.{table}\b(?s:.)*\.on\(", text) for text in showing)
        assert of_gpu or named, f"{name} is shown, but not that of {machine}"
