"""Chapter 0."""

from itertools import pairwise

import pandas as pd

from . import Records, claim

ORDER = ("mixed precision", "batching", "profiling fixes", "fused norm and optimizer", "compile")
TABLES = ("summary/stages", "summary/reduced_stages")  # a GPU's and a CPU's; a sentence may be about either


def _tables(records: Records, gpu: str) -> list[pd.DataFrame]:
    return [rows for table in TABLES if len(rows := records.rows(table)) and len(rows := rows[rows["gpu"] == gpu])]


def _of(runs: pd.DataFrame, way: str, stage: str, column: str = "train_s") -> pd.Series:
    """A figure of each seed."""
    return runs[(runs["way"] == way) & (runs["stage"] == stage)][column]


def _times(runs: pd.DataFrame) -> dict[str, float]:
    """Seconds of a whole training, mean over the seeds: at the start, and up to each stage."""
    known = {name: _of(runs, "cumulative", name).mean() for name in ORDER}
    return {"start": _of(runs, "start", "none").mean()} | {name: s for name, s in known.items() if s == s}


def _beside(runs: pd.DataFrame) -> dict[str, float]:
    """What each stage brings beside those before it."""
    times = list(_times(runs).items())
    return {name: before / now for (_, before), (name, now) in pairwise(times)}


@claim("{gpu}: the whole training takes {start} s at the start and {last} s with all stages, {gain}× as fast.")
def _(records, gpu, **_):
    told = []
    for runs in _tables(records, gpu):
        times = _times(runs)
        start, last = times["start"], list(times.values())[-1]
        told.append({"start": start, "last": last, "gain": start / last})
    return told


def _any_device(records: Records) -> list[pd.DataFrame]:
    gpus = {gpu for table in TABLES for gpu in records.rows(table).get("gpu", [])}
    return [runs for gpu in gpus for runs in _tables(records, gpu)]


@claim("Most is brought by *{stage}*: {gain}×.")
def _(records, **_):
    gains = [_beside(runs) for runs in _any_device(records)]
    return [{"stage": max(found, key=found.__getitem__), "gain": max(found.values())} for found in gains]


@claim("Fastest up to *{stage}*: {gain}× the start.")
def _(records, **_):
    told = []
    for runs in _any_device(records):
        times = _times(runs)
        best = min(times, key=times.__getitem__)
        told.append({"stage": best, "gain": times["start"] / times[best]})
    return told


@claim("Slower with {stages}: see what the stage costs, below.")
def _(records, **_):
    found = [{name: gain for name, gain in _beside(runs).items() if gain < 0.97} for runs in _any_device(records)]
    return [{"stages": ", ".join(f"*{name}* ({gain:.2f}×)" for name, gain in slower.items())} for slower in found]


@claim("No difference (less than 3 %) with {stages}.")
def _(records, **_):
    found = [[name for name, gain in _beside(runs).items() if 0.97 <= gain <= 1.03] for runs in _any_device(records)]
    return [{"stages": ", ".join(f"*{name}*" for name in same)} for same in found]


@claim(
    "The validation loss, after as many real tokens, ends {apart} from the start's, {verdict} twice the deviation of "
    "the seeds ({deviation})."
)
def _(records, **_):
    told = []
    for runs in _any_device(records):
        ends = [_of(runs, *at, "validation_loss") for at in (("start", "none"), ("cumulative", list(_times(runs))[-1]))]
        apart, deviation = ends[1].mean() - ends[0].mean(), max(end.std(ddof=1) for end in ends)
        verdict = "within" if abs(apart) <= 2 * deviation else "more than"
        told.append({"apart": apart, "verdict": verdict, "deviation": deviation})
    return told


@claim("Peak memory was {before} GiB and {verb} {after}.", verb="stays at|falls to|rises to")
def _(records, **_):
    told = []
    for runs in _any_device(records):
        last = list(_times(runs))[-1]
        before, after = (_of(runs, *at, "peak_gib").mean() for at in (("start", "none"), ("cumulative", last)))
        verb = "falls to" if after < before else "rises to"
        told.append(
            {"before": before, "after": after, "verb": "stays at" if f"{before:.1f}" == f"{after:.1f}" else verb}
        )
    return told


@claim("| start | {time} | – | – | – | {loss} |")
def _(records, **_):
    return [
        {"time": _times(runs)["start"], "loss": _of(runs, "start", "none", "validation_loss").mean()}
        for runs in _any_device(records)
    ]


@claim("| + {stage} | {time} | {alone} | {beside} | {gain} | {loss} |")
def _(records, stage, **_):
    told = []
    for runs in _any_device(records):
        times = _times(runs)
        if stage in times:
            alone = _of(runs, "alone", stage).mean()
            alone = alone if alone == alone else times[stage]  # the first stage is alone anyway
            gains = {"alone": times["start"] / alone, "beside": _beside(runs)[stage]}
            gains |= {"gain": times["start"] / times[stage], "time": times[stage]}
            told.append(gains | {"loss": _of(runs, "cumulative", stage, "validation_loss").mean()})
    return told


@claim(
    "The language model, stage by stage: {what}; means over {seeds} seeds. {origin}.",
    what="the whole training|a reduced training in fp32, until a GPU has been measured",
)
def _(records, what, **_):
    table = TABLES["reduced" in what]
    return {"seeds": records.rows(table)["seed"].nunique()} | records.origin(table)


@claim("{goals} goals: {counts}.")
def _(records, **_):
    return {}  # its numbers are those of the table above it, which `test_claims` counts
