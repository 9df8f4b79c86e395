"""Time and memory of each module of the two loops, forward and backward, and what its work must cost at least."""

from types import SimpleNamespace

import pandas as pd
import torch
from torch import nn

from ...book.table import Worth, table
from ...book.values import PERCENT, TIMES, Number, derived
from ...lab import Row, half_dtype, multiplies_half
from ...lab.ceilings import copy, matmul
from ...profiling.module_profiler import ModuleProfiler
from .layer_costs import CalledLayers
from .planted_faults import LOOPS, NAMES, PIPELINES, SIZES, by_variant, fixes_of, options, sized

MEASURED = ["forward_ms", "backward_ms", "activation_mib"]  # of each part of a model
# A product's size, and MiB of a copy
CEILINGS = {"small": (256, 16), "cpu": (2048, 256), "gpu": (4096, 1024), "full": (8192, 2048)}


@table(
    **{name: sized(size, LOOPS[2:] if size == "small" else LOOPS) for name, size in SIZES.items()},
    version=2,
    columns="module type calls forward_ms? backward_ms? total_ms self_ms? share activation_mib? "
    "peak_mib? gflop? moved_mib? lower_bound_ms?",
    worth=Worth(20, "time and memory of each module", cpu=3.4, gpu=4, big_gpu=7),
)
def modules(size: str, pipeline: str, variant: str) -> list[Row]:
    """Forward and backward time (medians over steps) and memory of every module, and what its work must cost at least.

    The lower bound is that of the matrix products at the measured rate, or of the bytes at the measured bandwidth,
    whichever is more; for all calls of a step, forward and backward.
    """
    profiled: list[tuple[ModuleProfiler, CalledLayers]] = []

    def profile_model(model: nn.Module) -> ModuleProfiler:
        profiled.append((ModuleProfiler(model, pipeline), CalledLayers(model, pipeline)))
        return profiled[-1][0]

    switched, fixes, steps = PIPELINES[pipeline], fixes_of(pipeline, variant, size), 5 if size == "small" else 14
    switched.run(fixes, steps=steps, validates=False, profile=profile_model, **options(switched, size, steps))
    ((profiler, layers),) = profiled
    measured, in_half = profiler.summary(median=True), "bf16" in fixes and multiplies_half()
    dtype = half_dtype() if in_half else torch.float32
    (_, tflops), (_, gb_per_s) = matmul(CEILINGS[size][0], dtype), copy(CEILINGS[size][1])
    bounds = layers.lower_bounds(dtype.itemsize, tflops, gb_per_s)
    names = ["module", "type", "calls", "forward_ms", "backward_ms", "total_ms", "self_ms", "share"]
    names += ["activation_mib", "peak_mib"]
    rows = measured[names].astype(object).where(measured[names].notna(), None).to_dict("records")
    return [row | bounds.get(row["module"], {}) for row in rows]


# Numbers

LEAST_SHARE = 0.03  # of a step: layers of less aren't held against their bounds
# Parts of a model, by the types of their modules or by their names.
PARTS = {
    "embedding": {"ReshapedPatches", "ConvPatches", "Embedding", "PositionalEncoding", "RecomputedPositions"},
    "attention": {"attention"},
    "attention's output": {"NonDynamicallyQuantizableLinear"},
    "softmax": {"Softmax"},
    "feed-forward": {"mlp", "linear1", "linear2"},
    "GELU": {"GELU"},
    "normalisation": {"LayerNorm"},
    "head": {"head"},
}
NESTED = ("model", "softmax", "GELU")  # parts that contain others, or lie within one


