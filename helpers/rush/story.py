"""The tables and sentences of chapter 5, made from the records."""

import pandas as pd

from helpers.lab.experiment import OUT_OF_MEMORY
from helpers.lab.tables import groups, reached

from .setup import LADDER, LEFT, START, STEPS, stands_on

GOAL_MFU, GOAL_PEER, GOAL_START, GOAL_FLOAT8 = 0.60, 1.5, 12.0, 1.2
GOAL_NORM, GOAL_ADAM = 0.65, 0.90
GOAL_DERIVED, GOAL_SIMULATED = 0.03, 0.02
LIGER = "transformers, liger-kernel, FlashAttention-2, fused AdamW"


def ladder(plan: pd.DataFrame) -> pd.DataFrame:
    """Each rung against the one it stands on, and against the start; its loss against fp32's."""
    rows = []
    for gpu, found in plan.groupby("gpu", dropna=False, sort=False) if "gpu" in plan else [(None, plan)]:
        known = found.set_index("step")
        for step in [START, *STEPS]:
            if step not in known.index:
                continue
            rate, before = _value(known, step, "tokens_per_s"), None
            if step != START:
                before = _value(known, stands_on(step), "tokens_per_s")
            row = {"gpu": gpu, "step": step, "tokens_per_s": rate, "gain": _ratio(rate, before)}
            row["gain in all"] = _ratio(rate, _value(known, START, "tokens_per_s"))
            row |= {
                name: _value(known, step, name) for name in ("mfu", "matmul_share", "peak_gib", "compile_s", "loss")
            }
            rows.append(row | {"status": known.loc[step, "status"]})
    return pd.DataFrame(rows)


def changes() -> pd.DataFrame:
    """What each rung changes, in which it stands on which, and why some are left again."""
    rows = [
        {
            "step": step,
            "changes": ", ".join(f"{name} = {value}" for name, value in change.items()),
            "stands on": stands_on(step),
            "left, because": LEFT.get(step, ""),
        }
        for step, change in STEPS.items()
    ]
    return pd.DataFrame(rows)


def batches(ladder: pd.DataFrame, batch: pd.DataFrame) -> pd.DataFrame:
    """The rungs that differ in nothing but the batch, and the batches that were measured beside them, in order."""
    alone = LADDER["CUDA graph"]
    climbed = {step: setup.batch for step, setup in LADDER.items() if not setup.differs(alone).keys() - {"batch"}}
    rungs = ladder[ladder["step"].isin(list(climbed))] if len(ladder) else ladder
    found = [rungs.assign(batch=rungs["step"].map(climbed)).drop(columns="step")] if len(rungs) else []
    rows = pd.concat([*found, *([batch] if len(batch) else [])], ignore_index=True) if found else batch
    if "gpu" not in rows:
        rows = rows.assign(gpu=None)
    rows = rows.sort_values("batch", kind="stable", ignore_index=True)
    return rows.sort_values("gpu", key=lambda names: names.factorize()[0], kind="stable", ignore_index=True)


def longest(checkpointing: pd.DataFrame) -> pd.DataFrame:
    """The longest of the measured sequences that fits with each way of checkpointing, and its speed."""
    rows = []
    for keys, found in groups(checkpointing, ["gpu", "checkpointing"]):
        fits = found[found["status"] == "ok"]
        if len(fits):
            last = fits.loc[fits["sequence"].idxmax()]
            rows.append(keys | {name: last[name] for name in ("sequence", "tokens_per_s", "peak_gib", "mfu")})
    return pd.DataFrame(rows)


def ladder_verdicts(measured: pd.DataFrame, peers: pd.DataFrame) -> list[str]:
    """What the chapter aims at in training speed, held against the records."""
    said = []
    told = ladder(measured) if len(measured) else measured
    for keys, found in groups(told[told["mfu"].notna()] if len(told) else told, ["gpu"]):
        plain = found[found["step"] != "float8"]
        best = plain.loc[plain["tokens_per_s"].idxmax()]
        sentence = (
            f"{keys['gpu']}: best bf16 rung, {best['step']}: {best['tokens_per_s']:,.0f} tokens/s, "
            f"{best['mfu']:.1%} MFU ({reached(best['mfu'] >= GOAL_MFU)}: at least {GOAL_MFU:.0%})"
        )
        if pd.notna(best["gain in all"]):  # else the start has no row that ran
            far = reached(best["gain in all"] >= GOAL_START)
            sentence += f", {best['gain in all']:.1f}× the start ({far}: at least {GOAL_START:g})"
        said.append(sentence)
        for row in found[(found["step"] == "float8") & found["gain"].notna()].to_dict("records"):
            said.append(
                f"{keys['gpu']}: float8, {row['gain']:.2f}× the same in bf16 "
                f"({reached(row['gain'] >= GOAL_FLOAT8)}: at least {GOAL_FLOAT8})"
            )
    said += peer_verdicts(peers)
    return said or ["The ladder has not been measured on a GPU yet."]


