"""The solutions of data/solutions: right ones, and wrong ones with what the grader must say of them."""

import json
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

from helpers.grading import EXERCISES, Graded, grade

ROOT = Path(__file__).parents[1] / "data" / "solutions"
BEFORE = """import numpy as np
import torch
import torch.nn.functional as F
from functools import partial
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map
from helpers.batching import PackedLayout, packed_attention
"""
CHAPTERS = {"amp": 1, "batching": 2, "profiling": 3, "swiglu": 4, "rush": 5, "pipelines": 6, "compilers": 7}


@dataclass(frozen=True)
class Solution:
    """The source of one; a wrong one `says` what is wrong with it."""

    exercise: str
    label: str
    source: str
    says: str = ""

    @property
    def chapter(self) -> int:
        return EXERCISES[self.exercise].chapter

    def faults(self, graded: Graded) -> list[str]:
        """What was graded otherwise than it is."""
        told = "\n".join(graded.failures)
        if not self.says:
            return [] if graded.verdict == "passed" else [f"{self.label} is right: {graded.verdict} {told}"]
        if graded.verdict != "failed" or graded.points >= graded.exercise.points:
            return [f"{self.label} is wrong: {graded.verdict}"]
        return [] if self.says in told else [f"{self.label}: {self.says!r} isn't in {told!r}"]


def solved_cells() -> dict[str, str]:
    """By exercise the cell of a notebook that solves it."""
    books = [json.loads(path.read_text()) for path in sorted((ROOT.parents[1] / "notebooks").glob("*.ipynb"))]
    cells = [cell for book in books for cell in book["cells"] if "solution" in cell["metadata"].get("tags", [])]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    return {n: s for s in sources for n in EXERCISES if re.search(rf"^(class|def) {n}\b", s, re.MULTILINE)}


def solutions() -> list[Solution]:
    found = []
    for path in sorted(ROOT.glob("*/*/*.py")):
        source = path.read_text()
        says = next((line[8:] for line in source.splitlines() if line.startswith("# says: ")), "")
        assert bool(says) == path.stem.startswith("wrong_"), path
        found.append(Solution(path.parent.name, f"{path.parent.name}/{path.stem}", source, says))
    for name, source in solved_cells().items():
        found.append(Solution(name, f"{name}/the notebook's", f"{BEFORE}{source}"))
    for path in sorted(ROOT.glob("*/numbers.toml")):
        for name, kinds in tomllib.loads(path.read_text()).items():
            answers = dict.fromkeys(kinds["right"], "") | kinds["wrong"]
            found += [Solution(name, f"{name} = {n}", f"{name} = {n}\n", says) for n, says in answers.items()]
    return found


def faults(chosen: list[Solution], folder: Path, seed: int) -> list[str]:
    """Grade them in one go; what was graded otherwise than it is."""
    paths = []
    for number, each in enumerate(chosen):
        paths.append(folder / f"{number:03d}.py")
        paths[-1].write_text(each.source)
    names = dict(zip(paths, [each.exercise for each in chosen], strict=True))
    graded = [next(g for g in one.graded if g.exercise.name == names[one.path]) for one in grade(paths, seed=seed)]
    return [fault for each, one in zip(chosen, graded, strict=True) for fault in each.faults(one)]
