"""The open sets of training loops with a planted fault: does `dlspeed profile` name it first?

Those of `data/loops` have it on any machine, those of `data/loops/gpu` on a GPU alone.
"""

import collections
import json
import math
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ...faults import entries, planted_by
from ...findings.diagnose import diagnose
from ...lab import Worth, experiment
from ...lab.machine import missing_because
from ...lab.records import Row
from ...lab.records.experiment import LAST
from ...trying import try_edited, try_script
from ...trying.answer import Tried

ROOT = Path(__file__).resolve().parents[3]
LOOPS = ROOT / "data" / "loops"
LIMIT_S, TRIAL_S = 60, 6.0
GPU_LIMIT_S = 10  # profile goes over all twelve in 200 s, with the start of each
GPU_TRIAL_S, GPU_TRY_S = 25.0, 45.0  # the starts are within: of each some 6 s on a GPU
ENDLESS = ["--steps", "1000000"]
LEAST_ALARM = 0.05
PEERS, START_S, PEER_S = ("py-spy", "scalene"), 6, 8  # other profilers, and seconds before and while they sample
# Scalene starts a program itself, and shows what it sampled when that is interrupted.
INTERRUPTED = """
import _thread, runpy, threading
threading.Timer({}, _thread.interrupt_main).start()
runpy.run_path({!r}, run_name="__main__")
"""


def cases_in(folder: Path) -> dict[str, dict]:
    """The loops of a folder by name, as its manifest describes them; none where the folder is missing."""
    manifest = folder / "manifest.json"
    cases = json.loads(manifest.read_text()) if manifest.exists() else []
    return {case["name"]: case | {"script": folder / f"{case['name']}.py"} for case in cases}


CASES, GPU_CASES = cases_in(LOOPS), cases_in(LOOPS / "gpu")
DEAREST = sorted(GPU_CASES, key=lambda name: -GPU_CASES[name]["gain"])[:3]


@experiment(
    small=[{"loop": "kept_losses"}],
    cpu=[{"loop": name} for name in CASES],
    gpu=[],  # these loops are a CPU's
    columns="apart first right line_right place? promised? gained? gained_low? gained_high? alarm? "
    "alarm_tried? seconds_to_answer told",
    version=4,
    timed=False,
    worth=Worth(10, "is the fault of a loop named", cpu=34.4),
)
def loops(loop: str) -> Row:
    """A loop's first finding, the true cause's place among the findings, and its promise beside what the fix gains.

    What the fix gains is measured in pairs, but for a loop of several ranks, whose mean iterations are compared.
    `alarm` is the largest gain that a finding promises for the loop without its fault; where that is of products in
    fp32, `alarm_tried` tells what less precision gains, in pairs. `line_right` says whether the line that most of
    the time goes to, which a sampling profiler would show, is the cause's. `told` is what the command prints, as a
    JSON string.
    """
    case = CASES[loop]
    with tempfile.TemporaryDirectory() as folder:
        slow = _profiled(case, folder)
        fixed = _profiled(case, folder, "--fixed") if case["twin"] else None
        told = {"told": as_cell(str(diagnose(slow["output"])))}
    dearest = [line["where"] + " " for line in slow["lines"][:1]]
    return {
        "apart": case["apart"],
        "line_right": any(names_the_line(loop, line) for line in dearest),
        **_answered(case, slow),
        **_gain(case, slow, fixed),
        **(_alarm(case, fixed["findings"]) if fixed else {}),
        **told,
    }


