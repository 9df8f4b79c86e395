"""Chapter 4."""

import re

from helpers.swiglu import costs

from . import claim

HELD = {
    "keeping two, time": ("level 2", "ratio_to_compiled", 1.00),
    "keeping two, bytes": ("level 2", "saved_ratio", 0.55),
    "8 bits, time": ("level 3", "ratio_to_compiled", 1.03),
    "8 bits, bytes": ("level 3", "saved_ratio", 0.31),
    "keeping two, time of liger-kernel's": ("level 2", "ratio_to_liger", 1.00),
}
KEPT = {  # of x, xW, xV, SiLU(xW) and their product, at I = 4d: numbers a token, in units of d
    "plain module": 1 + 4 * 4,
    "torch.utils.checkpoint": 1,
    "liger-kernel": 1 + 3 * 4,
    "level 0": 1 + 3 * 4,
    "level 1": 1,
    "level 2": 1 + 2 * 4,
    "level 3": 1 + 2 * 4 * (1 + 4 / 128) / 2,  # a byte for each, and four for the scale of 128
}
COMPILED = ("torch.compile", "torch.compile, memory budget 0.5")  # which choose themselves what to keep


@claim("On the {gpu} at size {size}, the unsynchronised clock is {times} times too fast")
def _(records, gpu, size, **_):
    row = records.one("swiglu/timing", gpu=gpu, size=size)
    return {"times": row["events_ms"] / row["unsynchronised_ms"]}


@claim(
    "{gpu}, {batch}×{seq}, d {hidden}, L {layers}: measured {off} from predicted, {verdict} the 2 % aimed at",
    verdict="within|more than",
)
def _(records, gpu, batch, seq, hidden, layers, **_):
    shape = {"batch": batch, "seq_len": seq, "hidden_dim": hidden, "num_layers": layers, "dtype": "float32"}
    rows = records.rows("swiglu/sweep", gpu=gpu, **shape).set_index("checkpoint_level")
    wide, depth = rows["intermediate_size"].iloc[0], int(layers)
    predicted = costs.peak_saving_bytes(1, int(batch) * int(seq), int(hidden), int(wide), depth, 4) / 2**30
    off = (rows.loc[0, "peak_gib"] - rows.loc[1, "peak_gib"]) / predicted - 1
    return {"off": off, "verdict": "within" if abs(off) <= 0.02 else "more than"}


@claim("{what}, d = {hidden}, {gpu}: {value} (at most {limit}: {verdict})", what="|".join(HELD))
def _(records, what, hidden, gpu, **_):
    way, column, limit = HELD[what]
    value = records.one("swiglu/peers", gpu=gpu, hidden_dim=hidden, way=way)[column]
    return {"value": value, "limit": limit, "verdict": value <= limit}


@claim("keeping two, bytes of liger-kernel's, d = {hidden}, {gpu}: {value} (at most 1.00: {verdict})")
def _(records, hidden, gpu, **_):
    rows = records.rows("swiglu/peers", gpu=gpu, hidden_dim=hidden).set_index("way")["saved_mib"]
    value = rows["level 2"] / rows["liger-kernel"]
    return {"value": value, "verdict": value <= 1}


@claim("| {way} | {derived} | {measured} | {time} | {status} |", way="|".join(map(re.escape, [*KEPT, *COMPILED])))
def _(records, way, **_):
    rows = records.rows("swiglu/peers", way=way)
    row = rows[rows["hidden_dim"] == 2048].iloc[0] if len(rows) else {"status": "not measured"}
    told = {"derived": KEPT[way] / KEPT["plain module"] if way in KEPT else "–", "status": row["status"]}
    places = {"measured": "saved_ratio", "time": "ratio_to_compiled"}
    return told | {name: row.get(column, "–") for name, column in places.items()}


@claim(
    "One SwiGLU layer at the width of Llama-3.2-1B, forward and backward, bf16. Bytes kept for backward are relative "
    "to the plain module's. {origin}."
)
def _(records, origin):
    return {} if origin == "Not measured on a GPU yet" else records.origin("swiglu/peers")
