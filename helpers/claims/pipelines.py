"""Chapter 6: reading, decoding and loading samples, metrics at each step, samples left out, loops compiled."""

import math
from types import SimpleNamespace

import numpy as np
import pandas as pd

from ..lab.records.values import PERCENT, TIMES, Number, derived, lacking, mean_of, over, pick

DATA = {"image": "JPEGs", "tokens": "tokens"}
FORMATS = {"files": "small files", "webdataset by index": "tar by index", "mapped": "mapped file"}
FORMATS |= {"tfrecord": "TFRecord"}
CASES = COLD, WARM, RANDOM, _ = ["cold, in order", "warm, in order", "cold, random", "warm, random"]
STEP_MS = 10  # of the simulated device whose idle shares are quoted
REMOVED = 0.3  # the share of samples whose removal is quoted


def formats(rows: pd.DataFrame) -> SimpleNamespace:
    """Microseconds a sample by format and case, speedups over small files, sizes on disk and times to look up."""
    cases = rows["cached"] + ", " + rows["order"].replace("sequential", "in order")
    ends = {"": "", "_p20": "_p80", "_p80": "_p20"}
    times = {f"us{end}": 1e6 / rows[f"samples_per_s{of_rate}"] for end, of_rate in ends.items()}
    single = rows.assign(case=cases, **times)
    pictures = single[(single["kind"] == "image") & (single["case"] == COLD)]

    def us(format: str, case: str, kind: str = "image") -> Number:
        return pick(single, "us", "µs", 0, kind=kind, format=format, case=case)

    def speedup(format: str, case: str = COLD, kind: str = "image") -> Number:
        return over(us("files", case, kind), us(format, case, kind))

    def largest(*formats: str, case: str = COLD) -> Number:
        speedups = [speedup(format, case, kind) for format in formats for kind in DATA]
        absent = lacking(f"cold reads of {' or '.join(formats)}", TIMES)
        return max((number for number in speedups if number.measured), key=float, default=absent)

    return SimpleNamespace(
        times=pd.concat([_times(single, kind) for kind in DATA]),
        sizes=_sizes(pictures),
        tar=speedup("webdataset by index"),
        tar_warm=speedup("webdataset by index", WARM),
        mapped=speedup("mapped"),
        largest_shards=largest("webdataset by index", "tfrecord"),
        largest_mapped=largest("mapped"),
        random_shards=largest("webdataset by index", case=RANDOM),
        random_mapped=largest("mapped", case=RANDOM),
        files_us=SimpleNamespace(cold=us("files", COLD), warm=us("files", WARM)),
        tar_us=SimpleNamespace(cold=us("webdataset by index", COLD), warm=us("webdataset by index", WARM)),
        library_us=SimpleNamespace(cold=us("webdataset", COLD), warm=us("webdataset", WARM)),
        raw_mb_per_s=Number(_sizes(pictures)["raw read, MB/s"].max(), "MB/s", missing="raw reads", decimals=0),
    )


def _times(single: pd.DataFrame, kind: str) -> pd.DataFrame:
    """Microseconds a sample: a row for each format, a column for each case, and the speedups over small files, cold."""
    chosen = single[single["kind"] == kind]
    times = chosen.pivot(index="format", columns="case", values="us")
    times = times.reindex(index=chosen["format"].unique(), columns=CASES)
    files = times.reindex(index=["files"]).iloc[0]
    table = times.rename(columns={case: f"{case}, µs" for case in CASES})
    table.insert(0, "data", DATA[kind])
    table.insert(1, "format", [FORMATS.get(name, name) for name in times.index])
    for order in ("in order", "random"):
        table[f"speedup, {order}"] = files[f"cold, {order}"] / times[f"cold, {order}"]
    return table


def _sizes(images: pd.DataFrame) -> pd.DataFrame:
    """Of each format: files, size, build time, rate of a raw read and of the reader, times to fetch and to find."""
    return pd.DataFrame(
        {
            "format": images["format"].replace(FORMATS),
            "files": images["files"],
            "disk, MB": images["bytes_allocated"] / 1e6,
            "disk / data": images["bytes_allocated"] / images["payload_bytes"],
            "build_s": images["build_s"],
            "raw read, MB/s": images["payload_bytes"] / images["raw_s"] / 1e6,
            "reader, MB/s": images["mb_per_s"],
            "subset, ms": 1e3 * images["subset_s"],
            "label, ms": 1e3 * images["find_s"],
        }
    )


def decoding(rows: pd.DataFrame) -> SimpleNamespace:
    """Milliseconds an image by decoder and size, speedups over Pillow, differences from its pixels."""
    table = pd.DataFrame({"decoder": rows["variant"].unique()})
    for (width, height), images in rows.groupby(["width", "height"], sort=False):
        size, images = f"{width:.0f}×{height:.0f}", images.set_index("variant").reindex(table["decoder"])
        table[f"{size}, ms"] = images["median_ms"].to_numpy()
        spread = images["p20_ms"].map("{:.3f}".format) + "–" + images["p80_ms"].map("{:.3f}".format)
        table[f"{size}, p20–p80"] = spread.to_numpy()
        pillow = images["median_ms"].get("Pillow", math.nan)
        table[f"{size}, speedup"] = (pillow / images["median_ms"]).to_numpy()
    apart = {name: of["mean_difference"].max() for name, of in rows.groupby(rows["scale"] > 1)}
    full, half = (Number(apart.get(scaled, math.nan), "levels", missing="decoders", decimals=1) for scaled in (0, 1))
    return SimpleNamespace(table=table, full_size_difference=full, half_size_difference=half)