@modules.numbers()
def _(rows: pd.DataFrame) -> SimpleNamespace:
    """Forward and backward of a step by part of the model, and layers against their lower bounds."""
    parts = {key: _parts_of(step) for key, step in rows.groupby(["pipeline", "variant"], sort=False)}
    ratios, outside, kept = {}, {}, {}
    for key, times in parts.items():
        inside, beside = times.loc["model", ["forward_ms", "backward_ms"]], times["outside"].iloc[0]
        ratios[key] = derived(inside["backward_ms"] / inside["forward_ms"], "of the same steps", decimals=1)
        kept[key] = Number(times.loc["model", "activation_mib"], "MiB", missing="a warm-up step", decimals=1)
        outside[key] = Number(beside / (beside + inside.sum()), PERCENT, decimals=0)
    bounds = _against_bounds(rows)
    apart = bounds[bounds["layers"].isin(["GELU", "LayerNorm"])]
    gelu = apart[apart["layers"] == "GELU"].set_index("loop")["total_ms"].reindex(["slow", "fixed"])
    return SimpleNamespace(
        tables={name: _slow_and_fixed(parts, name) for name in NAMES},
        vit=by_variant(ratios, "vit", TIMES),
        gpt=by_variant(ratios, "gpt", TIMES),
        vit_kept=by_variant(kept, "vit", "MiB"),
        gpt_kept=by_variant(kept, "gpt", "MiB"),
        vit_outside=by_variant(outside, "vit", PERCENT),
        gpt_outside=by_variant(outside, "gpt", PERCENT),
        least_ratio=min(ratios.values(), key=float),
        largest_ratio=max(ratios.values(), key=float),
        bounds=bounds,
        least_above=derived(apart["slowdown against bound"].min(), "of the same steps", decimals=1),
        gelu_in_half=derived(gelu["fixed"] / gelu["slow"], "of the same steps"),
    )


def _parts_of(step: pd.DataFrame) -> pd.DataFrame:
    """Milliseconds of each part of a model, forward and backward; `outside` are those outside of the model."""
    called = step[step["calls"] > 0]
    names = called["module"].str.rpartition(".")[2]
    chosen = {"model": ~called["module"].str.contains(".", regex=False)}
    chosen |= {part: called["type"].isin(of) | names.isin(of) for part, of in PARTS.items()}
    times = {part: called.loc[of, MEASURED].sum() for part, of in chosen.items() if of.any()}
    rest = times["model"] - sum(of for part, of in times.items() if part not in NESTED)
    times["rest"] = rest.where(
        rest > 1e-3 * times["model"]
    )  # medians of parts don't add up to the model's: what is left may be lost
    return pd.DataFrame(times).T.assign(outside=step.loc[step["module"] == "outside", "total_ms"].sum())


def _slow_and_fixed(parts: dict[tuple[str, str], pd.DataFrame], pipeline: str) -> pd.DataFrame:
    columns = []
    for variant in ("slow", "fixed"):
        times = parts.get((pipeline, variant), pd.DataFrame(columns=MEASURED))
        times = times[MEASURED].assign(ratio=times["backward_ms"] / times["forward_ms"])
        columns.append(times.add_prefix(f"{variant} "))
    return columns[0].join(columns[1]).rename_axis("part").reset_index()


def _against_bounds(rows: pd.DataFrame) -> pd.DataFrame:
    """Layers by type, of at least `LEAST_SHARE` of a step: their time against their operations' or their bytes'."""
    bounded = rows.dropna(subset="lower_bound_ms").replace({"type": {"NonDynamicallyQuantizableLinear": "Linear"}})
    by = ["pipeline", "variant"]
    sums = bounded.groupby([*by, "type"], sort=False)[["lower_bound_ms", "total_ms"]].sum().reset_index()
    sums = sums[sums["total_ms"] > LEAST_SHARE * sums.groupby(by)["total_ms"].transform("sum")]
    sums = sums.assign(slowdown=sums["total_ms"] / sums["lower_bound_ms"], pipeline=sums["pipeline"].map(NAMES))
    names = {"pipeline": "model", "variant": "loop", "type": "layers", "slowdown": "slowdown against bound"}
    return sums.sort_values(by, ascending=False, kind="stable").rename(columns=names)
