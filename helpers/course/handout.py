"""`dlspeed course DIR`: what students get. Nothing in it is an answer, and what no exercise asks for works."""

import ast
import copy
import json
import shutil
import uuid
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path
from typing import Any

from ..grading.cells import Cell
from ..grading.exercises import EXERCISES, Exercise
from ..lab.files import project_root
from .cutting import stubs, without_pieces

FILES = "LICENSE", "README.md", "USING.md", "pyproject.toml", "requirements.txt", "requirements-notebook.txt"
# Left out, of which `my_reading` asks for the last.
LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.pyc", ".*", "solutions", "gradescope", "gpt_fixes.csv")
CLEARED = {"live", "exercise", "answer"}  # tags of cells whose outputs no student gets
MINE = '"""What you wrote, by the names of the exercises, for the notebooks and scripts that need it, too."""\n'
FETCHED = """# The file beside this notebook installs what is missing; alone, the notebook fetches the course.
import io, os, urllib.request, zipfile
from pathlib import Path

if not any(Path(folder, "install.py").is_file() for folder in ("", "notebooks", "course/notebooks")):
    zipfile.ZipFile(io.BytesIO(urllib.request.urlopen("{address}").read())).extractall("course")
os.chdir("course" if Path("course/notebooks").is_dir() else ".")
exec((Path("notebooks") if Path("notebooks").is_dir() else Path()).joinpath("install.py").read_text())"""


def hand_out(folder: Path, address: str = "", archive: bool = False) -> str:
    """Fill a new folder; a line about it. With the `address` of its zip a notebook alone fetches what it needs."""
    root, package = project_root(), Path(__file__).parents[1]
    if not (root / "notebooks").is_dir():
        raise ValueError(f"{root} has no notebooks: run it in a checkout")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is there already: name a new or an empty folder")
    shutil.copytree(package, folder / "helpers", ignore=LEFT_OUT)
    shutil.copytree(root / "data", folder / "data", ignore=LEFT_OUT)
    (folder / "notebooks").mkdir()
    for name in FILES:
        shutil.copy(root / name, folder)
    shutil.copy(root / "notebooks" / "install.py", folder / "notebooks")
    for path in sorted((root / "notebooks").glob("*.ipynb")):
        cells = notebook(json.loads(path.read_text(encoding="utf-8")), address)
        text = json.dumps(cells, ensure_ascii=False, indent=1) + "\n"
        (folder / "notebooks" / path.name).write_text(text, encoding="utf-8")
    (folder / "mine.py").write_text(MINE, encoding="utf-8")
    pieces = cut_pieces(folder / "helpers")
    told = f"{folder}: {len(EXERCISES)} exercises, {pieces} pieces of helpers cut"
    return f"{told}; {shutil.make_archive(str(folder), 'zip', folder)}" if archive else told


def cut_pieces(package: Path) -> int:
    """Cut in a copy of this package what exercises ask for; how many pieces there were."""
    by_file: dict[Path, dict[str, str]] = defaultdict(dict)
    for exercise in EXERCISES.values():
        for piece in exercise.cut:
            module, _, name = piece.rpartition(".")
            path = package.joinpath(*module.split(".")).with_suffix(".py")
            by_file[path][name] = exercise.name
    for path, exercises in by_file.items():
        depth = len(path.relative_to(package).parts) - 1
        source = path.read_text(encoding="utf-8")
        path.write_text(without_pieces(source, exercises, depth), encoding="utf-8")
    return sum(map(len, by_file.values()))


def notebook(whole: dict[str, Any], address: str = "") -> dict[str, Any]:
    """A notebook without what its cells tagged `solution` hold, and without outputs that give an answer away."""
    whole, cells = copy.deepcopy(whole), []
    sources = {each["id"]: "".join(each["source"]) for each in whole["cells"] if each["cell_type"] == "code"}
    solved = {each["id"] for each in whole["cells"] if "solution" in each["metadata"].get("tags", [])}
    there = [source for name, source in sources.items() if name not in solved]
    for cell in whole["cells"]:
        source, tags = "".join(cell["source"]), set(cell["metadata"].get("tags", []))
        if "solution" in tags:
            cells += _exercise(source, there) if cell["cell_type"] == "code" else []
            continue
        if cell["cell_type"] == "code" and (tags & CLEARED or _names(source) & set(EXERCISES)):
            cell |= {"outputs": [], "execution_count": None}
        if address and "install.py" in source:
            cell["source"] = FETCHED.replace("{address}", address).splitlines(keepends=True)
        cells.append(cell)
        if "exercise" in tags:
            cells += _used(_names(source))
    return whole | {"cells": cells}


def _names(source: str) -> set[str]:
    try:
        return Cell("", source).names
    except SyntaxError:  # IPython's own
        return set()


def _exercise(source: str, there: list[str]) -> list[dict[str, Any]]:
    """A solved cell as stubs, and below them the checks that the notebook doesn't call anyway."""
    asked = [EXERCISES[name] for name in EXERCISES if name in _names(source)]
    defined = {getattr(node, "name", "") for node in ast.parse(source).body}
    asked = [each for each in asked if each.name in defined]
    if not asked:
        return []
    names = [each.name for each in asked]
    parts = stubs(source, names, set().union(*map(_names, there)))
    points = ", ".join(f"`{each.name}` ({each.points:g} points)" for each in asked)
    checks = [check for each in asked if (check := call(each)) not in there]
    cells = [_cell("markdown", f"### Exercise\n\nWrite {points}."), _cell("code", "\n\n\n".join(parts))]
    return [*cells, *(_cell("code", check) for check in checks), *_used(names)]


def _used(names: Collection[str]) -> list[dict[str, Any]]:
    """A cell that hands the library those of these solutions that take a piece's place."""
    if replacing := [each.name for each in EXERCISES.values() if each.name in names and each.piece]:
        about = "# Once the check holds: our trainers and the cells below take yours. Others take it from mine.py."
        return [_cell("code", f"{about}\n# from helpers.pieces import use; use({', '.join(replacing)})")]
    return []


def call(exercise: Exercise) -> str:
    """The line that checks an exercise in a notebook."""
    options = "".join(f", {name}={value!r}" for name, value in exercise.options.items())
    return f"checks.{exercise.check.__name__}({exercise.name}{options})"


def _cell(kind: str, source: str) -> dict[str, Any]:
    tags = ["live", "exercise"] if kind == "code" else ["live"]
    cell = {"cell_type": kind, "id": uuid.uuid5(uuid.NAMESPACE_OID, source).hex[:8], "metadata": {"tags": tags}}
    return (
        cell
        | {"source": source.splitlines(keepends=True)}
        | ({"outputs": [], "execution_count": None} if kind == "code" else {})
    )
