"""The open sets of training loops with a planted fault: does `dlspeed profile` name it first?

`tests/loops` run on any machine, the faults of `tests/gpu/loops` exist on a GPU alone.
"""

import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ...lab import Worth, experiment
from ...lab.machine import missing_because
from ...lab.records import Row
from ...profiling import diagnose
from ...profiling.findings import FP32
from ...profiling.findings.observed import FIRST
from ...trying import try_edited, try_script
from ...trying.table import Tried

LOOPS = Path(__file__).resolve().parents[3] / "tests" / "loops"
GPU_LOOPS = LOOPS.parent / "gpu" / "loops"


def _cases(folder: Path) -> dict[str, dict]:
    """The manifest's entries by name, each with its script; none in an installed package."""
    manifest = folder / "manifest.json"
    entries = json.loads(manifest.read_text()) if manifest.exists() else []
    return {case["name"]: case | {"script": folder / f"{case['name']}.py"} for case in entries}


CASES, GPU_CASES = _cases(LOOPS), _cases(GPU_LOOPS)
LIMIT_S, GPU_LIMIT_S, TRIAL_S = 60, 12, 6.0
LEAST_ALARM = 0.05
LESS_PRECISION = ("autocast-bf16", "matmul-precision")


@experiment(
    small=[{"loop": "kept_losses"}],
    cpu=[{"loop": name} for name in CASES],
    columns="apart first right line_right place? promised? gained? gained_low? gained_high? alarm? alarm_kind? "
    "alarm_tried? seconds_to_answer told told_fixed?",
    version=4,
    timed=False,
    worth=Worth(10, "is the fault of a loop named", cpu=34.4, gpu=35, big_gpu=35),
)
def loops(loop: str) -> Row:
    """A loop's first finding, the true cause's place among the findings, and its promise beside what the fix gains.

    What the fix gains is measured in pairs, but for a loop of several ranks, whose mean iterations are compared.
    `alarm` is the largest gain that a finding promises for the loop without its fault; where that is of products in
    fp32, `alarm_tried` tells what less precision gains, in pairs. `line_right` says whether the line that most of
    the time goes to, which a sampling profiler would show, is the cause's. `told` is what the command prints, also
    without the fault, as JSON strings.
    """
    case = CASES[loop]
    with tempfile.TemporaryDirectory() as folder:
        slow = _profiled(case, folder)
        fixed = _profiled(case, folder, "--fixed") if case["twin"] else None
    dearest = [line["where"] + " " for line in slow["lines"][:1]]
    return {
        "apart": case["apart"],
        **_answer(case, slow),
        "line_right": any(names_the_line(loop, line) for line in dearest),
        **_gain(case, slow, fixed),
        **(_alarm(case, fixed["findings"]) | {"told_fixed": as_cell(fixed["text"])} if fixed else {}),
    }


@experiment(
    small=[{"loop": "host_wait"}],
    gpu=[{"loop": name} for name in GPU_CASES],
    columns="first right place? promised? expected gained seconds_to_answer told",
    timed=False,
    missing=lambda **_: missing_because("CUDA"),
    worth=Worth(30, "is the fault of a GPU's loop named", gpu=25, big_gpu=25),
)
def gpu_loops(loop: str) -> Row:
    """The first finding of a loop whose fault exists on a GPU alone, its promise, and what the fix gains.

    The gain is that of the mean iteration of two runs, one with the fault and one without; `expected` was written down
    before, by arithmetic.
    """
    case = GPU_CASES[loop]
    with tempfile.TemporaryDirectory() as folder:
        slow, fixed = (_profiled(case, folder, *extra, limit=GPU_LIMIT_S) for extra in ((), ("--fixed",)))
    gained = 1 - _iteration_s(fixed) / _iteration_s(slow)
    return _answer(case, slow) | {"expected": case["expected_gain"], "gained": gained}


