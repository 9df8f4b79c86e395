"""Chapter 7: what each capture gets wrong, what fusion saves, and the speedups of inference and training."""

import math
from types import SimpleNamespace

import pandas as pd

from ..compilers.backends import ONE_THREAD, ONNX, ONNX_ONE_THREAD, ONNX_UNFUSED
from ..compilers.semantics import BREAKS, OUTCOMES, SILENT, WARNED
from ..experiments.compilers.workloads import BERT_BASE, RESNET_18
from ..lab.records.values import (
    PERCENT,
    TIMES,
    Number,
    derived,
    lacking,
    marked,
    number,
    of_kernels,
    over,
    speedup,
    timed,
)

HEADS = {name: name for name in OUTCOMES} | {BREAKS: "graph break", WARNED: "wrong, warned", SILENT: "wrong, silent"}
BY_HAND = ("by hand", "foreach", "fused", "one product")
SAME = 1.03  # a smaller speedup counts as no difference


def semantics(rows: pd.DataFrame) -> SimpleNamespace:
    """How many functions each capture gets right, refuses or gets wrong, and which ones without a warning."""
    silent = rows[rows["outcome"] == SILENT].groupby("variant")["case"].agg(", ".join)
    outcomes = rows.groupby(["variant", "outcome"], sort=False).size().unstack(fill_value=0)
    outcomes = outcomes.reindex(columns=list(OUTCOMES), fill_value=0).rename(columns=HEADS)
    outcomes["silently wrong functions"] = silent

    def silently_wrong(variant: str) -> Number:
        if variant not in outcomes.index:
            return lacking(f"outcomes of {variant}")
        return derived(outcomes.loc[variant, "wrong, silent"], "counted", "", 0)

    return SimpleNamespace(
        outcomes=outcomes.rename_axis("capture").reset_index(),
        functions=derived(rows["case"].nunique(), "counted", "", 0),
        trace=silently_wrong("torch.jit.trace"),
        script=silently_wrong("torch.jit.script"),
        export=silently_wrong("torch.export"),
        dynamo=silently_wrong("Dynamo"),
        inductor=silently_wrong("torch.compile"),
    )


def fusion(rows: pd.DataFrame) -> SimpleNamespace:
    """Kernels, bytes against the lower bound and time of each case at its largest size: eager, by hand, compiled.

    A speedup whose time or whose eager time is host-bound is that of no kernel, and not measured.
    """
    large = rows[rows["size"] == rows.groupby("case")["size"].transform("max")]
    eager = {row["case"]: row for row in large[large["variant"] == "eager"].to_dict("records")}
    labels = dict.fromkeys(BY_HAND, "by hand or library") | {"eager": "eager", "torch.compile": "torch.compile"}
    large = large.assign(label=large["variant"].map(labels)).dropna(subset="label")
    fastest = large.loc[large.groupby(["case", "label"], sort=False)["median_ms"].idxmin()]
    fastest = fastest.assign(
        bytes=fastest["bytes_moved"] / fastest["bytes_least"],
        speedup=[
            of_kernels(speedup(row, 2), f"the speedup of {row['case']}", row, eager.get(row["case"], {}))
            for row in fastest.to_dict("records")
        ],
    )
    compiled = fastest[fastest["label"] == "torch.compile"].set_index("case").sort_values("ratio")
    chain = _at(compiled["speedup"], "pointwise chain")
    compiled = compiled.loc[[gain.measured for gain in compiled["speedup"]]]
    eager_bytes = fastest[fastest["label"] == "eager"].set_index("case")["bytes_moved"]
    compiled = compiled.assign(share=compiled["bytes_moved"] / eager_bytes.reindex(compiled.index))
    columns = ["case", "variant", "kernels", "bytes", "median_ms", "p20_ms", "p80_ms", "baseline_ms", "speedup"]
    heads = {"bytes": "bytes / bound", "baseline_ms": "eager, ms"}
    return SimpleNamespace(
        bars=fastest.loc[[gain.measured for gain in fastest["speedup"]]],
        times=timed(fastest[fastest["label"] != "eager"], columns).rename(columns=heads),
        millions=derived(large["size"].max() / 2**20, "a setting", "", 0),
        cases=derived(len(compiled), "counted", "", 0),
        faster=derived((compiled["ratio"] < 1 / SAME).sum(), "counted", "", 0),
        median=_median(compiled["speedup"]),
        largest=_at_place(compiled, 0),
        smallest=_at_place(compiled, -1),
        chain=chain,
        chain_predicted=derived(9 / 3, "nine large tensors read or written, and three", decimals=0),
    )


def _at_place(compiled: pd.DataFrame, place: int) -> SimpleNamespace:
    """The speedup of a case by torch.compile, and the bytes that it moves, as a share of eager's."""
    if not len(compiled):
        absent = lacking("fusion by torch.compile", TIMES)
        return SimpleNamespace(speedup=absent, case="", bytes=absent)
    row = compiled.iloc[place]
    share = derived(row["share"], "counted bytes", PERCENT, 0)
    return SimpleNamespace(speedup=row["speedup"], case=row.name, bytes=share)


