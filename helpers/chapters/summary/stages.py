"""A whole training of a language model, from a beginner's loop to all stages."""

import itertools
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import pandas as pd

from ...book.table import Worth, table
from ...book.values import PERCENT, TIMES, Number, cost, derived, lacking, over_runs
from ...lab import Row, in_fresh_process, missing_because
from ...text import local_wikitext
from ...training.stages import COMPILED, MIXED, PROFILED, STAGES, environment, run

NAMES = list(STAGES)
START, CUMULATIVE = "start", "cumulative"
SEEDS = range(3)
UNITS = {"train_s": ("s", 1), "real_tokens_per_s": ("real tokens/s", 0)}
UNITS |= {"validation_loss": ("", 2), "validation_accuracy": (PERCENT, 1)}


def chosen(way: str, stage: str, stages: Sequence[str]) -> list[str]:
    """The stages that a configuration switches on, out of `stages` in their order."""
    up_to = stages[: stages.index(stage) + 1] if stage in stages else []
    return list(up_to) if way == CUMULATIVE else []


def _runs(size: str, variants: Iterable[tuple[str, str]], seeds: Iterable[int]) -> list[Row]:
    return [{"way": way, "stage": stage, "seed": seed, "size": size} for seed in seeds for way, stage in variants]


def missing(stage: str, size: str, **_: object) -> str:
    """A CPU that doesn't multiply bf16 would train in fp32 once more."""
    return missing_because("native bf16") if stage == MIXED and size == "reduced" else ""


CLIMBED = [(START, "none"), *((CUMULATIVE, name) for name in NAMES)]


@table(
    small=_runs("small", [(START, "none"), (CUMULATIVE, PROFILED)], [0]),
    # Compilation, which takes longer than all the rest, is measured with one seed.
    cpu=_runs("reduced", CLIMBED[:-1], SEEDS) + _runs("reduced", CLIMBED[-1:], [0]),
    gpu=[],  # there `time_to_loss` takes its place: an epoch of seconds ends above the loss of a constant guess
    version=3,
    missing=missing,
    worth=Worth(
        60,
        "a training from the first line to the last, stage by stage",
        cpu=19.9,
        headline={"way": (START, CUMULATIVE)},  # of all seeds: one decides nothing
    ),
)
def stages(way: str, stage: str, seed: int, size: str) -> Row:
    """A whole training of the language model: its time, memory, and what it learned from equally many real tokens.

    In a process of its own, where nothing is left of an earlier one, and whose allocator keeps its pages.
    """
    names, options = chosen(way, stage, NAMES), {"preset": size, "seed": seed, "path": local_wikitext()}
    if size == "small":
        return run(names, **options)
    return in_fresh_process(_settled, names, environment=environment(), **options)


def _settled(names: Sequence[str], **options: Any) -> Row:
    """`run`, after a training that absorbs what a process does once: start of the device, imports, kernels."""
    run([MIXED], preset="small")
    return run(names, **options)


# Numbers


@stages.numbers()
def _(rows: pd.DataFrame) -> SimpleNamespace:
    """The staircase of the stages: means over the seeds, speedups over the row above and over the start.

    Compilation is measured with fewer seeds: what is told of it is against the same seeds, and it isn't part of `all`.
    """
    names = [name for name in ("none", *STAGES) if name in set(rows["stage"])]
    start, *_, end = best = [name for name in names if name != COMPILED]

    def by_run(stage: str, column: str) -> pd.Series:
        return rows[rows["stage"] == stage].set_index("seed")[column]

    gains = {
        after: over_runs(by_run(before, "train_s"), by_run(after, "train_s"))
        for before, after in itertools.pairwise(best)
    }
    apart = by_run(end, "validation_loss") - by_run(start, "validation_loss")  # both begin with the same weights
    return SimpleNamespace(
        first=_scores(rows, start),
        last=_scores(rows, end),
        all=over_runs(by_run(start, "train_s"), by_run(end, "train_s")),
        all_steady=over_runs(by_run(end, "real_tokens_per_s"), by_run(start, "real_tokens_per_s")),
        gains=gains,
        reached=bool(len(apart.dropna())) and bool((apart.dropna() <= 0).all()),  # the first's last loss, by the last
        cost=cost(rows, "stage", end, start),
        loss_apart=SimpleNamespace(mean=Number(apart.mean(), decimals=3), std=Number(apart.std(), decimals=3)),
        tokens=Number(rows["real_tokens"].max(), "real tokens", decimals=0),
        seeds=rows["seed"].nunique(),
        compiled=_compiled(rows, end),
        table=_staircase(
            rows, names, gains | {COMPILED: over_runs(by_run(end, "train_s"), by_run(COMPILED, "train_s"))}
        ),
    )


def _scores(rows: pd.DataFrame, stage: str) -> SimpleNamespace:
    """A stage's means over the seeds, the deviation of its loss, and its steps."""
    of = rows[rows["stage"] == stage]
    return SimpleNamespace(
        **{name: Number(of[name].mean(), unit, decimals=decimals) for name, (unit, decimals) in UNITS.items()},
        loss_std=Number(of["validation_loss"].std(), decimals=3),
        steps=derived(of["steps"].median(), "counted", "", 0),
    )


def _compiled(rows: pd.DataFrame, before: str) -> SimpleNamespace:
    """What compilation saves in a step and costs once, against the same seeds without it."""
    seeds = rows.loc[rows["stage"] == COMPILED, "seed"]
    same = rows[rows["seed"].isin(seeds)].groupby("stage")[["step_ms", "train_s"]].mean().reindex([before, COMPILED])
    step_ms, train_s, missing = same["step_ms"], same["train_s"], "the compiled training"
    steps_s = rows["steps"].max() * (step_ms[before] - step_ms[COMPILED]) / 1e3  # what compiling saves of them
    return SimpleNamespace(
        seeds=seeds.nunique(),
        before_ms=Number(step_ms[before], "ms", missing=missing, decimals=1),
        after_ms=Number(step_ms[COMPILED], "ms", missing=missing, decimals=1),
        compiling_s=Number(train_s[COMPILED] - train_s[before] + steps_s, "s", missing=missing, decimals=0),
    )


def _staircase(rows: pd.DataFrame, names: list[str], gains: dict[str, Number]) -> pd.DataFrame:
    stages = rows.groupby("stage")
    means, deviation = stages.mean(numeric_only=True).reindex(names), stages.std(numeric_only=True).reindex(names)
    on_cpu = {"fused norm and optimizer": "fused optimizer"} if (rows["preset"] == "cpu").all() else {}
    table = pd.DataFrame({"stage": ["start", *(f"+ {on_cpu.get(n, n)}" for n in names[1:])]}, index=means.index)
    table["wall time, s"] = means["train_s"]
    shown = [gains.get(name, lacking("before the start", TIMES)) for name in names]
    table["speedup"] = [f"{gain:bare}" if gain.measured else "–" for gain in shown]
    table["real tokens/s"], table["peak, GiB"] = means["real_tokens_per_s"], means["peak_gib"]
    for column, name in (("loss", "validation_loss"), ("accuracy", "validation_accuracy")):
        pairs = zip(means[name], deviation[name].fillna(0), strict=True)
        table[column] = [f"{mean:.3f} ± {std:.3f}" if std else f"{mean:.3f}" for mean, std in pairs]
    return table.reset_index(drop=True)
