"""The ladder in pairs: each rung takes turns with the one it stands on, both in one process.

On a CPU that process has their allocator. On a GPU `ladder` itself has the pairs, so that a trainer is built once for
both, and here is the best rung against the plain loop.
"""

import statistics

import pandas as pd

from ...book.table import Worth, table
from ...lab import Row, device, in_fresh_process
from ...rush import stands_on
from ...rush.measurement import in_turns
from ...rush.setup import LADDERS, START
from .setups import BEST, FULL, HEADLINES, MEDIUM, ON_CPU, PAIRED, SMALL, missing, setup_of

RUNG_BY_RUNG = "each change of the ladder against the one before it"
SECONDS = {"trial_s": 32.0}
MOST_ROUNDS = 64  # on a CPU, whose steps are turns of their own


def _pairs(kind: str, sizes: Row) -> list[Row]:
    """The best rung of a ladder beside the plain loop; on a CPU after the kept rungs, each beside its baseline."""
    steps, left = LADDERS[kind]
    kept = [name for name in steps if name not in left] if kind == "cpu" else []
    named = [*((stands_on(name, kind), name) for name in kept), (START, BEST[kind])]
    return [sizes | {"baseline": baseline, "rung": rung} for baseline, rung in named]


@table(
    small=[SMALL | {"trial_s": 4.0} | {"baseline": START, "rung": "fused AdamW"}],
    cpu=_pairs("cpu", ON_CPU | SECONDS),
    gpu=_pairs("cuda", MEDIUM | PAIRED),
    big_gpu=_pairs("cuda", FULL | PAIRED),
    columns="median_ms baseline_ms",
    version=4,
    timed=False,
    missing=lambda rung, **sizes: missing(step=rung, **sizes),
    worth=Worth(100, RUNG_BY_RUNG, cpu=58, gpu=25, big_gpu=12, headline={"rung": HEADLINES}, on_gpu=2),
)
def pairs(model: str, sequence: int, trial_s: float, baseline: str, rung: str) -> Row:
    """A kept rung of the ladder against the one it stands on, and the best against the plain loop."""
    before, after = (setup_of(model, sequence, name) for name in (baseline, rung))
    before = before.possible(device())
    if device().type == "cpu":
        options = {"environment": after.environment, "rounds": MOST_ROUNDS}
        step_ms, row = in_fresh_process(in_turns, before, after, trial_s, **options)
    else:
        step_ms, row = in_turns(before, after, trial_s)
    return {"median_ms": statistics.median(step_ms)} | row


def in_pairs(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows that took turns with a baseline."""
    return rows.reindex(columns=rows.columns.union(["ratio", "baseline", "baseline_ms"])).dropna(subset="ratio")