def _answer(case: dict, slow: dict) -> Row:
    """What stands first, the true cause's place and its promise."""
    answers = _with_warnings(slow, [f"{finding['finding']} {finding['where']}" for finding in slow["findings"]])
    right = [place for place, answer in enumerate(answers, 1) if _is_cause(case, answer)]
    return {
        "first": (answers or ["nothing"])[0],
        "right": right[:1] == [1],
        "place": right[0] if right else None,
        "promised": next((f["gain_share"] for f in slow["findings"] if _is_cause(case, f["finding"])), None),
        "seconds_to_answer": slow["seconds"],
        "told": as_cell(slow["text"]),
    }


def as_cell(text: str) -> str:
    """JSON in which no run of spaces is left, of which a record keeps one."""
    return json.dumps(text, ensure_ascii=False).replace("  ", " \\u0020")


def _gain(case: dict, slow: dict, fixed: dict | None) -> Row:
    if fixed and case.get("ranks"):
        return {"gained": 1 - _iteration_s(fixed) / _iteration_s(slow)}
    (row,) = try_edited(case["script"], [], case["script"], ["--fixed"], seconds=TRIAL_S, judged=False).tried
    return interval("gained", row)


def interval(name: str, row: Tried) -> Row:
    values = {name: row.gain_share, f"{name}_low": row.low, f"{name}_high": row.high}
    return {key: None if math.isnan(value) else value for key, value in values.items()}


def _alarm(case: dict, findings: list[dict]) -> Row:
    if not findings:
        return {"alarm": 0.0}
    worst = max(findings, key=lambda finding: finding["gain_share"])
    row: Row = {"alarm": worst["gain_share"], "alarm_kind": worst["finding"]}
    if worst["finding"] != FP32 or worst["gain_share"] < LEAST_ALARM:
        return row
    tried = try_script(case["script"], ["--fixed"], seconds=2 * TRIAL_S, only=LESS_PRECISION).tried
    return row | {"alarm_tried": max(one.gain_share for one in tried)}


def _with_warnings(answer: dict, findings: list[str]) -> list[str]:
    """What stands first in the text: what grows or is late, then the findings."""
    return [f"{kind} {text}" for kind, text in answer["warnings"] if kind in FIRST] + findings


def _is_cause(case: dict, answer: str) -> bool:
    return answer.startswith(tuple(case["findings"]))


def names_the_line(loop: str, answer: str) -> bool:
    """Whether an answer names the line that was written down as the cause."""
    if loop not in CASES:
        return False
    source = CASES[loop]["script"].read_text().splitlines()
    number = next(n for n, line in enumerate(source, 1) if CASES[loop]["line"] in line)
    return f"{loop}.py:{number} " in f"{answer} "


def _profiled(case: dict, folder: str, *extra: str, limit: int = LIMIT_S) -> dict:
    """What the command prints, and what it observed."""
    output = Path(folder) / f"profile{len(extra)}"
    launch = ["-m", "torch.distributed.run", f"--nproc-per-node={case['ranks']}"] if case.get("ranks") else []
    command = [sys.executable, *launch, "-m", "helpers", "profile", "--json", "--limit", str(limit)]
    command += ["--output", str(output), str(case["script"]), *extra]
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, cwd=LOOPS.parents[1], timeout=4 * LIMIT_S)
    if done.returncode or "{" not in done.stdout:
        raise RuntimeError(f"{' '.join(command[2:])}: {(done.stderr.strip() or 'no output').splitlines()[-1]}")
    answer = json.loads(done.stdout[done.stdout.index("{") :])
    (observed, *_) = sorted(output.glob("observed*.json"))
    answer["observed"] = json.loads(observed.read_text())
    answer["text"] = str(diagnose(output))
    return {"lines": [], "warnings": []} | answer | {"seconds": time.monotonic() - began}


def _iteration_s(answer: dict) -> float:
    times = answer["observed"]["iterations"]
    return statistics.fmean(times[len(times) // 5 :])
