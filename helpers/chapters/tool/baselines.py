"""What `try` alone scores on the referee's cases, beside each case's own fix: no rows, the recorded judgements."""

import json
from types import SimpleNamespace

from ...book.values import Number
from .cases import ROOT, counted

BASELINES = ROOT / "data" / "cases" / "baselines"
TRIED_S = 90  # that `try` had for a script


def baselines() -> SimpleNamespace:
    """The mean scores of unchanged scripts, of `try`'s patches and of each case's own fix, as the referee judged them.

    `helped` counts the cases that `try` makes faster and leaves the same training.
    """
    judged = {name: json.loads((BASELINES / f"{name}.json").read_text()) for name in ("nothing", "try", "reference")}
    scores = {name: Number(of["score"], "", of["low"], of["high"], decimals=2) for name, of in judged.items()}
    cases, machine = judged["try"]["cases"], judged["reference"]["machine"]
    helped = counted(sum(row["score"] > 0 for row in cases))
    named = {"machine": machine, "seconds": Number(TRIED_S, "s", decimals=0)}
    return SimpleNamespace(scores=scores, helped=helped, cases=counted(len(cases)), **named)
