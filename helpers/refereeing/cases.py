"""A case is a folder with a training script and what an edited one must leave as it is; a submission edits scripts.

script.py       the training, which makes its data itself
case.toml       the fields of `Case` after `folder`
fix.patch       the reference: a diff of script.py, which nobody who plays sees
…               files that the script reads
"""

import hashlib
import re
import shutil
import subprocess
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..lab.arguments import has_form

SCRIPT, ABOUT, FIX = "script.py", "case.toml", "fix.patch"
HIDDEN = (ABOUT, FIX, "__pycache__")
FIELDS = {"arguments": [str], "seconds": float, "evaluation": str, "outputs": [str]}
BITWISE, SEEDS, BATCHES = "bitwise", "within seeds", "other batches"
# What an edited script may not name: the referee's own modules, its pipes, and other processes.
OURS = re.compile(r"\bdlspeed\b|HELPERS_T|/proc/|_getframe|get_referrers|get_objects|\bdebugpy\b|settrace")


class WrongCase(Exception):
    """A folder that is no case; the message says why in one line."""


class Refused(Exception):
    """A submission that isn't run."""


@dataclass(frozen=True)
class Case:
    """`same` says what its fix is: exact (`BITWISE`), within seeds in each step's loss, or in the course (`BATCHES`).

    By the last a submission is judged, too. `evaluation` is a regular expression whose group is a number that the
    script prints, `outputs` are patterns of files that it writes. A whole run may take `seconds`.
    """

    folder: Path
    same: str = SEEDS
    arguments: tuple[str, ...] = ()
    seconds: float = 120.0
    evaluation: str = ""
    outputs: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def script(self) -> str:
        return (self.folder / SCRIPT).read_text()

    def digest(self, script: str) -> str:
        """Of the case and an edited script: what was judged under it needn't be judged again."""
        files = sorted(path for path in self.folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
        return hashlib.sha256(b"\0".join([script.encode(), *(path.read_bytes() for path in files)])).hexdigest()

    def prepare(self, script: str, folder: Path) -> Path:
        """A new folder with what a run sees; returns its script."""
        shutil.copytree(self.folder, folder, ignore=shutil.ignore_patterns(*HIDDEN))
        (folder / SCRIPT).write_text(script)
        return folder / SCRIPT

    def patched(self, patch: Path, folder: Path) -> str:
        """The script under a patch. Refused if the patch doesn't apply or changes anything else."""
        self.prepare(self.script, folder)
        before = contents(folder)
        command = ["git", "apply", "-p1", "--whitespace=nowarn", str(patch.resolve())]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        if done.returncode:
            raise Refused(f"the patch doesn't apply: {done.stderr.strip()[:200]}")
        after = contents(folder)
        others = [name for name in before | after if name != SCRIPT and before.get(name) != after.get(name)]
        if others or SCRIPT not in after:
            raise Refused(f"the patch changes {', '.join(sorted(others)) or SCRIPT}, not {SCRIPT} alone")
        return (folder / SCRIPT).read_text()


def contents(folder: Path) -> dict[str, str]:
    """The hash of each file by its path."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def read_case(folder: Path) -> Case:
    """WrongCase if a file is missing or a field has no meaning."""
    for name in (SCRIPT, ABOUT, FIX):
        if not (folder / name).is_file():
            raise WrongCase(f"{folder} is no case: it has no {name}")
    try:
        about = tomllib.loads((folder / ABOUT).read_text())
        if not has_form(about, FIELDS) or not about.get("seconds", 1) > 0:
            raise ValueError("a field is of another type than a case's")
        about |= {name: tuple(about.get(name, ())) for name in ("arguments", "outputs")}
        case = Case(folder.resolve(), **about)
        compile(case.script, SCRIPT, "exec")
        if case.evaluation and not re.compile(case.evaluation).groups:
            raise ValueError("evaluation has no group, which would be the number")
    except (TypeError, ValueError, SyntaxError, RecursionError, OverflowError, re.error) as error:
        raise WrongCase(f"{folder / ABOUT}: {error!s:.300}") from None
    if case.same not in (BITWISE, SEEDS, BATCHES):
        raise WrongCase(f"{folder / ABOUT}: same = {case.same!r:.300} is none of {BITWISE}, {SEEDS}, {BATCHES}")
    return case


def read_cases(folder: Path) -> list[Case]:
    found = [folder] if (folder / ABOUT).is_file() else sorted(path.parent for path in folder.glob(f"*/{ABOUT}"))
    if not found:
        raise WrongCase(f"{folder} holds no case: none of its folders has a {ABOUT}")
    return list(map(read_case, found))


def submitted(case: Case, submission: Path, workspace: Callable[[], Path]) -> str:
    """The edited script of a submission: NAME.py, NAME/script.py or NAME.patch; the case's own where it has none."""
    found = [submission / f"{case.name}.py", submission / case.name / SCRIPT, submission / f"{case.name}.patch"]
    found = [path for path in found if path.is_file() and (path.suffix != ".patch" or _edits(path.read_text()))]
    if not found:
        return case.script
    script = case.patched(found[0], workspace()) if found[0].suffix == ".patch" else found[0].read_text()
    named = set(OURS.findall(script)) - set(OURS.findall(case.script))
    if named:
        raise Refused(f"the script names {', '.join(sorted(named))}, which is the referee's")
    try:
        compile(script, SCRIPT, "exec")
    except (SyntaxError, ValueError) as error:
        raise Refused(f"the script is no Python: {error}") from None
    return script


def _edits(patch: str) -> bool:
    """Whether a patch has more than comments: `try` writes none where nothing helped, or variables of the shell."""
    return any(line and not line.startswith("#") for line in patch.splitlines())
