"""Chapter 6."""

import pandas as pd

from . import Records, claim

SHARDS, MAPPED = ("webdataset", "webdataset by index", "tfrecord"), ("mapped", "ffcv")


def _cold(records: Records, **where: object) -> pd.DataFrame:
    return records.rows("pipelines/formats", cached="cold", order="sequential", workers=0, **where)


@claim(
    "{gpu}, {kind}: {format} is read {ratio}× as fast as small files, in order, with {cache} out of the cache "
    "({verdict}: at least 3); the bare files, without any reader, {bare}×"
)
def _(records, gpu, kind, format, **_):
    rows = _cold(records, gpu=gpu, kind=kind).set_index("format")
    row, files = rows.loc[format], rows.loc["files"]
    ratio = row["samples_per_s"] / files["samples_per_s"]
    bare = files["raw_s"] / row["raw_s"]
    return {"ratio": ratio, "cache": row["cache"], "verdict": ratio >= 3, "bare": bare}


@claim(
    "Against small files, read cold and in order, at best: shards {shards}× ({of_shards}); a mapped file {mapped}× "
    "({of_mapped})"
)
def _(records, **_):
    told = {}
    for name, formats in (("shards", SHARDS), ("mapped", MAPPED)):
        gains = []
        for (_, kind), rows in _cold(records).groupby(["gpu", "kind"], sort=False):
            rate = rows.set_index("format")["samples_per_s"]
            gains += [(rate[f] / rate["files"], f"{f}, {kind}") for f in formats if f in rate]
        gain, best = max(gains, key=lambda pair: pair[0])  # of equal ones the first
        told |= {name: gain, f"of_{name}": best}
    return told


@claim(
    "{gpu}: a device that takes {step} ms a step is idle for less than 5 % {told}; with {least} workers for {idle}. "
    "The prediction is off by at most {apart} of the time"
)
def _(records, gpu, step, **_):
    simulated = {"where": "simulated", "prefetch": 2, "decode": "Pillow"}
    rows = records.rows("pipelines/loader", gpu=gpu, step_ms=step, **simulated).sort_values("workers")
    enough = None
    for row in rows[::-1].itertuples():  # from the most workers down, as long as the device doesn't wait
        if row.idle_share >= 0.05:
            break
        enough = row.workers
    told = "with no number of workers that was tried" if enough is None else f"from {enough} workers on"
    apart = max(abs(rows["idle_share"] - rows["predicted_idle_share"]))
    first = rows.iloc[0]
    return {"told": told, "least": first["workers"], "idle": first["idle_share"], "apart": apart}


@claim("{gpu}, {variant}: {first} ms a step at first, {last} ms at last, {total} s over the epoch")
def _(records, gpu, variant, **_):
    row = records.one("pipelines/metrics_growth", gpu=gpu, variant=variant)
    return {"first": row["first_ms"], "last": row["last_ms"], "total": row["total_s"]}


@claim(
    "{gpu}, {data}, as many {budget}: without the least forgotten 30%, {least} points ({verdict}: at most 0.5 lost); "
    "without any 30%, {random}"
)
def _(records, gpu, data, budget, **_):
    told = {}
    for name, variant in (("least", "least forgotten"), ("random", "random")):
        lost = records.rows("pipelines/forgetting", gpu=gpu, data=data, budget=budget, variant=variant, share=0.3)[
            "lost_points"
        ]
        told[name] = f"{-lost.mean():+.2f}" + (f" ± {lost.sem():.2f}" if len(lost) > 1 else "")
        if variant == "least forgotten":
            told["verdict"] = lost.mean() <= 0.5
    return told


@claim("{gpu}, {data}: of those left out, {variant}, {wrong} had wrong labels, and accuracy changed by {gained} points")
def _(records, gpu, data, variant, **_):
    rows = records.rows("pipelines/wrong_labels", gpu=gpu, data=data, variant=variant)
    return {"wrong": rows["precision"].mean(), "gained": rows["gained_points"].mean()}


@claim(
    "{gpu}, {program}, {size} turns: {faster}× as fast once compiled, which takes {compiling} s and has paid after "
    "{turns} turns of the loop"
)
def _(records, gpu, program, **_):
    rows = records.rows("pipelines/jit", gpu=gpu, program=program, variant="numba").dropna(subset="turns")
    row = rows.sort_values("size").iloc[-1]
    told = {"size": row["size"], "faster": row["speedup"], "compiling": row["compile_s"]}
    return told | {"turns": row["turns"]}


@claim("Data: {sources}")
def _(records, sources):
    tables = ("pipelines/forgetting", "amp/quality", "batching/training")
    known = [list(dict.fromkeys(records.rows(table).get("source", []))) for table in tables]
    joined = ["; ".join(names) for names in known] + [", ".join(sorted(names)) for names in known]
    return {"sources": sources if sources in joined else " or ".join(filter(None, joined))}
