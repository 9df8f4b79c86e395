"""Loops with a planted fault: does `dlspeed profile` name it first, and does its fix gain what was promised?"""

import statistics
import tempfile
from types import SimpleNamespace

import pandas as pd

from ...book.table import Worth, table
from ...book.values import PERCENT, Number, share_of
from ...faults import entries
from ...findings.diagnose import diagnose
from ...lab import Row
from ...trying import try_edited, try_script
from .cases import (
    CASES,
    MARGIN,
    answered,
    as_cell,
    counted,
    interval,
    names_the_line,
    percents,
    printed,
    profiled,
    shares_of,
    shortened,
)

TRIAL_S = 6.0
OFF = 0.1  # of the iteration: promises that are off by more are shown


@table(
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
        slow = profiled(case, folder)
        fixed = profiled(case, folder, "--fixed") if case["twin"] else None
        told = {"told": as_cell(str(diagnose(slow["output"])))}
    dearest = [line["where"] + " " for line in slow["lines"][:1]]
    return {
        "apart": case["apart"],
        "line_right": any(names_the_line(loop, line) for line in dearest),
        **answered(case, slow),
        **_gain(case, slow, fixed),
        **(_alarm(case, fixed["findings"]) if fixed else {}),
        **told,
    }


def _gain(case: dict, slow: dict, fixed: dict | None) -> Row:
    if fixed and case.get("ranks"):
        return {"gained": 1 - _iteration_s(fixed) / _iteration_s(slow)}
    script = case["script"]
    (row,) = try_edited(script, [], script, ["--fixed"], seconds=TRIAL_S, judged=False).tried
    return interval("gained", row)


def _alarm(case: dict, findings: list[dict]) -> Row:
    if not findings:
        return {"alarm": 0.0}
    worst = max(findings, key=lambda finding: finding["gain_share"])
    row: Row = {"alarm": worst["gain_share"]}
    if worst["finding"] != "fp32 products" or worst["gain_share"] < MARGIN:
        return row
    only = entries()["fp32 products"].tried
    tried = try_script(case["script"], ["--fixed"], seconds=2 * TRIAL_S, only=only).tried
    return row | {"alarm_tried": max(one.gain_share for one in tried)}


def _iteration_s(answer: dict) -> float:
    times = answer["observed"]["iterations"]
    return statistics.fmean(times[len(times) // 5 :])


# Numbers


@loops.numbers()
def _(rows: pd.DataFrame) -> SimpleNamespace:
    """Which loops of the open set `profile` answered rightly, and its promises against what the fixes gained."""
    heads = {"loop": "loop", "first": "first answer", "place": "place of the cause"}
    heads |= {"promised": "promised", "gained": "gained", "seconds_to_answer": "seconds"}
    rows = rows.sort_values("loop")
    numbers = {name: percents(rows[name]) for name in ("promised", "gained")}
    shown = rows.assign(first=shortened(rows["first"]), **numbers)
    off = (rows["promised"] - rows["gained"]).abs() > OFF
    apart, right, line_right = (rows[name].map(str) == "True" for name in ("apart", "right", "line_right"))
    names_line = [names_the_line(loop, str(first)) for loop, first in zip(rows["loop"], rows["first"], strict=True)]
    alarms = rows.dropna(subset=["alarm"])
    alarms = alarms[(alarms["alarm"] >= MARGIN) & ~(alarms["alarm_tried"] >= MARGIN)]
    errors = (rows["promised"] - rows["gained"]).abs().dropna()
    measured = rows.dropna(subset=["gained"]).reindex(columns=["loop", "gained", "gained_low", "gained_high"])
    return SimpleNamespace(
        table=shown.loc[(rows["place"] != 1) | off, list(heads)].rename(columns=heads),
        off=OFF,
        right=share_of(right.sum(), len(rows)),
        right_apart=share_of(right[apart].sum(), apart.sum()),
        first_line=share_of(sum(names_line), rows["loop"].isin(list(CASES)).sum()),
        line_right=share_of(line_right.sum(), len(rows)),
        count=counted(len(rows)),
        apart=counted(apart.sum()),
        median_error=Number(errors.median(), PERCENT, decimals=0, missing="a promise"),
        large_error=Number(errors.quantile(0.9), PERCENT, decimals=0, missing="a promise"),
        alarms=share_of(len(alarms), rows["alarm"].notna().sum()),
        alarmed=", ".join(
            f"{loop} {Number(share, PERCENT, decimals=0)}"
            for loop, share in zip(alarms["loop"], alarms["alarm"], strict=True)
        ),
        others=counted((alarmed := rows["alarm"] >= MARGIN).sum()),
        helped=counted((alarmed & (rows["alarm_tried"] >= MARGIN)).sum()),
        twins=counted(rows["alarm"].notna().sum()),
        beyond=counted((rows["gained"] > rows["promised"]).sum()),
        far_beyond=counted((rows["gained"] > rows["promised"] + MARGIN).sum()),
        told=printed(rows),
        gained=dict(zip(measured["loop"], shares_of(measured, "gained"), strict=True)),
    )
