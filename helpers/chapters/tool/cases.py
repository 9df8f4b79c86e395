"""The open sets of training loops with a planted fault, what `dlspeed profile` answers, and how answers are shown.

Those of `data/loops` have their fault on any machine.
"""

import functools
import json
import math
import re
import subprocess
import sys
import textwrap
import time
from collections import defaultdict
from pathlib import Path

import pandas as pd

from ...book.values import PERCENT, Number, derived
from ...faults import planted_by
from ...lab import Row
from ...trying.answer import Tried

ROOT = Path(__file__).resolve().parents[3]
LOOPS = ROOT / "data" / "loops"
LIMIT_S = 60
PAGE = 112  # letters in a line of the report's listings
MARGIN = 0.05  # of an iteration: a finding that promises less isn't an alarm


def cases_in(folder: Path) -> dict[str, dict]:
    """The loops of a folder by name, as its manifest describes them; none where the folder is missing."""
    manifest = folder / "manifest.json"
    cases = json.loads(manifest.read_text()) if manifest.exists() else []
    return {case["name"]: case | {"script": folder / f"{case['name']}.py"} for case in cases}


CASES = cases_in(LOOPS)


def profiled(case: dict, folder: str, *extra: str, limit: int = LIMIT_S) -> dict:
    """What the command prints, and what it observed, which may be nothing in a process that the script starts."""
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
    observed = sorted(output.glob("observed*.json"))
    answer["observed"] = json.loads(observed[0].read_text()) if observed else {}
    return {"lines": []} | answer | {"seconds": seconds, "output": output}


def answered(case: dict, answer: dict) -> Row:
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


def _is_cause(case: dict, answer: str) -> bool:
    return answer.startswith(tuple(planted_by(case["name"])))


def names_the_line(loop: str, answer: str) -> bool:
    """Whether an answer names the line that was written down as the cause."""
    if loop not in CASES:
        return False
    source = CASES[loop]["script"].read_text().splitlines()
    number = next(n for n, line in enumerate(source, 1) if CASES[loop]["line"] in line)
    return f"{loop}.py:{number} " in f"{answer} "


def as_cell(text: str) -> str:
    """JSON in which no run of spaces is left, of which a record keeps one."""
    return json.dumps(text, ensure_ascii=False).replace("  ", " \\u0020")


def interval(name: str, row: Tried) -> Row:
    values = {name: row.gain_share, f"{name}_low": row.low, f"{name}_high": row.high}
    return {key: None if math.isnan(value) else value for key, value in values.items()}


# Numbers


def shortened(answers: pd.Series) -> list[str]:
    return [textwrap.shorten(str(answer), 60, placeholder=" …") for answer in answers.fillna("")]


def percents(shares: pd.Series, decimals: int | None = 0) -> list[Number]:
    return [Number(share, PERCENT, decimals=decimals) for share in shares]


def shares_of(rows: pd.DataFrame, name: str) -> list[str]:
    """Shares with their intervals, where they have any; nothing where none was measured."""
    cells = rows[[name, f"{name}_low", f"{name}_high"]].astype(object)
    numbers = cells.where(cells.notna(), None).itertuples(index=False)
    return ["" if share is None else f"{Number(share, PERCENT, low, high, decimals=0)}" for share, low, high in numbers]


def printed(rows: pd.DataFrame) -> dict[str, str]:
    """What the command printed for each, in lines that a page holds; of a script in the first of them only its name."""
    answers = rows[rows["told"].astype(str).str.startswith('"')]
    texts = {row["loop"]: json.loads(row["told"]) for row in answers.to_dict("records")}
    wrap = functools.partial(textwrap.fill, width=PAGE, subsequent_indent=" " * 8, replace_whitespace=False)
    named = {name: re.sub(r"\A\S*/", "", text).splitlines() for name, text in texts.items()}
    return defaultdict(str, {name: "\n".join(map(wrap, lines)) for name, lines in named.items()})


def counted(number: int) -> Number:
    return derived(number, "counted", "", 0)
