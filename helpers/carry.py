"""A folder to carry to a GPU's machine that has torch and no network: the project, what its tables want, and text.

dlspeed carry /tmp/gpu                  # here; some minutes for the wheels
bash gpu/go check                       # there: does every table run right, and does every test of tests/gpu pass?
bash gpu/go 600                         # there: ten minutes of measuring; results.tgz unpacks into data/
"""

import email
import importlib.metadata
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from .doctor import requirements
from .lab.files import project_root
from .text import local_wikitext

GLIBC = (39, 36, 35, 34, 31, 28, 27, 24, 17, 12, 5)  # 2.x, of wheels that a Linux of today runs
ON_EVERY_ONE = ("torch", "triton", *(importlib.metadata.requires("torch") or []))  # which no wheel here replaces


def carry(folder: Path, python: str = "3.12", has: Path | None = None, wheels: Path | None = None) -> str:
    """Fill a folder with a clone of the last commit, wheels for that Python on Linux, and WikiText; a line about it.

    The wheels are of the requirements that the machine lacks: `has` is its `pip freeze`; without it torch, triton
    and what torch needs count as there. `wheels` of your own are added. What no wheel is to be had of is named.
    """
    root = project_root()
    if not (root / ".git").exists():
        raise ValueError(f"{root} is no checkout: there is no commit to carry")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is there already: name a new or an empty folder")
    present = {_normal(line) for line in (has.read_text().splitlines() if has else ON_EVERY_ONE)}
    (folder / "wheels").mkdir(parents=True)
    for own in sorted(wheels.glob("*.whl")) if wheels else []:
        shutil.copy(own, folder / "wheels")
    present |= {_normal(own.name.partition("-")[0]) for own in (folder / "wheels").iterdir()}
    without = _download([r for r in requirements() if _normal(r) not in present], folder / "wheels", python, present)
    subprocess.run(["git", "clone", "-q", "--depth", "1", root.as_uri(), str(folder / "project")], check=True)
    if text := local_wikitext():
        shutil.copytree(text, folder / "text")
    shutil.copyfile(Path(__file__).with_name("go.sh"), folder / "go")
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    named = f"; no wheel of {', '.join(without)}" if without else ""
    return f"{folder}: {size / 1e6:.0f} MB, text: {'WikiText' if text else 'generated'}{named}. There: bash go check"


def _download(wanted: list[str], folder: Path, python: str, present: set[str]) -> list[str]:
    """Download wheels and what they need, as far as it isn't there; the names of those that there is no wheel of."""
    linux = [f"--platform=manylinux_2_{version}_x86_64" for version in GLIBC] + ["--platform=manylinux2014_x86_64"]
    there = ["--no-deps", "--only-binary=:all:", f"--python-version={python}", "--implementation=cp", *linux]
    pip, without = [sys.executable, "-m", "pip", "--disable-pip-version-check"], []
    while wanted:
        requirement, *wanted = wanted
        present.add(_normal(requirement))
        before = set(folder.iterdir())
        # A pure package without a wheel is built here.
        attempts = (["download", "-q", "-d", str(folder), *there], ["wheel", "-q", "--no-deps", "-w", str(folder)])
        if all(subprocess.run([*pip, *how, requirement], capture_output=True).returncode for how in attempts):
            without.append(requirement)
        for wheel in set(folder.iterdir()) - before:
            wanted += [need for need in _needs(wheel) if _normal(need) not in present]
    return without


def _needs(wheel: Path) -> list[str]:
    """The requirements of a wheel but those of its extras and of older Pythons."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = email.message_from_bytes(archive.read(name)).get_all("Requires-Dist") or []
    pairs = [line.partition(";") for line in lines]
    return [need.strip() for need, _, marker in pairs if not re.search(r"extra|python_version *<|win32|darwin", marker)]


def _normal(requirement: str) -> str:
    """A requirement's package, as names are compared: `Foo_bar[x]>=1` is foo-bar."""
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]*", requirement.strip())[0]).lower()
