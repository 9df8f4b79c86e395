"""What sampling profilers name on the same loops."""

import collections
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pandas as pd

from ...book import Worth
from ...book.table import table
from ...book.values import share_of
from ...lab.machine import missing_because
from ...lab.rows import Row
from .cases import CASES, ENDLESS, LIMIT_S, names_the_line

PEERS, START_S, PEER_S = ("py-spy", "scalene"), 6, 8  # other profilers, and seconds before and while they sample
# Scalene starts a program itself, and shows what it sampled when that is interrupted.
INTERRUPTED = """
import _thread, runpy, threading
threading.Timer({}, _thread.interrupt_main).start()
runpy.run_path({!r}, run_name="__main__")
"""


@table(
    small=[{"tool": "py-spy", "loop": "kept_losses"}],
    cpu=[{"tool": tool, "loop": name} for tool in PEERS for name, case in CASES.items() if not case.get("ranks")],
    gpu=[],
    columns="line right",
    missing=lambda tool, loop: missing_because(tool),
    timed=False,
    worth=Worth(3, "what sampling profilers name", cpu=16),
)
def peers(tool: str, loop: str) -> Row:
    """The line of a loop that another profiler charges most time to, and whether it is the cause's."""
    script = CASES[loop]["script"]
    with tempfile.TemporaryDirectory() as folder:
        seconds = (_by_py_spy if tool == "py-spy" else _by_scalene)(script, Path(folder))
    line = max(seconds, key=seconds.__getitem__)
    source = script.read_text().splitlines()[line - 1].strip()
    return {"line": f"{line}: {source}", "right": names_the_line(loop, f"{loop}.py:{line} ")}


def _by_py_spy(script: Path, folder: Path) -> dict[int, float]:
    """Samples by the innermost line of the script, of lines `frame (file:line);… count`."""
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([sys.executable, str(script), *ENDLESS], cwd=folder, **quiet) as process:
        time.sleep(START_S)
        sampler = Path(sys.executable).with_name("py-spy")
        options = f"--pid {process.pid} --duration {PEER_S} --format raw --output stacks".split()
        subprocess.run([str(sampler), "record", *options], cwd=folder, check=True, timeout=LIMIT_S, **quiet)
        process.kill()
    seconds: dict[int, float] = collections.Counter()
    for stack, count in (line.rsplit(" ", 1) for line in (folder / "stacks").read_text().splitlines()):
        if lines := re.findall(rf"{re.escape(script.name)}:(\d+)\)", stack):
            seconds[int(lines[-1])] += float(count)
    return seconds


def _by_scalene(script: Path, folder: Path) -> dict[int, float]:
    """Percents by line, start-up included, of a JSON document by file."""
    (folder / "interrupted.py").write_text(INTERRUPTED.format(START_S + PEER_S, str(script)))
    options = ["--cpu-only", "--program-path", str(script.parent), "--outfile", "lines.json", "interrupted.py"]
    command = [sys.executable, "-m", "scalene", "run", *options]
    subprocess.run(command, cwd=folder, capture_output=True, timeout=LIMIT_S)
    files = json.loads((folder / "lines.json").read_text())["files"]
    (of_script,) = (about for name, about in files.items() if name.endswith(script.name))
    parts = ("n_cpu_percent_python", "n_cpu_percent_c", "n_sys_percent")
    return {line["lineno"]: sum(line[part] for part in parts) for line in of_script["lines"]}


@peers.numbers()
def _(rows: pd.DataFrame) -> SimpleNamespace:
    """By profiler, the share of loops in which the line that it charges most time to is the cause's."""
    right = {tool: (rows.loc[rows["tool"] == tool, "right"].map(str) == "True") for tool in PEERS}
    return SimpleNamespace(share={tool: share_of(each.sum(), len(each)) for tool, each in right.items()})
