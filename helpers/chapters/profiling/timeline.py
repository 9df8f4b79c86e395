"""A step with a fault and without it, to be drawn: what ran when, and in which part of the step."""

from types import SimpleNamespace

import pandas as pd

from ...book.table import Worth, table
from ...findings.account import timeline as read_timeline
from ...lab import Row
from .planted_faults import FIXED, NAMES, PIPELINES, SIZES, SLOW, fixes_of, planted, sized, trace_of

# Faults that are drawn, each in a loop without any other.
DRAWN_FAULTS = {"vit": ("decode_once", "bf16", "fused_optimizer"), "gpt": ("short_padding", "fused_loss")}
ALL = "all"
DRAWN = 120  # operations of a drawn step, the longest
PARTS = ("load", "forward", "loss", "backward", "optimizer", "metrics")  # of a step, as the trainer names them
_DRAWN = [{"pipeline": name, "fault": fault} for name in PIPELINES for fault in (ALL, *DRAWN_FAULTS[name])]


@table(
    **{name: sized(s, _DRAWN[:1] if s == "small" else _DRAWN) for name, s in SIZES.items()},
    version=2,
    columns="variant track name begin_ms end_ms part?",
    worth=Worth(5, "the timeline of a step", cpu=3.7, gpu=4, big_gpu=14),
)
def timeline(size: str, pipeline: str, fault: str) -> list[Row]:
    """A step with one fault and without it, to be drawn: what ran when, and in which part of the step.

    All other faults are fixed; the fault "all" is the slow pipeline.
    """
    switched, rows = PIPELINES[pipeline], []
    slow = frozenset() if fault == ALL else planted(pipeline, [fault], size)
    for variant, fixes in ((SLOW, slow), (FIXED, fixes_of(pipeline, FIXED, size))):
        step = read_timeline(trace_of(switched, fixes, size))
        is_part = (step["track"] == "annotations") & step["name"].isin(PARTS)
        spans = step.loc[is_part, ["begin_ms", "end_ms", "name"]].to_numpy().tolist()
        inside = [[name for low, high, name in spans if low <= begin < high] for begin in step["begin_ms"]]
        step["part"] = [names[0] if names else None for names in inside]
        ops = step[step["track"] != "annotations"].assign(ms=step["end_ms"] - step["begin_ms"]).nlargest(DRAWN, "ms")
        drawn = pd.concat([step[is_part], ops.drop(columns="ms").sort_values("begin_ms")])
        rows += [{"variant": variant} | row | {"name": row["name"][:60]} for row in drawn.to_dict("records")]
    return rows


@timeline.numbers()
def _(rows: pd.DataFrame) -> SimpleNamespace:
    """The steps with a fault and without it: whole loops by name, single faults by pipeline and fault."""
    pairs = {key: pair for key, pair in rows.groupby(["pipeline", "fault"]) if pair["variant"].nunique() == 2}
    return SimpleNamespace(
        whole={NAMES[name]: pairs[name, "all"] for name in NAMES if (name, "all") in pairs},
        single={key: pair for key, pair in pairs.items() if key[1] != "all"},
    )
