"""Chapter 7."""

import pandas as pd

from . import NUMBER, Records, claim


@claim("Of {count} functions `{worst}` is silently wrong about {wrong}; never so: {never}")
def _(records, worst, **_):
    rows = records.rows("compilers/semantics")
    rows = rows[rows["gpu"] == _first_device(rows)]
    silently = (rows["outcome"] == "silently wrong").groupby(rows["variant"], sort=False).sum()
    never = ", ".join(f"`{way}`" for way in silently.index if not silently[way]) or "no way"
    told = {"count": rows["case"].nunique(), "wrong": silently.max(), "never": never}
    return told | {"worst": worst if silently[worst] == silently.max() else silently.idxmax()}


@claim(
    "{gpu}, {case} ({kind}): {before} → {after} kernels, {bytes_before} → {bytes_after} times the least bytes, "
    "{faster}× as fast"
)
def _(records, gpu, case, **_):
    rows = _larger(records, gpu=gpu, case=case).set_index("variant")
    before, after = rows.loc["eager"], rows.loc["torch.compile"]
    told = {"kind": before["kind"], "before": before["kernels"], "after": after["kernels"]}
    least = before["bytes_least"]
    told |= {"bytes_before": before["bytes_moved"] / least, "bytes_after": after["bytes_moved"] / least}
    return told | {"faster": 1 / after["ratio"]}


@claim(
    "{gpu}: fusing by torch.compile, at the larger size, makes {faster} of {cases} cases faster, the median {median}× "
    "as fast, the worst {worst}×"
)
def _(records, gpu, **_):
    gains = 1 / _larger(records, gpu=gpu, variant="torch.compile")["ratio"]
    told = {"faster": sum(gain > 1.03 for gain in gains), "cases": len(gains)}
    return told | {"median": gains.median(), "worst": min(gains)}


@claim("{gpu}, {model}, {precision}, batch {batch}: {way} {speedup}× ({low} to {high})", speedup=NUMBER)
def _(records, gpu, model, precision, batch, **_):
    rows = records.rows("compilers/latency", gpu=gpu, model=model, precision=precision, batch=batch)
    best = rows[rows["backend"] != "eager"].sort_values("speedup", kind="stable", ascending=False).iloc[0]
    told = {"way": best["backend"], "speedup": best["speedup"]}
    return told | {"low": best["speedup_p20"], "high": best["speedup_p80"]}


@claim(
    "{gpu}: the better of ONNX Runtime and compile, fp32: {way} on {model}, mean over batches of {batches}, {mean}× "
    "({verdict}: at least 1.3)",
    mean=NUMBER,
)
def _(records, gpu, way, model, **_):
    rows = records.rows("compilers/latency", gpu=gpu, precision="fp32")
    rows = rows[rows["backend"].str.startswith(("ONNX Runtime", "compile"))]
    means = {
        key: found["speedup"].mean()
        for key, found in rows.groupby(["model", "backend"])
        if found["batch"].nunique() > 1
    }
    best = max(means, key=means.__getitem__)
    batches = sorted(rows[(rows["model"] == best[0]) & (rows["backend"] == best[1])]["batch"])
    told = {"model": best[0], "way": best[1], "batches": ", ".join(map(str, batches))}
    return told | {"mean": means[best], "verdict": means[best] >= 1.3}


@claim("{gpu}, {model}, {way}: {flawed}× by the lecture's timing, {right}× by the right one", model="[^,]+")
def _(records, gpu, model, way, **_):
    row = records.one("compilers/flawed", gpu=gpu, model=model, backend=way)
    return {"flawed": row["flawed_eager_ms"] / row["flawed_ms"], "right": row["speedup"]}


@claim("{gpu}, {model}, batch {batch}: {told}", told="(?:[^×]+ [0-9.]+×(?:, )?)+")
def _(records, gpu, model, batch, **_):
    rows = records.rows("compilers/training", gpu=gpu, model=model, batch=batch)
    others = rows[rows["backend"] != "eager"]
    return {"told": ", ".join(f"{row.backend} {row.speedup:.2f}×" for row in others.itertuples())}


@claim("torch.compile in training on a GPU, the best of modes and models: {gain}× ({verdict}: at least 1.25)")
def _(records, **_):
    rows = records.rows("compilers/training")
    rows = rows[rows["backend"].str.startswith("compile") & ~rows["gpu"].str.startswith("CPU")]
    return {"gain": rows["speedup"].max(), "verdict": rows["speedup"].max() >= 1.25}


def _first_device(rows: pd.DataFrame) -> str:
    """GPUs stand before CPUs."""
    return sorted(set(rows["gpu"]), key=lambda name: (name.startswith("CPU"), name))[0]


def _larger(records: Records, **where: object) -> pd.DataFrame:
    everything = records.rows("compilers/fusion")
    return records.rows("compilers/fusion", size=everything["size"].max(), **where)
