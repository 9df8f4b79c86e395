"""The tables and sentences of chapter 0, made from the records."""

from pathlib import Path

import pandas as pd

from helpers.lab import records
from helpers.lab.tables import groups

from .experiments import ALONE, CUMULATIVE, START
from .stages import STAGES

METRICS = ("train_s", "peak_gib", "validation_loss")


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
    known = told.dropna(subset="train_s") if "train_s" in told else told[:0]
    for keys, found in groups(known, ["gpu"]):
        if len(found) < 2:
            continue
        start, last = found.iloc[0], found.iloc[-1]
        gains = found.iloc[1:].dropna(subset="gain beside")
        best = gains.loc[gains["gain beside"].idxmax()]
        losses = [row for row in gains.to_dict("records") if row["gain beside"] < 0.97]
        said.append(
            f"**{keys['gpu']}: the whole training takes {start['train_s']:.3g} s at the start and "
            f"{last['train_s']:.3g} s with all stages, {last['gain in all']:.2f}× as fast.** Most is brought by "
            f"*{best['stage'].removeprefix('+ ')}*: {best['gain beside']:.2f}×"
            + ("; nothing, or less, by " + ", ".join(_less(row) for row in losses) if losses else "")
            + "."
        )
        apart = last["validation_loss"] - start["validation_loss"]
        deviation = max(float(start["deviation of the loss"]), float(last["deviation of the loss"]))
        if deviation == deviation:
            verdict = "within" if abs(apart) <= 2 * deviation else "more than"
            said.append(
                f"The validation loss, after as many real tokens, ends {apart:+.3f} from the start's, {verdict} twice "
                f"the deviation of the seeds ({deviation:.3f})."
            )
        if pd.notna(start["peak_gib"]) and pd.notna(last["peak_gib"]):
            said.append(f"Peak memory falls from {start['peak_gib']:.1f} to {last['peak_gib']:.1f} GiB.")
    return said


def _less(row: dict) -> str:
    return f"*{row['stage'].removeprefix('+ ')}* ({row['gain beside']:.2f}×)"


def abouts() -> pd.DataFrame:
    """What each stage is, and where it is told of."""
    return pd.DataFrame([{"stage": name, "what it is": s.about, "chapter": s.chapter} for name, s in STAGES.items()])


def waiting(experiments: list, results: Path | None = None) -> pd.DataFrame:
    """Of each chapter, the tables that no device has measured in full, or only a CPU has."""
    rows = []
    gpus, cpus = records.devices(results), records.devices(results, cpu=True)
    for chapter in dict.fromkeys(e.chapter for e in experiments):
        ours = [e for e in experiments if e.chapter == chapter]
        lacking = [
            e.table for e in ours if not any(_complete(e, d, results) for d in (gpus + cpus if e.host else gpus))
        ]
        there = [e.table for e in ours if e.table not in lacking]
        rows.append(
            {"chapter": chapter, "measured": ", ".join(there), "waits for a GPU, or for the rest": ", ".join(lacking)}
        )
    return pd.DataFrame(rows)


def _complete(experiment, device: str, results: Path | None) -> bool:
    rows = records.read(device, experiment.chapter, experiment.table, results)
    rows = rows[rows["preset"] == "full"] if len(rows) else rows
    identity = experiment.identity("full")
    there = {records.key(row, identity) for row in rows.to_dict("records")}
    return all(records.key(config, identity) in there for config in experiment.configurations("full"))
