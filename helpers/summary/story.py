"""The tables and sentences of chapter 0, made from the records."""

from pathlib import Path

import pandas as pd

from helpers.experiments.summary import ALONE, CUMULATIVE, START
from helpers.lab import records
from helpers.lab.experiment import Experiment
from helpers.lab.tables import number
from helpers.training.stages import STAGES

METRICS = ("train_s", "peak_gib", "validation_loss", "skipped_steps")


def stages(plan: pd.DataFrame) -> pd.DataFrame:
    """A row for each stage, means over the seeds: its gain on its own, beside the stages before it, and in all.

    `plan` has all configurations, measured or not. The first stage alone is what is cumulative up to it.
    """
    rows = []
    for gpu, found in plan.groupby("gpu", dropna=False, sort=False) if "gpu" in plan else [(None, plan)]:
        mean = {keys: _mean(runs) for keys, runs in found.groupby(["way", "stage"], sort=False)}
        start = before = mean.get((START, "none"))
        if start is None:
            continue
        rows.append({"gpu": gpu, "stage": "start"} | start)
        names = [stage for way, stage in mean if way == CUMULATIVE]
        for name in names:
            now, alone = mean[CUMULATIVE, name], mean.get((ALONE, name), mean[CUMULATIVE, name])
            told = {
                "gain alone": _ratio(start, alone),
                "gain beside": _ratio(before, now),
                "gain in all": _ratio(start, now),
            }
            rows.append({"gpu": gpu, "stage": f"+ {name}"} | now | told)
            before = now
    return pd.DataFrame(rows)


def _mean(runs: pd.DataFrame) -> dict:
    ok = runs[runs["status"] == "ok"]
    row: dict = {"seeds": len(ok)}
    for name in METRICS:
        known = name in ok and ok[name].notna().any()
        row[name] = float(ok[name].mean()) if known else None
    spread = float(ok["validation_loss"].std(ddof=1)) if row["validation_loss"] is not None else None
    row["deviation of the loss"] = spread
    row["spread of the time"] = (ok["train_s"].max() / ok["train_s"].min() - 1) if row["train_s"] else None
    return row | {"status": ", ".join(sorted(set(runs["status"])))}


def _ratio(before: dict, after: dict) -> float | None:
    return before["train_s"] / after["train_s"] if before["train_s"] and after["train_s"] else None


def answer(told: pd.DataFrame) -> list[str]:
    """How much faster the training is in all, what each stage brought, and whether it learned the same."""
    said = []
    for gpu, rows in told.groupby("gpu", dropna=False, sort=False) if len(told) else []:
        found = rows.dropna(subset="train_s")
        start, later = found[found["stage"] == "start"], found[found["stage"] != "start"]
        if not len(start) or not len(later):
            continue
        said += _of_one_device(str(gpu), start.iloc[0], later, len(rows) - 1)
    return said


def _of_one_device(gpu: str, start: pd.Series, later: pd.DataFrame, stages: int) -> list[str]:
    last, gains = later.iloc[-1], later.dropna(subset="gain beside")
    with_all = "with all stages" if len(later) == stages else f"up to *{_name(last)}* ({len(later)} of {stages} stages)"
    said = [
        f"**{gpu}: the whole training takes {number(start['train_s'])} s at the start and {number(last['train_s'])} s "
        f"{with_all}, {last['gain in all']:.2f}× as fast.**"
    ]
    if len(gains):
        best = gains.loc[gains["gain beside"].idxmax()]
        said.append(f"Most is brought by *{_name(best)}*: {best['gain beside']:.2f}×.")
    fastest = later.loc[later["gain in all"].idxmax()]
    if fastest["stage"] != last["stage"]:
        said.append(f"Fastest up to *{_name(fastest)}*: {fastest['gain in all']:.2f}× the start.")
    slower = [f"*{_name(row)}* ({row['gain beside']:.2f}×)" for _, row in gains.iterrows() if row["gain beside"] < 0.97]
    same = [f"*{_name(row)}*" for _, row in gains.iterrows() if 0.97 <= row["gain beside"] <= 1.03]
    if slower:
        said.append(f"Slower with {', '.join(slower)}: see what the stage costs, below.")
    if same:
        said.append(f"No difference (less than 3 %) with {', '.join(same)}.")
    return said + _quality(start, last)


def _quality(start: pd.Series, last: pd.Series) -> list[str]:
    said = []
    apart = last["validation_loss"] - start["validation_loss"]
    deviation = max(float(start["deviation of the loss"]), float(last["deviation of the loss"]))
    if deviation == deviation:
        verdict = "within" if abs(apart) <= 2 * deviation else "more than"
        said.append(
            f"The validation loss, after as many real tokens, ends {apart:+.3f} from the start's, {verdict} twice "
            f"the deviation of the seeds ({deviation:.3f})."
        )
    if pd.notna(start["peak_gib"]) and pd.notna(last["peak_gib"]):
        before, after = f"{start['peak_gib']:.1f}", f"{last['peak_gib']:.1f}"
        verb = "stays at" if before == after else "falls to" if last["peak_gib"] < start["peak_gib"] else "rises to"
        said.append(f"Peak memory was {before} GiB and {verb} {after}.")
    return said


def _name(row: pd.Series) -> str:
    return str(row["stage"]).removeprefix("+ ")


def abouts() -> pd.DataFrame:
    """What each stage is, and where it is told of."""
    return pd.DataFrame([{"stage": name, "what it is": s.about, "chapter": s.chapter} for name, s in STAGES.items()])


NO_GPU = "no GPU at hand"


def waiting(experiments: list[Experiment], results: Path | None = None) -> pd.DataFrame:
    """Of each chapter, the tables that are measured in full, those that wait, and why rows of them are missing."""
    rows = []
    gpus, cpus = records.devices(results), records.devices(results, cpu=True)
    for chapter in dict.fromkeys(e.chapter for e in experiments):
        there, lacking, reasons = [], [], []
        for e in [e for e in experiments if e.chapter == chapter]:
            tables = [_rows(e, device, results) for device in (gpus + cpus if e.configurations("cpu") else gpus)]
            (there if any(_complete(e, rows) for rows in tables) else lacking).append(e.table)
            reasons += [row[records.STATUS] for table in tables for row in table if row[records.STATUS] != "ok"]
            reasons += [] if any(tables) or gpus else [NO_GPU]
        why = ", ".join(sorted(set(reasons)))
        rows.append({"chapter": chapter, "measured": ", ".join(there), "waits": ", ".join(lacking), "reasons": why})
    return pd.DataFrame(rows)


def _rows(experiment: Experiment, device: str, results: Path | None) -> list[dict]:
    table = records.read(device, experiment.chapter, experiment.table, results)
    return table[table["preset"] != "small"].to_dict("records") if len(table) else []


def _complete(experiment: Experiment, rows: list[dict]) -> bool:
    identity = experiment.identity("big-gpu")
    there = {records.key(row, identity) for row in rows}
    return all(records.key(config, identity) in there for config in experiment.configurations("big-gpu"))
