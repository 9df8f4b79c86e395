"""What `dlspeed doctor` says: one line a finding, and what to do where something is missing."""

import importlib.metadata
import importlib.util
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import torch

from . import book
from .book.plan import plan, total
from .chapters import chapters, tables_of
from .lab import cpu
from .lab.files import project_root
from .lab.machine import PEERS, device_class, environment, half_dtype, installed, without_kernels

NOTEBOOK_PACKAGES = ("nbconvert", "nbclient", "ipykernel", "matplotlib", "pypandoc", "typst", "pikepdf")
FAULT = "FAULT"
PACKAGE = "deep-learning-speed"


def wanted() -> list[str]:
    """What the tables measure or compare with and this machine lacks, as requirements for pip."""
    return [each for each in requirements() if installed(re.match(r"[\w.-]+", each)[0]) is None]


def requirements() -> list[str]:
    """Of measuring and of the tables, but torch: those of the checkout, else of the installed package."""
    of_project = project_root() / "pyproject.toml"
    if of_project.exists():
        project = tomllib.loads(of_project.read_text())["project"]
        lines = project["dependencies"] + project["optional-dependencies"]["tables"]
    else:
        listed = (line.split("; extra == ") for line in importlib.metadata.requires(PACKAGE) or [])
        lines = [need for need, *extra in listed if not extra or "tables" in extra[0]]
    return [line for line in lines if not re.match(r"torch\b(?!text)", line)]


def findings(results: Path | str | None = None) -> Iterator[tuple[str, str]]:
    """Name and finding, in the order in which a person wants to know them."""
    facts = environment()
    for name, value in facts.items():
        if name not in PEERS:
            yield name.replace("_", " "), value or "-"
    yield "processor", cpu.describe()
    if not torch.cuda.is_available():
        yield "CUDA", "not available: what needs a GPU is left out"
    elif reason := without_kernels():
        yield "CUDA", f"unusable: {reason}"
    else:
        yield "16-bit products", str(half_dtype()).removeprefix("torch.")
    if torch.backends.mps.is_available():
        yield "MPS", "an Apple GPU, which is not used: the CPU is measured"
    for name in PEERS:
        yield name, facts[name] + (" (optional)" if facts[name] == "not installed" else "")
    missing = [name for name in NOTEBOOK_PACKAGES if importlib.util.find_spec(name) is None]
    yield "notebooks and report", "missing " + ", ".join(missing) if missing else "ready"
    yield "records in", str(book.folder(results))
    for machine in book.devices(results):
        yield f"  {machine}", _rows_of(machine, results)
    preset = device_class()
    yield "class of machine", preset
    unusable = torch.cuda.is_available() and without_kernels()
    plans = []
    for e in () if unusable else (e for chapter in chapters() for e in tables_of(chapter)):
        try:
            plans.append(plan(e, results=results))
        except (book.RecordError, OSError) as error:
            yield f"  {e.name}", f"{FAULT}: {error}"
    yield "measure would run", "nothing, as the GPU is unusable" if unusable else f"{preset} sizes, {total(plans)}"


def _rows_of(machine: str, results: Path | str | None) -> str:
    """How many rows a machine has recorded; if a table can't be read, the fault, so that the other findings follow."""
    try:
        files = (book.folder(results) / machine).rglob("*.csv")
        return f"{sum(len(book.read_rows(file)) for file in files)} rows"
    except (book.RecordError, OSError) as error:
        return f"{FAULT}: {error}"
