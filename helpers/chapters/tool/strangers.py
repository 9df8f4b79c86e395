"""Trainings by somebody who had not seen the tool: is the cause's line named, and nothing in those without a fault?

`data/strangers` holds them, and what was written down of each before.
"""

import tempfile
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pandas as pd

from ...book.table import Worth, table
from ...book.values import share_of
from ...lab import Row
from .cases import MARGIN, ROOT, counted, profiled
from .profilers import judged

STRANGERS = ROOT / "data" / "strangers"
MANIFEST = STRANGERS / "manifest.toml"
LISTED = tomllib.loads(MANIFEST.read_text())["script"] if MANIFEST.exists() else []
LINES = {Path(entry["script"]).stem: entry["lines"] for entry in LISTED}


@table(
    small=[{"script": "healthy_gan_two_opts", "limit_s": 20}],
    cpu=[{"script": script, "limit_s": 40} for script in LINES],
    gpu=[],  # their causes are a CPU's
    columns="faulty answer? share? place?",
    timed=False,
    worth=Worth(5, "is the cause named in scripts of somebody else", cpu=45),
)
def strangers(script: str, limit_s: int) -> Row:
    """What `profile` answers first, what share of the time it gives for that, and the place of the cause's line.

    What could be faster still, though nothing is wrong, comes last and is no answer.
    """
    with tempfile.TemporaryDirectory() as folder:
        findings = profiled({"script": STRANGERS / f"{script}.py"}, folder, limit=limit_s)["findings"]
    faults = [found for found in findings if not found["option"]]
    answers = [(f"{found['finding']} {found['where']}", found["gain_share"]) for found in faults]
    return {"faulty": bool(LINES[script])} | judged(script, LINES[script], answers)


# Numbers


@strangers.numbers()
def _(rows: pd.DataFrame) -> SimpleNamespace:
    """Shares of the scripts with a fault whose first answer, or one of three, is right; and false alarms in others."""
    is_faulty = rows["faulty"].astype(str) == "True"
    faulty, healthy = rows[is_faulty], rows[~is_faulty]
    alarms = healthy[healthy["share"].astype(float) >= MARGIN]
    named = [f"{row['script'].removeprefix('healthy_')} {row['share']:.0%}" for row in alarms.to_dict("records")]
    return SimpleNamespace(
        count=counted(len(faulty)),
        healthy=counted(len(healthy)),
        unanswered=counted(len(LINES) - len(rows)),
        first=share_of((faulty["place"] == 1).sum(), len(faulty)),
        alarms=share_of(len(alarms), len(healthy)),
        alarmed=", ".join(named) or "none",
    )
