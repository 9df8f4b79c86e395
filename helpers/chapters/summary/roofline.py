"""The roofline of a machine, and on it the layers of chapter 3's models, or kernels that a GPU was timed on."""

from types import SimpleNamespace

import pandas as pd

from ...book.table import numbers_of
from ...book.values import PERCENT, Number
from ...rush.optimizers import LEAST_BYTES
from ...rush.rates import recorded_rates
from ..profiling.modules import modules
from ..rush.adam import adam
from ..rush.norms import norms
from ..swiglu.ceilings import ceilings

# FLOPs an element, counted in the formulas: a norm forward (square, sum, two products) and backward, a step of AdamW
NORM_FLOPS, ADAM_FLOPS = 4 + 8, 14
NORM_BYTES = 5 * 2  # an element in bf16: x and y forward, x and both gradients backward
SAME_RATE = 0.02  # types whose rates differ by less share a line


@numbers_of([ceilings, modules])
def roofline(ceilings: pd.DataFrame, layers: pd.DataFrame) -> SimpleNamespace:
    """The machine's limits, and those layers of chapter 3's models that compute matrix products, by FLOP per byte."""
    bandwidth, peaks, balances = limits(ceilings)
    points = layers[(layers["total_ms"] > 0) & (layers["gflop"] > 0)]
    points = points.groupby(["variant", "type"])[["gflop", "moved_mib", "total_ms"]].sum().reset_index()
    points["intensity"] = points["gflop"] * 1e9 / (points["moved_mib"] * 2**20)
    points["tflops"] = points["gflop"] / points["total_ms"]
    return SimpleNamespace(
        bandwidth=Number(bandwidth, "GB/s", decimals=0),
        peaks=peaks,
        points=points,
        balances=balances,
        least=Number(points["intensity"].min(), "FLOP per byte", decimals=0, missing="matrix products"),
        fastest=Number((points["gflop"] / points["total_ms"]).max(), "TFLOP/s", missing="matrix products"),
    )


@numbers_of([ceilings, norms, adam])
def kernels(ceilings: pd.DataFrame, norms: pd.DataFrame, adam: pd.DataFrame) -> SimpleNamespace:
    """A GPU's limits, and its products, norms and steps of AdamW, by FLOP per byte that they at least move."""
    bandwidth, peaks, balances = limits(ceilings)
    products = ceilings.dropna(subset="tflops")
    element = products["dtype"].map({"float32": 4, "tf32": 4, "float8_e4m3fn": 1}).fillna(2)
    points = [
        pd.DataFrame(
            {
                "what": "matrix products",
                "intensity": 2 * products["size"] / (3 * element),
                "tflops": products["tflops"],
                "fused": True,
            }
        ),
        _bound_by_memory(norms, "norms", NORM_FLOPS / NORM_BYTES, bandwidth),
        _bound_by_memory(adam, "AdamW", ADAM_FLOPS / LEAST_BYTES, bandwidth),
    ]
    shares = {name: norms.loc[norms["variant"] == name, "share_of_copy"] for name in ("torch operations", "triton")}
    return SimpleNamespace(
        bandwidth=Number(bandwidth, "GB/s", decimals=0),
        peaks=peaks,
        balances=balances,
        points=pd.concat(points, ignore_index=True),
        plain_norm=Number(
            shares["torch operations"].median(), PERCENT, missing="norms of torch operations", decimals=0
        ),
        fused_norm=Number(shares["triton"].median(), PERCENT, missing="fused norms", decimals=0),
    )


def limits(ceilings: pd.DataFrame) -> tuple[float, pd.Series, str]:
    """A copy's GB/s, the rate of products by type, and in words the FLOP per byte from which each is the limit."""
    bandwidth = ceilings["gb_per_s"].max()
    peaks = pd.Series(recorded_rates(ceilings)).sort_values()
    apart = (peaks.pct_change() > SAME_RATE).cumsum()  # types of nearly one rate share a line
    peaks = pd.Series({" and ".join(of.index): of.max() for _, of in peaks.groupby(apart)})
    return bandwidth, peaks, ", ".join(f"{rate * 1e3 / bandwidth:.0f} in {dtype}" for dtype, rate in peaks.items())


def _bound_by_memory(rows: pd.DataFrame, what: str, intensity: float, bandwidth: float) -> pd.DataFrame:
    rows = rows.dropna(subset="share_of_copy")
    apart = rows["variant"].isin(("torch operations", "for-loop", "foreach"))
    tflops = rows["share_of_copy"] * bandwidth * intensity / 1e3
    return pd.DataFrame({"what": what, "intensity": intensity, "tflops": tflops, "fused": ~apart})
