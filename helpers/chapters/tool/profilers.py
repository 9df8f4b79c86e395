"""Scripts after other projects' reports: does `profile` name the cause's line first, and do other profilers?

py-spy counts samples by line, scalene divides the time by line, TraceML names a part of the step.
"""

import ast
import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pandas as pd

from ...book.table import Worth, table
from ...book.values import share_of
from ...lab import Row
from ...lab.machine import installed, missing_because
from .cases import ROOT, counted, profiled

REPORTS = ROOT / "data" / "reports"
MANIFEST = REPORTS / "manifest.toml"
LISTED = tomllib.loads(MANIFEST.read_text())["report"] if MANIFEST.exists() else []
CAUSES = {Path(entry["script"]).stem: entry for entry in LISTED}
OURS, OWN, CUMULATIVE, SCALENE, TRACEML = "profile", "py-spy, own", "py-spy, cumulative", "scalene", "TraceML"
ANSWERS = (OURS, OWN, CUMULATIVE, SCALENE, TRACEML)
PACKAGES = {"py-spy": "py-spy", SCALENE: "scalene", OURS: "torch", TRACEML: "traceml-ai"}
LIMITS_S = {"py-spy": 40, SCALENE: 50, OURS: 40, TRACEML: 60}  # from the start; `profile`'s from the first step on
FIRST = 3  # answers of each that count
OUTER, IMPORTING = 0.8, "<frozen importlib"  # a line that more of the other samples pass through starts the training
BEFORE, FIRST_GO, NONE = "profile, first go", REPORTS / "first_go.csv", "–"
CLOSING_S = 60  # that a profiler may take to write its answer
# The model that TraceML's lines name, where it isn't `self.model`.
LOCAL = "accelerate_1153 open_instruct_1445 presto_worldcereal_9 pytorch_lightning_17359 transferable_samplers_12"
MODELS = dict.fromkeys([*LOCAL.split(), "transformers_48718"], "model")
MODELS |= {"lightly_train_946": "task.model", "gsplat_396": "self.ssim"}
Answers = list[tuple[str, float | None]]  # what is named, and its share of the time


@table(
    small=[{"script": "pytorch_lightning_17359", "profiler": "py-spy", "limit_s": 10}],
    cpu=[{"script": script, "profiler": name, "limit_s": LIMITS_S[name]} for name in PACKAGES for script in CAUSES],
    gpu=[],  # their causes are a CPU's
    columns="by package answer? share? place?",
    missing=lambda script, profiler, limit_s: missing_because(PACKAGES[profiler]),
    timed=False,
    worth=Worth(5, "is the line of a real report's cause named", cpu=50),
)
def profilers(script: str, profiler: str, limit_s: int) -> list[Row]:
    """A profiler's first answer to a script that runs so long, and the first answer that names a line of the cause.

    py-spy and scalene are asked for lines of the script. py-spy's own time is that of samples that end in the line;
    its cumulative time is that of samples that pass through it, without imports and lines that nearly all pass
    through. scalene watches the second half, as it can't tell the start from the steps. TraceML needs to know where a
    step begins and ends: it runs a copy in which its lines are put around the step.
    """
    with tempfile.TemporaryDirectory() as folder:
        answers = ASKED[profiler](script, Path(folder), limit_s)
    package = f"{PACKAGES[profiler]} {installed(PACKAGES[profiler])}"
    lines = CAUSES[script]["lines"]
    return [{"by": by, "package": package} | judged(script, lines, found) for by, found in answers.items()]


def judged(script: str, edited: list[int], answers: Answers) -> Row:
    """The first answer, and the place of the first of three that names one of the lines that a person would edit."""
    lines = {f"{script}.py:{line}" for line in edited}
    named = (lines & {*re.findall(r"\w+\.py:\d+", answer)} for answer, _ in answers[:FIRST])
    answer, share = (answers or [("nothing", None)])[0]
    return {"answer": answer, "share": share, "place": next((n for n, hit in enumerate(named, 1) if hit), None)}


def _by_profile(script: str, folder: Path, limit_s: int) -> dict[str, Answers]:
    answer = profiled({"script": REPORTS / f"{script}.py"}, str(folder), limit=limit_s)
    return {OURS: [(f"{found['finding']} {found['where']}", found["gain_share"]) for found in answer["findings"]]}


def _by_pyspy(script: str, folder: Path, limit_s: int) -> dict[str, Answers]:
    record = [_program("py-spy"), "record", "--subprocesses", "--format", "raw", "--output", "samples.txt", "--"]
    run_for(limit_s, [*record, sys.executable, str(REPORTS / f"{script}.py")], folder)
    return lines_of_samples((folder / "samples.txt").read_text(), script)


def lines_of_samples(text: str, script: str) -> dict[str, Answers]:
    """The script's lines with most samples, by own and cumulative time, of py-spy's counts by stack."""
    stacks = [line.rpartition(" ") for line in text.splitlines() if IMPORTING not in line]
    own: Counter[str] = Counter()
    cumulative: Counter[str] = Counter()
    samples = sum(int(count) for _, _, count in stacks)
    for stack, _, count in stacks:
        lines = [re.search(rf"\(({script}\.py:\d+)\)$", frame) for frame in stack.split(";")]
        own.update({lines[-1][1]: int(count)} if lines[-1] else {})
        cumulative.update(dict.fromkeys({line[1] for line in lines if line}, int(count)))
    inner = Counter({line: count for line, count in cumulative.items() if count < OUTER * samples})
    shares = {OWN: own.most_common(FIRST), CUMULATIVE: inner.most_common(FIRST)}
    return {by: [(line, count / samples) for line, count in lines] for by, lines in shares.items()}


