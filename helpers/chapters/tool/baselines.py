"""What `try` alone scores on the referee's cases, beside each case's own fix: no rows, the recorded judgements."""

import json
import re
from types import SimpleNamespace

import pandas as pd

from ...book.values import TIMES, Number
from .cases import ROOT

BASELINES = ROOT / "data" / "cases" / "baselines"


def baselines() -> SimpleNamespace:
    """Speedups of `try`'s patch and of each case's own fix, as the referee judged them, and the scores of three."""
    judged = {name: json.loads((BASELINES / f"{name}.json").read_text()) for name in ("nothing", "try", "reference")}
    scores = {name: Number(of["score"], "", of["low"], of["high"], decimals=2) for name, of in judged.items()}
    ours, fixes = judged["try"]["cases"], judged["reference"]["cases"]
    table = pd.DataFrame(
        {
            "case": [row["case"] for row in ours],
            "by try's patch": [_speedup(row) for row in ours],
            "its losses": [re.split("[:,]", row["losses"])[0] for row in ours],
            "by the case's fix": [_speedup(row) for row in fixes],
            "score of try": [f"{row['score']:.2f}" for row in ours],
        }
    )
    return SimpleNamespace(table=table, scores=scores, machine=judged["reference"]["machine"])


def _speedup(row: dict) -> str:
    number = f"{Number(row['speedup'], TIMES, row['low'], row['high']):bare}"
    return "another training" if row["broken"] else number if row["changed"] else "unchanged"
