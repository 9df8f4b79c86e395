"""Chapter 5."""

import pandas as pd

from . import claim

LIGER = "transformers, liger-kernel, FlashAttention-2, fused AdamW"
KERNELS = {"norm": ("rush/norms", 0.65), "AdamW": ("rush/adam", 0.90)}


@claim(
    "{gpu}: best bf16 rung, {step}: {rate} tokens/s, {mfu} MFU ({fast}: at least 60%), {times}× the start "
    "({far}: at least 12)"
)
def _(records, gpu, **_):
    rows = records.rows("rush/ladder", gpu=gpu)
    rates = rows.set_index("step")["tokens_per_s"]
    best = rows[rows["step"] != "float8"].sort_values("tokens_per_s").iloc[-1]
    times = best["tokens_per_s"] / rates["no optimisation"]
    told = {"step": best["step"], "rate": best["tokens_per_s"], "mfu": best["mfu"], "fast": best["mfu"] >= 0.6}
    return told | {"times": times, "far": times >= 12}


@claim("{gpu}: best bf16 rung, {step}: {rate} tokens/s, {mfu} MFU ({fast}: at least 60%)")
def _(records, gpu, **_):
    rows = records.rows("rush/ladder", gpu=gpu)
    if "no optimisation" in set(rows["step"]):
        return []
    best = rows[rows["step"] != "float8"].sort_values("tokens_per_s").iloc[-1]
    return {"step": best["step"], "rate": best["tokens_per_s"], "mfu": best["mfu"], "fast": best["mfu"] >= 0.6}


@claim("{gpu}: float8, {gain}× the same in bf16 ({verdict}: at least 1.2)")
def _(records, gpu, **_):
    from helpers.rush import stands_on

    rates = records.rows("rush/ladder", gpu=gpu).set_index("step")["tokens_per_s"]
    gain = rates["float8"] / rates[stands_on("float8")]
    return {"gain": gain, "verdict": gain >= 1.2}


@claim("{gpu}: {ratio}× {way} ({verdict}: at least 1.5){more}", more="(?:[,;] .*)?")
def _(records, gpu, **_):
    rates = records.rows("rush/peers", gpu=gpu).set_index("variant")["tokens_per_s"].dropna()
    others = rates.drop("ours").sort_values()
    way = LIGER if LIGER in others else others.index[-1]
    ratio = rates["ours"] / others[way]
    files = pd.concat([pd.read_csv(file) for file in records.folder.glob("*/rush/peers.csv")])
    failed = files[(files["gpu"] == gpu) & (files["preset"] != "small") & (files["status"] == "out of memory")][
        "variant"
    ]
    more = "" if way == LIGER else ", the fastest of the others that ran"
    more += "; out of memory at the same batch: " + "; ".join(failed) if len(failed) else ""
    return {"ratio": ratio, "way": way, "verdict": ratio >= 1.5, "more": more}


@claim("{gpu}: our {name} kernel moves its bytes at {share} of a copy's rate or more ({verdict}: at least {goal})")
def _(records, gpu, name, **_):
    table, goal = KERNELS[name]
    share = records.rows(table, gpu=gpu, variant="triton")["share_of_copy"].min()
    return {"share": share, "goal": goal, "verdict": share >= goal}


@claim("{gpu}: at 8 and 64 ranks the derived memory is within {apart} of the {how} one ({verdict}: at most 3%)")
def _(records, gpu, how, **_):
    rows = records.rows("rush/memory_plan", gpu=gpu, how=how)
    rows = rows[rows["ranks"].isin([8, 64])]
    apart = max(abs(rows["derived_ratio"] - 1))
    return {"apart": apart, "verdict": apart <= 0.03}


@claim("{gpu}: simulated memory of one rank is within {apart} of the measured ({verdict}: at most 2%)")
def _(records, gpu, **_):
    apart = max(abs(records.rows("rush/memory_alone", gpu=gpu)["ratio"] - 1))
    return {"apart": apart, "verdict": apart <= 0.02}


@claim("{gpu}: on 2 and 4 ranks no strategy's last loss is {told} one rank's")
def _(records, gpu, told):
    rows = records.rows("rush/distributed", gpu=gpu)
    one = rows[rows["strategy"] == "single"]["last_loss"].iloc[0]
    apart = abs(rows[rows["ranks"] > 1]["last_loss"] - one).max()
    return {"told": f"further than {apart:.1e} from" if apart else "other, to the six digits recorded, than"}
