"""The limits of a machine: rates of products and copies, and the time of a launch."""

from collections.abc import Sequence
from types import SimpleNamespace

import pandas as pd

from ...book.table import Worth, table
from ...book.values import over, pick, timed
from ...lab import Row, missing_because
from ...lab.ceilings import copy, launch, product_rate, to_device
from .sizes import NAMES, TIME_COLUMNS


def _limits(dtypes: Sequence[str], sizes: Sequence[int], copies: Sequence[int]) -> list[Row]:
    products = [{"ceiling": "matmul", "dtype": dtype, "size": size} for dtype in dtypes for size in sizes]
    return products + [{"ceiling": "copy", "dtype": "", "size": mib} for mib in copies]


PINNED, PAGEABLE, LAUNCH, TF32 = "copy from pinned memory", "copy from pageable memory", "launch", "tf32"
FLOAT8 = "float8_e4m3fn"
IN_PRODUCTS = ["float32", TF32, "bfloat16", "float16", FLOAT8]
BY_HOST = [{"ceiling": name, "dtype": "", "size": 512} for name in (PINNED, PAGEABLE, LAUNCH)]


def _missing(dtype: str, **_: object) -> str:
    needs = {TF32: ("CUDA", "compute capability 8.0"), FLOAT8: ("CUDA", "compute capability 8.9")}
    return missing_because(*needs.get(dtype, ()))


@table(
    small=_limits(["float32"], [512], [64]),
    cpu=_limits(["bfloat16", "float32"], [1024, 2048, 4096], [512]),
    gpu=_limits(IN_PRODUCTS, [2048, 4096], [1024]) + BY_HOST,
    big_gpu=_limits(IN_PRODUCTS, [4096, 8192], [4096]) + BY_HOST,
    missing=_missing,
    version=2,
    columns=(*TIME_COLUMNS, "tflops?", "p20_tflops?", "library?", "gb_per_s?"),
    worth=Worth(20, "the limits that results are compared with", cpu=2.2, gpu=2, big_gpu=0.8),
)
def ceilings(ceiling: str, dtype: str, size: int) -> Row:
    """The limits of this machine: products of size × size, copies of `size` MiB, a launch among `size` of them."""
    if ceiling == "matmul":
        product = product_rate(dtype, size)
        tflops = {"tflops": product.tflops, "p20_tflops": product.p20_tflops, "library": product.library}
        return product.timing.row() | tflops
    if ceiling == LAUNCH:
        return launch(size).row()
    timing, rate = copy(size) if ceiling == "copy" else to_device(size, pinned=ceiling == PINNED)
    return timing.row() | {"gb_per_s": rate}


@ceilings.numbers()
def _(rows: pd.DataFrame) -> SimpleNamespace:
    """The rates of the largest product of each type and of large copies, and the time of a launch."""
    names = ["operation", "dtype", "size", "median_ms", "p20_ms", "p80_ms", "n", "tflops", "gb_per_s"]
    dtypes = NAMES | {"tf32": "TF32", "float8_e4m3fn": "float8"}
    largest = rows[rows["size"] == rows.groupby(["ceiling", "dtype"], dropna=False)["size"].transform("max")]
    shown = largest.rename(columns={"ceiling": "operation"}).replace({"dtype": dtypes})
    pinned, pageable = (pick(rows, "median_ms", ceiling=f"copy from {kind} memory") for kind in ("pinned", "pageable"))
    return SimpleNamespace(table=timed(shown, names), pinned=over(pageable, pinned))
