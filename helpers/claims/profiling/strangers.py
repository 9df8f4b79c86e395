"""The open sets of loops: what `profile` says first and `try` gains, beside fixes by hand; trials of equals."""

import functools
import json
import re
import textwrap
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pandas as pd

from ...experiments.profiling.strangers import CASES, PEERS, ROOT, names_the_line
from ...lab.estimate import todays
from ...lab.records.values import PERCENT, TIMES, Number, derived, lacking, over_runs, share_of
from ...lab.trials import FASTER, SLOWER
from ...lab.trials.paired import TURN_S, TURN_STEPS
from ...lab.trials.simulation import resampled
from ...lab.trials.start_noise import of_null_trials
from .two_loops import MARGIN, NAMES, counted

BASELINES = ROOT / "data" / "cases" / "baselines"
PAGE = 112  # letters in a line of the report's listings
SLOWDOWNS, PAIRS = (0.01, 0.02, 0.03, 0.05, 0.1), (8, 16, 32, 64, 128)  # of a start
MATCH = 0.03  # of a step: a change from outside that is this near to the one by hand agrees with it


def loops(rows: pd.DataFrame) -> SimpleNamespace:
    """Which loops of the open set `profile` answered rightly, and its promises against what the fixes gained."""
    heads = {"loop": "loop", "first": "first answer", "place": "place of the cause"}
    heads |= {"promised": "promised", "gained": "gained", "seconds_to_answer": "seconds"}
    rows = rows.sort_values("loop")
    numbers = {name: _percents(rows[name]) for name in ("promised", "gained")}
    shown = rows.assign(first=_shortened(rows["first"]), **numbers)
    apart, right, line_right = (rows[name].map(str) == "True" for name in ("apart", "right", "line_right"))
    names_line = [names_the_line(loop, str(first)) for loop, first in zip(rows["loop"], rows["first"], strict=True)]
    alarms = rows.dropna(subset=["alarm"])
    alarms = alarms[(alarms["alarm"] >= MARGIN) & ~(alarms["alarm_tried"] >= MARGIN)]
    errors = (rows["promised"] - rows["gained"]).abs().dropna()
    measured = rows.dropna(subset=["gained"]).reindex(columns=["loop", "gained", "gained_low", "gained_high"])
    return SimpleNamespace(
        table=shown[list(heads)].rename(columns=heads),
        promises=rows.dropna(subset=["promised"]),
        right=share_of(right.sum(), len(rows)),
        right_apart=share_of(right[apart].sum(), apart.sum()),
        first_line=share_of(sum(names_line), rows["loop"].isin(list(CASES)).sum()),
        line_right=share_of(line_right.sum(), len(rows)),
        count=counted(len(rows)),
        apart=counted(apart.sum()),
        median_error=Number(errors.median(), PERCENT, decimals=0, missing="a promise"),
        large_error=Number(errors.quantile(0.9), PERCENT, decimals=0, missing="a promise"),
        alarms=share_of(len(alarms), rows["alarm"].notna().sum()),
        fp32=counted((rows["alarm_tried"] >= MARGIN).sum()),
        twins=counted(rows["alarm"].notna().sum()),
        told=_told(rows, "loop"),
        gained=dict(zip(measured["loop"], _shares(measured, "gained"), strict=True)),
    )


def peers(rows: pd.DataFrame) -> SimpleNamespace:
    """By profiler, the share of loops in which the line that it charges most time to is the cause's."""
    right = {tool: (rows.loc[rows["tool"] == tool, "right"].map(str) == "True") for tool in PEERS}
    return SimpleNamespace(share={tool: share_of(each.sum(), len(each)) for tool, each in right.items()})


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


def gpu_loops(rows: pd.DataFrame, gains: pd.DataFrame) -> SimpleNamespace:
    """Which loops with a GPU's fault were named, and the gain as arithmetic predicts, `profile` promises, pairs show.

    What pairs show is empty for a loop whose gain isn't measured.
    """
    gains = gains.reindex(columns=["loop", "by", "change", "gained", "gained_low", "gained_high"])
    gains = gains.assign(text=_shares(gains, "gained")).set_index("loop")
    by_hand, by_try = (gains[gains["by"] == by] for by in ("hand", "try"))
    tried = by_try["change"].astype(str) + ": " + by_try["text"]
    shown = rows.sort_values("predicted", ascending=False, kind="stable")
    shown = shown.assign(
        first=_shortened(shown["first"]),
        predicted=_percents(shown["predicted"]),
        promised=_percents(shown["promised"]),
        gained=shown["loop"].map(by_hand["text"]).fillna(""),
        tried=shown["loop"].map(tried).fillna(""),
    )
    heads = {"loop": "loop", "first": "first answer", "predicted": "by arithmetic", "promised": "promised"}
    heads |= {"gained": "gained by the fix", "tried": "by try from outside"}
    errors = (rows.set_index("loop")["promised"] - by_hand["gained"]).abs().dropna()
    right = rows["right"].map(str) == "True"
    return SimpleNamespace(
        table=shown[list(heads)].rename(columns=heads),
        right=share_of(right.sum(), len(rows)),
        count=counted(len(rows)),
        median_error=Number(errors.median(), PERCENT, decimals=0, missing="a gain"),
    )


def _shortened(answers: pd.Series) -> list[str]:
    return [textwrap.shorten(str(answer), 60, placeholder=" …") for answer in answers.fillna("")]


