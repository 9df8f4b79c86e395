"""Loops with a fault of a GPU: does `dlspeed profile` name it first within seconds?"""

import tempfile
from types import SimpleNamespace

import pandas as pd

from ...book import Worth
from ...book.table import table
from ...book.values import PERCENT, Number, lacking, share_of
from ...lab.machine import missing_because
from ...lab.rows import Row
from ...trying import try_edited
from .cases import ENDLESS, GPU_CASES, answered, counted, interval, percents, profiled, shares_of, shortened

GPU_LIMIT_S = 10  # profile goes over all twelve in 200 s, with the start of each
GPU_TRIAL_S = 25.0  # the starts are within: of each some 6 s on a GPU
MOST_EXPENSIVE = sorted(GPU_CASES, key=lambda name: -GPU_CASES[name]["gain"])[:3]


@table(
    small=[{"loop": "critics_one_by_one"}],
    gpu=[],  # each takes up to 20 GB
    big_gpu=[{"loop": name} for name in GPU_CASES],
    columns="first right place? promised? predicted seconds_to_answer gained? gained_low? gained_high?",
    missing=lambda loop: missing_because("CUDA"),
    timed=False,
    worth=Worth(30, "is the fault of a loop on a GPU named", gpu=17, big_gpu=17, on_gpu=11),
)
def gpu_loops(loop: str) -> Row:
    """What `profile` says first within seconds, and whether that is the cause; the gain that arithmetic predicted.

    What the fix takes away is measured, in pairs, of the most expensive faults.
    """
    case = GPU_CASES[loop]
    with tempfile.TemporaryDirectory() as folder:
        slow = profiled(case, folder, *ENDLESS, limit=GPU_LIMIT_S)
    row = {"predicted": case["gain"], **answered(case, slow)}
    if loop not in MOST_EXPENSIVE:
        return row
    script = case["script"]
    (fixed,) = try_edited(script, ENDLESS, script, [*ENDLESS, "--fixed"], seconds=GPU_TRIAL_S, judged=False).tried
    return row | interval("gained", fixed)


@gpu_loops.numbers()
def _(rows: pd.DataFrame) -> SimpleNamespace:
    """Which loops with a GPU's fault were named; gains by arithmetic, as `profile` promises, and as pairs show."""
    shown = rows.sort_values("predicted", ascending=False, kind="stable")
    shown = shown.assign(
        first=shortened(shown["first"]),
        predicted=percents(shown["predicted"]),
        promised=percents(shown["promised"]),
        gained=shares_of(shown, "gained"),
    )
    heads = {"loop": "loop", "first": "first answer", "predicted": "by arithmetic", "promised": "promised"}
    heads |= {"gained": "gained by the fix"}
    errors = (rows["promised"] - rows["gained"]).abs().dropna()
    right = rows["right"].map(str) == "True"
    whole = len(rows) == len(GPU_CASES)
    return SimpleNamespace(
        table=shown[list(heads)].rename(columns=heads),
        right=share_of(right.sum(), len(rows)) if whole else lacking(f"all {len(GPU_CASES)} loops", PERCENT),
        count=counted(len(rows)),
        median_error=Number(errors.median(), PERCENT, decimals=0, missing="a gain"),
    )
