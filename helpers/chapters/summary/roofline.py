"""The roofline of a machine, with the layers of chapter 3's models on it."""

from types import SimpleNamespace

import pandas as pd

from ...book.table import numbers_of
from ...book.values import Number
from ...rush.rates import recorded_rates
from ..profiling.modules import modules
from ..swiglu.ceilings import ceilings

SAME_RATE = 0.1  # types whose rates differ by less share a line


@numbers_of([ceilings, modules])
def roofline(ceilings: pd.DataFrame, layers: pd.DataFrame) -> SimpleNamespace:
    """The machine's limits, and those layers of chapter 3's models that compute matrix products, by FLOP per byte."""
    bandwidth = ceilings["gb_per_s"].max()
    peaks = pd.Series(recorded_rates(ceilings)).sort_values()
    apart = (peaks.pct_change() > SAME_RATE).cumsum()  # types of nearly one rate share a line
    peaks = pd.Series({" and ".join(of.index): of.max() for _, of in peaks.groupby(apart)})
    points = layers[(layers["total_ms"] > 0) & (layers["gflop"] > 0)]
    points = points.groupby(["variant", "type"])[["gflop", "moved_mib", "total_ms"]].sum().reset_index()
    points["intensity"] = points["gflop"] * 1e9 / (points["moved_mib"] * 2**20)
    balances = ", ".join(f"{tflops * 1e3 / bandwidth:.0f} in {dtype}" for dtype, tflops in peaks.items())
    return SimpleNamespace(
        bandwidth=Number(bandwidth, "GB/s", decimals=0),
        peaks=peaks,
        points=points,
        balances=balances,
        least=Number(points["intensity"].min(), "FLOP per byte", decimals=0, missing="matrix products"),
        fastest=Number((points["gflop"] / points["total_ms"]).max(), "TFLOP/s", missing="matrix products"),
    )