def _percents(shares: pd.Series, decimals: int | None = 0) -> list[Number]:
    return [Number(share, PERCENT, decimals=decimals) for share in shares]


def _told(rows: pd.DataFrame, names: str, column: str = "told") -> dict[str, str]:
    """What the command printed for each, in lines that a page holds; of a script in the first of them only its name.

    Verdicts are in today's words.
    """
    printed = rows[rows[column].astype(str).str.startswith('"')]
    texts = {row[names]: json.loads(row[column]) for row in printed.to_dict("records")}
    older = re.compile(r"no difference above [\d.]+ %")
    texts = {
        name: older.sub(lambda found: f"{todays(found[0]):<{len(found[0])}}", text) for name, text in texts.items()
    }
    wrap = functools.partial(textwrap.fill, width=PAGE, subsequent_indent=" " * 8, replace_whitespace=False)
    named = {name: re.sub(r"\A\S*/", "", text).splitlines() for name, text in texts.items()}
    return defaultdict(str, {name: "\n".join(map(wrap, lines)) for name, lines in named.items()})


def tried(rows: pd.DataFrame, loops: pd.DataFrame) -> SimpleNamespace:
    """What a change did from outside, beside what `profile` promised for its fault and what the edit by hand does."""
    both = rows.merge(loops[["loop", "promised"]].rename(columns={"loop": "script"}), how="left", on="script")
    shares = {name: _shares(both, name) for name in ("tried", "by_hand")}
    shown = both.assign(promised=_percents(both["promised"]), **shares)
    heads = {"script": "script", "change": "change", "promised": "promised", "tried": "tried from outside"}
    heads |= {"by_hand": "by hand", "losses": "losses"}
    one = both[~both["script"].isin(NAMES)].dropna(subset=["tried", "by_hand"])
    low, high = ((one[f"tried_{end}"].fillna(one["tried"])) for end in ("low", "high"))
    equal = (one["by_hand_high"] >= low - MATCH) & (one["by_hand_low"] <= high + MATCH)
    return SimpleNamespace(
        table=shown[list(heads)].rename(columns=heads),
        equal=counted(equal.sum()),
        count=counted(len(one)),
        share=share_of(equal.sum(), len(one)),
        told=_told(rows, "script"),
    )


def _shares(rows: pd.DataFrame, name: str) -> list[str]:
    """Shares with their intervals, where they have any; nothing where none was measured."""
    cells = rows[[name, f"{name}_low", f"{name}_high"]].astype(object)
    numbers = cells.where(cells.notna(), None).itertuples(index=False)
    return ["" if share is None else f"{Number(share, PERCENT, low, high, decimals=0)}" for share, low, high in numbers]


def slowdowns(rows: pd.DataFrame) -> SimpleNamespace:
    """Whether trials find a slowdown that was put in; and how often they would, by seconds, from the null pairs.

    For that known slowdowns are added to the log ratios of recorded null pairs, which are drawn anew.
    """
    put_in, nulls = rows[rows["slowdown"] > 0], rows[rows["slowdown"] == 0]
    starts = [np.array(start.split(), float) for row in nulls["log_ratios"].dropna() for start in row.split(";")]
    pair_s = 2 * TURN_STEPS * nulls["median_ms"].mean() * 2 / 1e3  # two turns, and as many steps to settle
    curve = [
        {"slowdown": slowdown, "seconds": 2 * pairs * max(pair_s, 2 * TURN_S)} | resampled(starts, slowdown, pairs)
        for slowdown in SLOWDOWNS
        for pairs in PAIRS
    ]
    shown = put_in[["training", "slowdown", "ratio", "low", "high", "pairs", "starts", "verdict"]]
    found = put_in["verdict"] == SLOWER
    return SimpleNamespace(table=shown, found=share_of(found.sum(), len(put_in)), curve=pd.DataFrame(curve))


def _luck(rows: pd.DataFrame) -> Number:
    if not (noise := of_null_trials(rows, kept=True)):
        return lacking("enough null trials", PERCENT)
    return Number(noise.value, PERCENT, noise.low, noise.high, decimals=2)


def nulls(rows: pd.DataFrame) -> SimpleNamespace:
    """Trials of a program against itself beside others' load: verdicts, and intervals that leave 1 out."""
    wrong, excluded = rows["verdict"].isin([FASTER, SLOWER]), (rows["low"] > 1) | (rows["high"] < 1)
    reach, kept = np.sqrt(rows["high"] / rows["low"]) - 1, rows[rows["allocator"] == "kept"]
    cells = rows.assign(trials=1, verdicts=wrong, excluded=excluded, reach=reach).groupby(["allocator", "others"])
    table = cells.agg({"trials": "sum", "verdicts": "sum", "excluded": "sum", "reach": "median"})
    heads = {
        "others": "load of others",
        "excluded": "intervals without 1",
        "reach": "median half width of the interval",
    }
    return SimpleNamespace(
        table=table.assign(reach=_percents(table["reach"])).reset_index().rename(columns=heads),
        trials=counted(len(rows)),
        seconds=derived(rows["trial_s"].iloc[0], "chosen", "s", 0),
        wrong=share_of(wrong.sum(), len(rows)),
        excluded=share_of(excluded.sum(), len(rows)),
        leaning=over_runs(kept["median_ms"], kept["baseline_ms"]),
        farthest=Number((rows["ratio"] - 1).abs().max(), PERCENT),
        luck=_luck(rows),
    )
