"""The project's goals, each a claim about a named number.

GOALS[0].verdict                  # of the records: holds, does not hold, undecided or not measured
"""

import importlib
from collections import Counter
from dataclasses import dataclass
from operator import attrgetter

import pandas as pd

from .. import chapters
from ..lab.estimate import LUCK_HERE, UNDECIDED
from ..lab.records.results import recorded
from ..lab.records.values import FAILS, HOLDS, NOT_MEASURED, Number, Verdict, derived, lacking

CHAPTERS = ("summary", "amp", "batching", "profiling", "swiglu", "rush", "pipelines", "compilers")  # 0 to 7

# table -> those that its claims read beside it
BESIDE = {"swiglu/peers": ("swiglu/ceilings",), "rush/ladder": ("swiglu/ceilings", "rush/pairs", "rush/peers")}


@dataclass(frozen=True)
class Goal:
    """That a number of a table's claims is `at_least` or `at_most` something.

    `table` names the experiment, `amp/quality`, whose claims are the function of the same name. A dot in `name` leads
    into a namespace.
    """

    table: str
    name: str
    measure: str
    at_least: float | None = None
    at_most: float | None = None

    @property
    def verdict(self) -> Verdict:
        chapter, _, table = self.table.partition("/")
        first, *others = (recorded(chapters.select([name])[0]) for name in (self.table, *BESIDE.get(self.table, ())))
        needed, beside = ((), tuple(others)) if self.table == "rush/ladder" else (others, ())
        claims = getattr(importlib.import_module(f".{chapter}", __package__), table)
        named = first.named(claims, *needed, beside=beside)
        value = attrgetter(self.name)(named) if named.measured else lacking(self.table)
        return value.at_most(self.at_most) if self.at_least is None else value.at_least(self.at_least)


def counted() -> dict[str, Number]:
    """How many of the goals hold, how many do not, …, by outcome."""
    outcomes = Counter(goal.verdict.outcome for goal in GOALS)
    return {name: derived(outcomes[name], "counted", "", 0) for name in (HOLDS, FAILS, UNDECIDED, NOT_MEASURED)}


def table() -> pd.DataFrame:
    """All goals with their values and outcomes."""
    rows = []
    for goal in GOALS:
        chapter, verdict = str(CHAPTERS.index(goal.table.partition("/")[0])), goal.verdict
        value = f"{verdict.number}".removesuffix(" (unpaired)")
        rows.append((chapter, goal.measure, verdict.bound, value, verdict.outcome))
    return pd.DataFrame(rows, columns=["chapter", "measure", "goal", "value", "outcome"])


GOALS = (
    Goal("summary/stages", "all", "speedup of all stages but compile, whole training", at_least=5),
    Goal("amp/scaler_step", "speedup", "speedup of unscale, clip and step over torch's scaler", at_least=1.3),
    Goal("amp/scaler_step", "over_none", "its time against a clipped step without scaling", at_most=0.95),
    Goal("amp/autocast_overhead", "ratio", "a step under Autocast against torch's autocast", at_most=1.02),
    Goal("batching/throughput", "packed", "throughput of packs against samples without padding", at_least=0.95),
    Goal("batching/sampler_scaling", "million_s", "time to build the sampler of a million samples", at_most=0.5),
    Goal("batching/sampler_scaling", "growth", "a batch of a million samples against ten thousand", at_most=1.5),
    Goal("profiling/whole_runs", "vit.speedup", "speedup of the ViT's epoch, faults fixed", at_least=5),
    Goal("profiling/whole_runs", "gpt.speedup", "speedup of the language model's epoch, faults fixed", at_least=3),
    Goal("profiling/predicted", "median_error", "median error of a predicted gain, share of a step", at_most=0.1),
    Goal("profiling/predicted", "largest_excess", "largest gain beyond its prediction, share of a step", at_most=0.05),
    Goal("profiling/predicted", "share_right", "pairs of faults whose better fix is named first", at_least=0.9),
    Goal("swiglu/peers", "level2_slowest", "time of level 2 against torch.compile", at_most=1.0),
    Goal("swiglu/peers", "level2_stored", "saved bytes of level 2 against plain", at_most=0.55),
    Goal("rush/ladder", "best.share", "share of the matmul throughput, attention counted in full", at_least=0.65),
    Goal("rush/nulls", "luck", "deviation of equal trainings in one process", at_most=LUCK_HERE),
    Goal("rush/peers", "over_compiled", "speedup over compiled transformers", at_least=1.3),
    Goal("rush/peers", "alike_liger", "speedup over transformers with Liger and compile, same features", at_least=1.0),
    Goal("rush/peers", "speedup", "speedup over the fastest of three setups of transformers", at_least=1.3),
    Goal("pipelines/formats", "largest_shards", "cold tar or TFRecord reads in order over small files", at_least=3),
    Goal("pipelines/formats", "largest_mapped", "cold mapped-file reads in order over small files", at_least=3),
    Goal("pipelines/formats", "random_shards", "cold tar reads by index in random order", at_least=3),
    Goal("pipelines/formats", "random_mapped", "cold mapped-file reads in random order", at_least=3),
    Goal("pipelines/forgetting", "least", "accuracy lost without the least forgotten 30 %", at_most=0.5),
    Goal("compilers/latency", "served", "speedup of ONNX Runtime or compile over eager, mean", at_least=1.3),
)
