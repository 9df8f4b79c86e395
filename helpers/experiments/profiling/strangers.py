"""The open set of training loops with a planted fault, `tests/loops`: does `dlspeed profile` name it first?"""

import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from helpers.lab import Worth, experiment
from helpers.lab.records import Row
from helpers.profiling import diagnose
from helpers.profiling.findings import FP32
from helpers.profiling.findings.observed import FIRST
from helpers.trying import try_edited, try_script
from helpers.trying.table import Tried

LOOPS = Path(__file__).resolve().parents[3] / "tests" / "loops"
MANIFEST = LOOPS / "manifest.json"
CASES = {case["name"]: case for case in json.loads(MANIFEST.read_text())} if MANIFEST.exists() else {}
LIMIT_S, TRIAL_S = 60, 6.0
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
    answers = [finding["finding"] + " " + finding["where"] for finding in slow["findings"]]
    dearest = [line["where"] + " " for line in slow["lines"][:1]]
    right = [place for place, answer in enumerate(_with_warnings(slow, answers), 1) if _is_cause(case, answer)]
    first = right[:1] == [1]
    promise = next((f["gain_share"] for f in slow["findings"] if _is_cause(case, f["finding"])), None)
    return {
        "apart": case["apart"],
        "first": (_with_warnings(slow, answers) or ["nothing"])[0],
        "right": first,
        "line_right": any(names_the_line(loop, line) for line in dearest),
        "place": right[0] if right else None,
        "promised": promise,
        **_gain(case, slow, fixed),
        **(_alarm(case, fixed["findings"]) | {"told_fixed": as_cell(fixed["text"])} if fixed else {}),
        "seconds_to_answer": slow["seconds"],
        "told": as_cell(slow["text"]),
    }


def as_cell(text: str) -> str:
    """JSON in which no run of spaces is left, of which a record keeps one."""
    return json.dumps(text, ensure_ascii=False).replace("  ", " \\u0020")


def _gain(case: dict, slow: dict, fixed: dict | None) -> Row:
    if fixed and case.get("ranks"):
        return {"gained": 1 - _iteration_s(fixed) / _iteration_s(slow)}
    script = LOOPS / f"{case['name']}.py"
    (row,) = try_edited(script, [], script, ["--fixed"], seconds=TRIAL_S, judged=False).tried
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
    tried = try_script(LOOPS / f"{case['name']}.py", ["--fixed"], seconds=2 * TRIAL_S, only=LESS_PRECISION).tried
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
    source = (LOOPS / f"{loop}.py").read_text().splitlines()
    number = next(n for n, line in enumerate(source, 1) if CASES[loop]["line"] in line)
    return f"{loop}.py:{number} " in f"{answer} "


def _profiled(case: dict, folder: str, *extra: str) -> dict:
    """What the command prints, and what it observed."""
    output = Path(folder) / f"profile{len(extra)}"
    launch = ["-m", "torch.distributed.run", f"--nproc-per-node={case['ranks']}"] if case.get("ranks") else []
    command = [sys.executable, *launch, "-m", "helpers", "profile", "--json", "--limit", str(LIMIT_S)]
    command += ["--output", str(output), str(LOOPS / f"{case['name']}.py"), *extra]
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
