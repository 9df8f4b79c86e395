"""The solutions of data/solutions: right ones, and wrong ones with what the grader must say of them."""

import tomllib
from dataclasses import dataclass
from pathlib import Path

from helpers.grading import EXERCISES, Graded, grade

ROOT = Path(__file__).parents[1] / "data" / "solutions"
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


def solutions() -> list[Solution]:
    found = []
    for path in sorted(ROOT.glob("*/*/*.py")):
        source = path.read_text()
        says = next((line[8:] for line in source.splitlines() if line.startswith("# says: ")), "")
        assert bool(says) == path.stem.startswith("wrong_"), path
        found.append(Solution(path.parent.name, f"{path.parent.name}/{path.stem}", source, says))
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
    graded = [next(g for g in one.graded if g.check) for one in grade(paths, seed=seed)]
    assert [g.exercise.name for g in graded] == [each.exercise for each in chosen]
    return [fault for each, one in zip(chosen, graded, strict=True) for fault in each.faults(one)]