def _by_scalene(script: str, folder: Path, limit_s: int) -> dict[str, Answers]:
    def begin(pid: int) -> None:
        """Tell scalene, a process that this one has started, by the signal of `python -m scalene.profile --on`."""
        (pid_of_scalene,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[:1]
        os.kill(int(pid_of_scalene), signal.SIGILL)

    record = [sys.executable, "-m", "scalene", "run", "--cpu-only", "--off", "--outfile", "scalene.json"]
    run_for(limit_s, [*record, str(REPORTS / f"{script}.py")], folder, begin)
    files = json.loads((folder / "scalene.json").read_text()).get("files", {})
    lines: list[dict] = next((file["lines"] for name, file in files.items() if Path(name).stem == script), [])
    parts = ("n_cpu_percent_python", "n_cpu_percent_c", "n_sys_percent")
    shares = [(f"{script}.py:{line['lineno']}", sum(line[part] for part in parts) / 100) for line in lines]
    return {SCALENE: sorted(shares, key=lambda line: -line[1])[:FIRST]}


def _by_traceml(script: str, folder: Path, limit_s: int) -> dict[str, Answers]:
    (folder / f"{script}.py").write_text(with_traced_step((REPORTS / f"{script}.py").read_text(), MODELS.get(script)))
    run_for(limit_s, [_program("traceml"), "run", f"{script}.py", "--logs-dir", "logs", "--run-name", "run"], folder)
    verdict = json.loads((folder / "logs" / "run" / "final_summary.json").read_text())["primary_diagnosis"]
    return {TRACEML: [(verdict["status"].lower(), verdict["evidence"].get("score"))]}


def with_traced_step(source: str, model: str | None) -> str:
    """The script with TraceML's lines: it is imported, and a step is what is in the innermost loop around the loss."""
    lines = source.splitlines()
    loops = [loop for loop in ast.walk(ast.parse(source)) if isinstance(loop, ast.For)]
    texts = {loop: "\n".join(lines[loop.lineno - 1 : loop.end_lineno]) for loop in loops}
    loop = max((loop for loop in loops if "loss" in texts[loop] and ".step()" in texts[loop]), key=lambda n: n.lineno)
    first, last = loop.body[0].lineno - 1, loop.end_lineno
    step = f"{' ' * loop.body[0].col_offset}with traceml_ai.trace_step({model or 'self.model'}):"
    starts = ["import traceml_ai", 'traceml_ai.init(mode="auto")']
    return "\n".join([*starts, *lines[:first], step, *(f"    {line}" for line in lines[first:last]), *lines[last:], ""])


def _program(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


def run_for(
    limit_s: float, command: list[str], folder: Path, halfway: Callable[[int], None] = lambda pid: None
) -> None:
    """Run a profiler and its script in a folder, interrupted after so many seconds, as by Ctrl-C.

    `halfway` is called with the process's number after half of the time. A shell's background jobs ignore Ctrl-C, and
    what they start would.
    """
    heeds = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with (folder / "printed.txt").open("w") as log:
        process = subprocess.Popen(
            command, cwd=folder, stdout=log, stderr=log, start_new_session=True, preexec_fn=heeds
        )
    try:
        for then in (halfway, lambda pid: os.killpg(pid, signal.SIGINT)):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(limit_s / 2)
                return
            then(process.pid)
        process.wait(CLOSING_S)
        _await_group(process.pid)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _await_group(group: int) -> None:
    """Wait for what the process has started, which may still write the answer."""
    end = time.monotonic() + CLOSING_S
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < end:
            os.killpg(group, 0)
            time.sleep(0.1)


ASKED = {OURS: _by_profile, "py-spy": _by_pyspy, SCALENE: _by_scalene, TRACEML: _by_traceml}


# Numbers


@profilers.numbers()
def _(rows: pd.DataFrame) -> SimpleNamespace:
    """The place of the cause's line among each profiler's first answers to each script; TraceML names none.

    `first_go` is what `profile` answered before its rules were mended on these scripts, on a busy machine.
    """
    before = pd.read_csv(FIRST_GO, index_col="script") if FIRST_GO.exists() else pd.DataFrame({"place": []})
    answers, places = (
        rows.pivot(index="script", columns="by", values=value).reindex(columns=list(ANSWERS))
        for value in ("answer", "place")
    )
    asked = answers.notna().assign(**{OURS: answers[OURS].notna().any(), BEFORE: bool(len(before))})
    places.insert(0, BEFORE, before["place"])
    shown = places.map(lambda place: NONE if pd.isna(place) else f"{place:.0f}")
    return SimpleNamespace(
        table=shown.assign(**{TRACEML: answers[TRACEML]}).fillna(NONE).rename_axis(columns=None).reset_index(),
        first={by: _counted((places[by] == 1).sum(), asked[by].sum()) for by in places},
        packages=", ".join(sorted({*rows["package"]} - {*rows.loc[rows["by"] == OURS, "package"]})),
        count=counted(rows["script"].nunique()),
    )


def _counted(right: int, total: int) -> str:
    """Not every profiler was asked about every script; ours was, and no answer of it is a wrong one."""
    share = share_of(right, total)
    return f"{right} of {total} ({share:brief})" if share.measured else f"{share}"