@experiment(
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


@experiment(
    small=[{"loop": "critics_one_by_one"}],
    gpu=[],  # each takes up to 20 GB
    big_gpu=[{"loop": name} for name in GPU_CASES],
    columns="first right place? promised? predicted seconds_to_answer",
    missing=lambda loop: missing_because("CUDA"),
    timed=False,
    worth=Worth(30, "is the fault of a loop on a GPU named", gpu=17, big_gpu=17, on_gpu=11),
)
def gpu_loops(loop: str) -> Row:
    """What `profile` says first within seconds, and whether that is the cause; the gain that arithmetic predicted."""
    case = GPU_CASES[loop]
    with tempfile.TemporaryDirectory() as folder:
        slow = _profiled(case, folder, *ENDLESS, limit=GPU_LIMIT_S)
    return {"predicted": case["gain"], **_answered(case, slow)}


@experiment(
    small=[{"loop": "critics_one_by_one", "by": "hand"}],
    gpu=[],
    big_gpu=[*({"loop": name, "by": "hand"} for name in GPU_CASES), *({"loop": name, "by": "try"} for name in DEAREST)],
    columns="change gained? gained_low? gained_high? verdict",
    missing=lambda loop, by: missing_because("CUDA"),
    timed=False,
    worth=Worth(15, "what the fix of a GPU's fault gains", gpu=28, big_gpu=28, on_gpu=LAST),
)
def gpu_gains(loop: str, by: str) -> Row:
    """The share of an iteration that the fix takes away, in pairs: by hand, or all that `try` finds from outside."""
    script = GPU_CASES[loop]["script"]
    if by == "hand":
        (row,) = try_edited(script, ENDLESS, script, [*ENDLESS, "--fixed"], seconds=GPU_TRIAL_S, judged=False).tried
        return {"change": "--fixed", "verdict": row.verdict, **interval("gained", row)}
    result = try_script(script, ENDLESS, seconds=GPU_TRY_S)
    together = result.together or Tried("", "change", gain_share=0.0, verdict="nothing helped")
    row = {"change": " + ".join(result.kept) or "nothing", "verdict": together.verdict}
    return row | interval("gained", together)


def _answered(case: dict, answer: dict) -> Row:
    """The first answer, whether it is the cause, the cause's place among the answers, and the promise for it."""
    answers = [f"{finding['finding']} {finding['where']}" for finding in answer["findings"]]
    right = [place for place, text in enumerate(answers, 1) if _is_cause(case, text)]
    return {
        "first": (answers or ["nothing"])[0],
        "right": right[:1] == [1],
        "place": right[0] if right else None,
        "promised": next((f["gain_share"] for f in answer["findings"] if _is_cause(case, f["finding"])), None),
        "seconds_to_answer": answer["seconds"],
    }


def as_cell(text: str) -> str:
    """JSON in which no run of spaces is left, of which a record keeps one."""
    return json.dumps(text, ensure_ascii=False).replace("  ", " \\u0020")


def _gain(case: dict, slow: dict, fixed: dict | None) -> Row:
    if fixed and case.get("ranks"):
        return {"gained": 1 - _iteration_s(fixed) / _iteration_s(slow)}
    script = case["script"]
    (row,) = try_edited(script, [], script, ["--fixed"], seconds=TRIAL_S, judged=False).tried
    return interval("gained", row)


def interval(name: str, row: Tried) -> Row:
    values = {name: row.gain_share, f"{name}_low": row.low, f"{name}_high": row.high}
    return {key: None if math.isnan(value) else value for key, value in values.items()}


def _alarm(case: dict, findings: list[dict]) -> Row:
    if not findings:
        return {"alarm": 0.0}
    worst = max(findings, key=lambda finding: finding["gain_share"])
    row: Row = {"alarm": worst["gain_share"]}
    if worst["finding"] != "fp32 products" or worst["gain_share"] < LEAST_ALARM:
        return row
    only = entries()["fp32 products"].tried
    tried = try_script(case["script"], ["--fixed"], seconds=2 * TRIAL_S, only=only).tried
    return row | {"alarm_tried": max(one.gain_share for one in tried)}


def _is_cause(case: dict, answer: str) -> bool:
    return answer.startswith(tuple(planted_by(case["name"])))


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
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=4 * LIMIT_S)
    if done.returncode or "{" not in done.stdout:
        raise RuntimeError(f"{' '.join(command[2:])}: {(done.stderr.strip() or 'no output').splitlines()[-1]}")
    seconds = time.monotonic() - began
    answer = json.loads(done.stdout[done.stdout.index("{") :])
    (observed, *_) = sorted(output.glob("observed*.json"))
    answer["observed"] = json.loads(observed.read_text())
    return {"lines": []} | answer | {"seconds": seconds, "output": output}


def _iteration_s(answer: dict) -> float:
    times = answer["observed"]["iterations"]
    return statistics.fmean(times[len(times) // 5 :])
