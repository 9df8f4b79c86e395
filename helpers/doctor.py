"""What `dlspeed doctor` says: one line a finding, and what to do where something is missing."""

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from helpers.experiments import chapters, tables_of
from helpers.lab import Experiment, cpu, records
from helpers.lab.machine import PEERS, device_class, device_name, environment, half_dtype, slug, without_kernels
from helpers.lab.plan import plan, total
from helpers.lab.runner import is_fresh

NOTEBOOK_PACKAGES = ("nbconvert", "nbclient", "ipykernel", "matplotlib", "pypandoc", "typst", "pikepdf")
FAULT = "FAULT"


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
    yield "records in", str(records.folder(results))
    for recorded in records.devices(results):
        yield f"  {recorded}", _or_fault(lambda name=recorded: f"{_count(name, results)} rows")
    preset = device_class()
    yield "class of machine", preset
    yield "measure would run", _would_run(results)
    for chapter in chapters():
        for e in tables_of(chapter):
            yield f"  {chapter}/{e.table}", _or_fault(lambda e=e: _recorded(e, preset, results))


def _would_run(results: Path | str | None) -> str:
    """What `measure` would do here, as one line; damaged tables, which the lines of the tables name, are left out."""
    if torch.cuda.is_available() and without_kernels():
        return "nothing, as the GPU is unusable"
    plans = [plan(e, results=results) for chapter in chapters() for e in tables_of(chapter)]
    return f"{device_class()} sizes, {total(plans)}"


def _recorded(e: Experiment, preset: str, results: Path | str | None) -> str:
    rows = records.read_rows(records.path(slug(device_name()), e.chapter, e.table, results))
    configs = e.configurations(preset)
    fresh = sum(is_fresh(e, config, preset, rows) for config in configs)
    return f"{fresh} of {len(configs)} configurations recorded here ({preset})"


def _or_fault(finding: Callable[[], str]) -> str:
    """A finding; if its records can't be read, the fault, so that the other findings follow."""
    try:
        return finding()
    except (records.RecordError, OSError) as error:
        return f"{FAULT}: {error}"


def _count(gpu: str, results: Path | str | None) -> int:
    return sum(len(records.read_rows(file)) for file in (records.folder(results) / gpu).rglob("*.csv"))
