"""The project's goals, each a claim about a named number of a table, judged by the records of each machine."""

from dataclasses import dataclass

import pandas as pd

from ...book.values import FAILS, HOLDS, Verdict
from ...lab.estimate import UNDECIDED
from .. import select

MARKS = {HOLDS: "✓", FAILS: "✗", UNDECIDED: "?"}
CHAPTERS = ("summary", "amp", "batching", "profiling", "swiglu", "rush", "pipelines", "compilers")  # 0 to 7


@dataclass(frozen=True)
class Goal:
    """That a number of a table, `amp/quality`, is `at_least` or `at_most` something; a dot leads into a namespace."""

    table: str
    name: str
    measure: str
    at_least: float | None = None
    at_most: float | None = None

    def verdict(self, machine: str) -> Verdict:
        """Of a machine's records: holds, does not hold, undecided or not measured."""
        value = select([self.table])[0].on(machine).number(self.name)
        return value.at_most(self.at_most) if self.at_least is None else value.at_least(self.at_least)


def table(**machines: str) -> pd.DataFrame:
    """All goals; for each machine, by the name that its column gets, the value with the mark of its outcome."""
    rows = []
    for goal in GOALS:
        row = {"chapter": str(CHAPTERS.index(goal.table.partition("/")[0])), "measure": goal.measure}
        for name, machine in machines.items():
            verdict = goal.verdict(machine)
            value = f"{verdict.number:bare} {MARKS[verdict.outcome]}" if verdict.number.measured else ""
            row |= {"goal": verdict.bound, name: value}
        rows.append(row)
    return pd.DataFrame(rows)


GOALS = (
    Goal("summary/stages", "all", "speedup of all stages but compile, whole training", at_least=5),
    Goal("amp/scaler_step", "speedup", "speedup of unscale, clip and step over torch's scaler", at_least=1.3),
    Goal("amp/scaler_step", "over_none", "its time against a clipped step without scaling", at_most=0.95),
    Goal("batching/throughput", "packed", "throughput of packs against samples without padding", at_least=0.95),
    Goal("batching/sampler_scaling", "million_s", "time to build the sampler of a million samples", at_most=0.5),
    Goal("batching/sampler_scaling", "growth", "a batch of a million samples against ten thousand", at_most=1.5),
    Goal("profiling/vit_fixes", "together", "speedup of the ViT's loop, faults fixed", at_least=5),
    Goal("profiling/gpt_fixes", "together", "speedup of the language model's loop, faults fixed", at_least=3),
    Goal("swiglu/peers", "level2_slowest", "time of level 2 against torch.compile", at_most=1.0),
    Goal("swiglu/peers", "level2_stored", "saved bytes of level 2 against plain", at_most=0.55),
    Goal("rush/ladder", "best.share", "share of matmul throughput, attention in full", at_least=0.65),
    Goal("rush/peers", "over_compiled", "speedup over compiled transformers", at_least=1.3),
    Goal("rush/peers", "alike_liger", "speedup over transformers, Liger and compile, alike", at_least=1.0),
    Goal("rush/peers", "speedup", "speedup over the fastest setup of transformers", at_least=1.3),
    Goal("pipelines/formats", "largest_shards", "cold tar or TFRecord reads in order over small files", at_least=3),
    Goal("pipelines/formats", "largest_mapped", "cold mapped-file reads in order over small files", at_least=3),
    Goal("pipelines/formats", "random_shards", "cold tar reads by index in random order", at_least=3),
    Goal("pipelines/formats", "random_mapped", "cold mapped-file reads in random order", at_least=3),
    Goal("pipelines/forgetting", "least", "accuracy lost without the least forgotten 30 %", at_most=0.5),
    Goal("compilers/latency", "served", "mean speedup of ONNX Runtime or compile", at_least=1.3),
)