def peer_verdicts(peers: pd.DataFrame) -> list[str]:
    """How much faster ours is than the fastest peer that is set up as the goal asks, or else than the fastest that ran;
    and which ran out of memory at this batch, for the fastest may be among them."""
    said = []
    for keys, found in groups(peers, ["gpu"]):
        rates = found.reindex(columns=["variant", "tokens_per_s"]).set_index("variant")["tokens_per_s"].dropna()
        others = [way for way in rates.index if way != "ours"]
        if "ours" not in rates or not others:
            continue
        way = LIGER if LIGER in others else rates[others].idxmax()
        ratio = rates["ours"] / rates[way]
        sentence = f"{keys['gpu']}: {ratio:.2f}× {way} ({reached(ratio >= GOAL_PEER)}: at least {GOAL_PEER})"
        if way != LIGER:
            sentence += ", the fastest of the others that ran"
        failed = list(found[found["status"] == OUT_OF_MEMORY]["variant"])
        said.append(sentence + (f"; out of memory at the same batch: {'; '.join(failed)}" if failed else ""))
    return said


def kernel_verdicts(norms: pd.DataFrame, adam: pd.DataFrame) -> list[str]:
    """How near our kernels come to the bandwidth of a copy."""
    said = []
    for table, name, goal in ((norms, "norm", GOAL_NORM), (adam, "AdamW", GOAL_ADAM)):
        ours = (
            table[table["variant"] == "triton"].dropna(subset="share_of_copy")
            if "share_of_copy" in table
            else table[:0]
        )
        for keys, found in groups(ours, ["gpu"]):
            lowest = found["share_of_copy"].min()
            said.append(
                f"{keys['gpu']}: our {name} kernel moves its bytes at {lowest:.0%} of a copy's rate or more "
                f"({reached(lowest >= goal)}: at least {goal:.0%})"
            )
    return said or ["The fused kernels have not been measured on a GPU yet."]


def simulation_verdicts(planned: pd.DataFrame) -> list[str]:
    """How far the formula is from the simulated memory."""
    said = []
    for keys, found in groups(planned, ["gpu", "how"]):
        furthest = (found[found["ranks"].isin([8, 64])]["derived_ratio"] - 1).abs().max()
        said.append(
            f"{keys['gpu']}: at 8 and 64 ranks the derived memory is within {furthest:.2%} of the {keys['how']} one "
            f"({reached(furthest <= GOAL_DERIVED)}: at most {GOAL_DERIVED:.0%})"
        )
    return said or ["The memory of many ranks has not been simulated yet."]


def alone_verdicts(alone: pd.DataFrame) -> list[str]:
    """How far the simulated memory of one rank is from what a GPU measures."""
    said = []
    for keys, found in groups(alone, ["gpu"]):
        furthest = (found["ratio"] - 1).abs().max()
        said.append(
            f"{keys['gpu']}: simulated memory of one rank is within {furthest:.2%} of the measured "
            f"({reached(furthest <= GOAL_SIMULATED)}: at most {GOAL_SIMULATED:.0%})"
        )
    return said or ["The simulation has not been held against a GPU yet."]


def same_losses(distributed: pd.DataFrame) -> list[str]:
    """How far the last loss of each strategy is from one process's."""
    said = []
    for keys, found in groups(distributed, ["gpu"]):
        alone = found[found["strategy"] == "single"]["last_loss"]
        others = found[found["strategy"] != "single"]
        if len(alone) and len(others):
            apart = (others["last_loss"] - alone.iloc[0]).abs().max()
            told = f"further than {apart:.1e} from" if apart else "other, to the six digits recorded, than"
            said.append(f"{keys['gpu']}: on 2 and 4 ranks no strategy's last loss is {told} one rank's")
    return said or ["The strategies have not been compared yet."]


def _value(known: pd.DataFrame, step: str, column: str) -> float | None:
    if step not in known.index or column not in known or pd.isna(known.loc[step, column]):
        return None
    return float(known.loc[step, column])


def _ratio(value: float | None, to: float | None) -> float | None:
    return None if value is None or to is None else value / to