def latency(rows: pd.DataFrame) -> SimpleNamespace:
    """Inference in fp32: a table for each model, and each backend's mean speedup over the batch sizes.

    Of ONNX Runtime's for ResNet-18 `fused` is what fusion adds, and `threaded` what more than one thread adds beyond
    eager's: the rest is that of its products.
    """
    rows = _named(rows[(rows["precision"] == "fp32") & rows["batch"].isin([1, 8])])
    others = rows[rows["backend"] != "eager"]
    by_backend = others.assign(number=[speedup(row, 2) for _, row in others.iterrows()]).groupby(["model", "backend"])
    means = by_backend["number"].agg(_mean)[by_backend.size() == by_backend.size().max()]
    onnx = _at(means, (RESNET_18, ONNX))
    onnx_alone, alone = (_at(means, (RESNET_18, name)) for name in (ONNX_ONE_THREAD, ONE_THREAD))
    best = max(means.items(), key=lambda mean: float(mean[1]), default=(("", ""), lacking("inference", TIMES)))
    served = [mean for (_, backend), mean in means.items() if backend in (ONNX, "torch.compile")]
    return SimpleNamespace(
        tables={model: _by_batch(of_model) for model, of_model in rows.groupby("model", sort=False)},
        resnet_onnx=onnx,
        fused=over(onnx, _at(means, (RESNET_18, ONNX_UNFUSED))),
        threaded=over(onnx, over(onnx_alone, alone)),
        resnet_compile=_at(means, (RESNET_18, "torch.compile")),
        bert_onnx=_at(means, (BERT_BASE, ONNX)),
        bert_openvino=_at(means, (BERT_BASE, "OpenVINO")),
        bert_compile=_at(means, (BERT_BASE, "torch.compile")),
        best=best[1],
        best_model=best[0][0].partition(",")[0],
        best_backend=best[0][1],
        served=max(served, key=float, default=lacking("inference by ONNX Runtime or torch.compile", TIMES)),
    )


def _by_batch(rows: pd.DataFrame) -> pd.DataFrame:
    """A row for each backend: at each batch its latency and its speedup with the spread, and the time to build it."""
    backends = list(dict.fromkeys(rows["backend"]))
    columns = {"backend": backends}
    for batch, of_batch in rows.groupby("batch"):
        of_batch = of_batch.set_index("backend").reindex(backends)
        columns[f"batch {batch}, ms"] = [marked(row["median_ms"], row) for row in of_batch.to_dict("records")]
        gains = {name: speedup(row, 2) for name, row in of_batch.iterrows() if name != "eager"}
        columns[f"batch {batch}, speedup"] = list(map(gains.get, backends))
        columns[f"batch {batch}, p20–p80"] = _spread(of_batch, "speedup_p20", "speedup_p80", ".2f").to_numpy()
    columns["build, s"] = rows.drop_duplicates("backend")["build_s"].to_numpy()
    return pd.DataFrame(columns)


def training(rows: pd.DataFrame) -> SimpleNamespace:
    """Training steps against eager ones; a speedup below `SAME` has no break-even."""
    others = _named(rows[rows["backend"] != "eager"])
    others = others.assign(
        spread=_spread(others, "p20_ms", "p80_ms", ".0f"),
        break_even_steps=others["break_even_steps"].where(others["speedup"] > SAME),
    )
    columns = ["model", "batch", "precision", "backend", "median_ms", "spread", "baseline_ms", "speedup", "build_s"]
    heads = {"median_ms": "median, ms", "spread": "p20–p80", "baseline_ms": "eager, ms", "build_s": "build, s"}
    heads |= {"break_even_steps": "break-even steps"}
    compiled = others[others["backend"].str.startswith("torch.compile")].sort_values("speedup")
    absent = lacking("training by torch.compile", TIMES)
    speedups = [speedup(row, 2) for _, row in compiled.iterrows()] or [absent]
    steps = compiled["break_even_steps"].iloc[-1] if len(compiled) else float("nan")
    return SimpleNamespace(
        steps=timed(others, [*columns, "break_even_steps"]).rename(columns=heads),
        compiled=dict(zip(compiled["model"], speedups, strict=False)),
        least=speedups[0],
        most=speedups[-1],
        most_model=compiled["model"].iloc[-1].partition(",")[0] if len(compiled) else "",
        most_break_even=derived(steps, "build time over time gained", "", 0) if steps == steps else absent,
        no_difference=derived(SAME, "a setting"),
    )


def _mean(speedups: pd.Series) -> Number:
    """Their geometric mean; its interval is the mean of theirs, which is wider than one of independent errors."""
    mean, low, high = (
        math.exp(sum(math.log(getattr(s, end) or math.nan) for s in speedups) / len(speedups))
        for end in ("value", "low", "high")
    )
    ends = (low, high) if low == low else (None, None)
    return Number(mean, TIMES, *ends, sum(s.n for s in speedups), decimals=2)


def _median(speedups: pd.Series) -> Number:
    if not len(speedups):
        return lacking("fusion by torch.compile", TIMES)
    return derived(speedups.map(float).median(), "median of the cases", decimals=2)


def _at(numbers: pd.Series, key: str | tuple[str, str]) -> Number:
    return numbers[key] if key in numbers.index else lacking(" of ".join([key] if isinstance(key, str) else key), TIMES)


def _named(rows: pd.DataFrame) -> pd.DataFrame:
    """With torch.compile's modes named as such."""
    return rows.assign(backend=rows["backend"].str.replace("^compile", "torch.compile", regex=True))


def _spread(rows: pd.DataFrame, low: str, high: str, form: str) -> pd.Series:
    ends = zip(rows[low], rows[high], strict=True)
    return pd.Series([number(None) if a != a else f"{a:{form}}–{b:{form}}" for a, b in ends], rows.index)