def loader(rows: pd.DataFrame) -> SimpleNamespace:
    """Idle shares of the device, measured and predicted: by workers, and with other loaders."""
    rows = rows.assign(error=100 * (rows["idle_share"] - rows["predicted_idle_share"]))
    plain = (rows["prefetch"] == 2) & (rows["decode"] == "Pillow")
    table = rows.rename(columns={"error": "error, points", "decode": "decoder"})
    table["idle"] = rows["idle_share"].map("{:.0%}".format)
    table["predicted idle"] = rows["predicted_idle_share"].map("{:.0%}".format)
    ends = ["idle", "predicted idle", "error, points"]

    def idle(workers: int, prefetch: int = 2, decode: str = "Pillow") -> Number:
        return pick(rows, "idle_share", PERCENT, 0, step_ms=STEP_MS, workers=workers, prefetch=prefetch, decode=decode)

    return SimpleNamespace(
        lines={f"step of {step:.0f} ms": of.sort_values("workers") for step, of in rows[plain].groupby("step_ms")},
        simulated=table.loc[plain, ["step_ms", "workers", "samples_per_s", *ends, "wait_ms", "startup_s"]],
        others=table.loc[~plain, ["decoder", "step_ms", "workers", "prefetch", *ends]],
        no_workers=idle(0),
        two_workers=idle(2),
        simplejpeg=idle(2, decode="simplejpeg"),
        prefetched=idle(2, prefetch=8),
        rows=len(rows),
        median_error=Number(rows["error"].abs().median(), "points", decimals=1),
        trivial=derived(((rows["predicted_idle_share"] == 0) & (rows["idle_share"] == 0)).sum(), "counted", "", 0),
        fastest_sample=Number(rows.loc[rows["decode"] == "Pillow", "sample_ms"].min(), "ms", decimals=2),
        slowest_sample=Number(rows.loc[rows["decode"] == "Pillow", "sample_ms"].max(), "ms", decimals=2),
        largest_error=Number(rows["error"].abs().max(), "points", decimals=0),
    )


def metrics_cost(rows: pd.DataFrame) -> SimpleNamespace:
    """Milliseconds of each metric at a step, in the first and the last tenth of the epoch."""
    lines = dict(list(rows.groupby("variant", sort=False)))
    growth = pd.DataFrame([{"variant": variant} | _growth(line) for variant, line in lines.items()])
    headings = {"first": "first tenth, ms", "last": "last tenth, ms"}
    return SimpleNamespace(
        lines=lines,
        table=growth.rename(columns=headings),
        steps=int(rows["step"].max()),
        sklearn_first=pick(growth, "first", "ms", 1, variant="scikit-learn, each step"),
        sklearn_last=pick(growth, "last", "ms", 1, variant="scikit-learn, each step"),
        counts_last=pick(growth, "last", "ms", 2, variant="confusion matrix"),
    )


def _growth(line: pd.DataFrame) -> dict[str, float]:
    tenth, ms = max(len(line) // 10, 1), line["ms"].to_numpy()
    slope = np.polyfit(line["step"], 1e3 * ms, 1)[0] if len(line) > 1 else math.nan
    ends = {"first": np.median(ms[:tenth]), "last": np.median(ms[-tenth:])}
    return ends | {"growth, µs/step": slope, "epoch_s": line["until_s"].max()}


def forgetting(rows: pd.DataFrame) -> SimpleNamespace:
    """Accuracy lost without a share of the samples, means over seeds; `least`, `random`, `most` at `REMOVED`."""
    removed = rows[rows["share"] > 0]
    lost = removed.groupby(["budget", "share", "variant"], sort=False)["lost_points"].agg(["mean", "sem"])
    texts = [f"{mean:.2f} ± {error:.2f}" for mean, error in zip(lost["mean"], lost["sem"], strict=True)]
    table = lost.assign(text=texts)["text"].unstack("variant").reset_index().sort_values(["budget", "share"])
    by_epochs = removed[(removed["budget"] == "epochs") & (removed["share"] == REMOVED)]

    def points(variant: str) -> Number:
        return mean_of(by_epochs.loc[by_epochs["variant"] == variant, "lost_points"], "points", variant)

    return SimpleNamespace(
        table=table.assign(share=table["share"].map("{:.0%}".format)).rename(
            columns={"budget": "equal", "share": "removed"}
        ),
        seeds=int(rows["seed"].nunique()),
        unforgettable=Number(rows["unforgettable_share"].mean(), PERCENT, decimals=0),
        least=points("least forgotten"),
        random=points("random"),
        most=points("most forgotten"),
    )


def jit(rows: pd.DataFrame) -> SimpleNamespace:
    """Milliseconds a call by program, size and variant; at each program's largest size also numba's gain and cost."""
    programs = list(rows["program"].unique())
    largest = rows[rows["size"] == rows.groupby("program")["size"].transform("max")]
    ms = largest.pivot(index="program", columns="variant", values="median_ms").reindex(programs)
    numba = largest[largest["variant"] == "numba"].set_index("program").reindex(programs)
    table = pd.DataFrame({"iterations": largest.groupby("program")["size"].max().reindex(programs)})
    table = table.join(ms.add_suffix(", ms"))
    table["numba's speedup"] = numba["speedup"]
    table["compile, s"], table["break-even iterations"] = numba["compile_s"], numba["turns"]
    lines = {program: dict(list(of.sort_values("size").groupby("variant"))) for program, of in rows.groupby("program")}
    return SimpleNamespace(
        lines={program: lines[program] for program in programs}, table=table.rename_axis("program").reset_index()
    )
