"""One SwiGLU layer by each variant: time against the bound of its products, bytes saved, peak."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from ...book.table import FAILED, Worth, table
from ...book.values import (
    PERCENT,
    TIMES,
    Number,
    derived,
    lacking,
    marked,
    number,
    of_kernels,
    of_rounds,
    over,
    pick,
    quiet,
)
from ...lab import STATUS, Row, compare, device, missing_because
from ...lab.memory import OUT_OF_MEMORY, free_memory, is_out_of_memory
from ...lab.timing import queue_far_ahead
from ...rush.rates import recorded_rates
from ...swiglu import SwigluMLP
from .ceilings import ceilings
from .derived_costs import INTERMEDIATE, WIDTH
from .derived_costs import derived as derived_cost
from .layers import BUDGET, COMPILED, NEEDS, OURS, PLAIN, VARIANTS, check_variant, train_step
from .sizes import NAMES, TIME_COLUMNS, shapes

BASELINES = {"ratio_to_plain": PLAIN, "ratio_to_compiled": COMPILED}
HALF = ("bfloat16", "float16")
LAYER = "batch seq_len hidden_dim intermediate_size dtype"


@table(
    small=shapes(LAYER, (2, 64, 64, 256, "float32")),
    cpu=shapes(LAYER, (1, 1024, 2048, 8192, "bfloat16"), (1, 512, 2048, 8192, "float32")),
    gpu=shapes(
        LAYER,
        *((4, 1024, 1024, 4096, dtype) for dtype in ("float16", "bfloat16")),
        *((4, 1024, 2048, 8192, dtype) for dtype in ("float16", "bfloat16")),  # Llama-3.2-1B
    ),
    big_gpu=shapes(
        LAYER,
        (4, 1024, 1024, 4096, "bfloat16"),
        (4, 2048, 2048, 8192, "bfloat16"),  # Llama-3.2-1B
        (4, 2048, 4096, 14336, "bfloat16"),  # Llama-3.1-8B
    ),
    columns=(
        *("variant", "error", "saved_mib", "saved_ratio", "peak_added_mib", *TIME_COLUMNS),
        *(f"{ratio}{spread}?" for ratio in BASELINES for spread in ("", "_p20", "_p80")),
    ),
    version=2,
    worth=Worth(40, "the levels beside torch.compile, checkpoint and Liger", cpu=60.1, gpu=8, big_gpu=24),
)
def peers(batch: int, seq_len: int, hidden_dim: int, intermediate_size: int, dtype: str) -> list[Row]:
    """One layer, forward + backward: others beside each level, from one interleaved run. The host is ahead of a GPU."""
    factory = {"device": device(), "dtype": getattr(torch, dtype)}
    plain = SwigluMLP(hidden_dim, intermediate_size, **factory)
    x = torch.randn(batch, seq_len, hidden_dim, **factory, requires_grad=True)
    l = torch.randn(batch, seq_len, hidden_dim, **factory)
    steps: dict[str, Callable[[], list[Tensor]]] = {}
    rows: dict[str, Row] = {}
    for name, build in VARIANTS.items():
        rows[name] = {"variant": name}
        if missing := missing_because(*NEEDS.get(name, ())):
            rows[name][STATUS] = missing
            continue
        try:
            forward, owner = build(plain)
            rows[name] |= check_variant(name, forward, owner, plain, x, l)
        except Exception as error:  # a peer that fails must not cost the others their rows
            if name.startswith(OURS) and not is_out_of_memory(error):
                raise
            failure = f"{FAILED}{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"[:200]
            rows[name][STATUS] = OUT_OF_MEMORY if is_out_of_memory(error) else failure
            continue
        finally:
            free_memory()
        steps[name] = train_step(forward, owner, x, l)
    rounds = 20 if device().type == "cuda" else 10
    timed = compare(steps, check=False, warmup=2, rounds=rounds, before=queue_far_ahead)
    for name in steps:
        rows[name] |= timed.timing(name).row()
        for column, baseline in BASELINES.items():
            if baseline in steps:
                spread = (column, f"{column}_p20", f"{column}_p80")
                rows[name] |= dict(zip(spread, timed.ratio(name, baseline), strict=True))
        rows[name]["saved_ratio"] = rows[name]["saved_mib"] / rows[PLAIN]["saved_mib"]
    return list(rows.values())


# Numbers

PRODUCTS = {BUDGET: 10}  # by what it saves, the input and one of both projections: the other is computed again


@peers.numbers(needs=[ceilings])
def _(rows: pd.DataFrame, ceilings: pd.DataFrame) -> SimpleNamespace:
    """One layer by each variant against the bound of its matrix products, and the levels' ratios."""
    rates = recorded_rates(ceilings)
    known = {name: derived_cost(name, WIDTH, INTERMEDIATE, 2) for name in rows["variant"].unique()}
    products = rows["variant"].map({n: cost.products if cost else PRODUCTS.get(n, 9) for n, cost in known.items()})
    tokens = rows["batch"] * rows["seq_len"]
    operations = 2 * tokens * rows["hidden_dim"] * rows["intermediate_size"]
    rows = rows.assign(tokens=tokens, bound_ms=products * operations / rows["dtype"].map(rates) / 1e9)
    level2 = rows[rows["variant"] == f"{OURS}2"]
    half = next((name for name in HALF if (rows["dtype"] == name).any()), HALF[0])
    shown = rows[rows["dtype"] == (half if (rows["dtype"] == half).any() else "float32")]
    return SimpleNamespace(
        table=_by_width(shown),
        widths=", ".join(map(str, shown["hidden_dim"].unique())),
        tokens=" and ".join(f"{count} tokens" for count in shown["tokens"].unique()),
        half=_levels(rows, half),
        single=_levels(rows, "float32"),
        level2_slowest=_slowest(rows, level2),
        level2_bytes=derived(1 / level2["saved_ratio"].max(), "counted bytes", decimals=1),
        level2_stored=Number(level2["saved_ratio"].max(), PERCENT, missing="level 2", decimals=0),
        predicted=derived(11 / 9, "eleven products for nine"),
    )


def _slowest(rows: pd.DataFrame, level2: pd.DataFrame) -> Number:
    """Of all shapes the largest ratio to the compiled module, of those where neither is host-bound, and that were
    measured in quiet, if there are any."""
    known = quiet(level2.dropna(subset="ratio_to_compiled")).to_dict("records")
    ratios = [ratio for row in known if (ratio := _ratio(rows, row, "ratio_to_compiled")).measured]
    return max(ratios, key=float, default=lacking("level 2 beside the compiled module", TIMES))


def _ratio(rows: pd.DataFrame, row: Any, column: str) -> Number:
    """A variant's ratio to a baseline; not measured if one of them is host-bound."""
    same = (rows["dtype"] == row["dtype"]) & (rows["hidden_dim"] == row["hidden_dim"])
    baseline = rows[same & (rows["variant"] == BASELINES[column])]
    return of_kernels(of_rounds(row, column, 2), f"{row['variant']}", row, *baseline.to_dict("records"))


def _by_width(rows: pd.DataFrame) -> pd.DataFrame:
    """Variants below each other, widths beside each other; of widths but `WIDTH` the times alone."""
    parts = []
    for width, of in rows.set_index("variant").groupby("hidden_dim"):
        spread = [
            f"{number(marked(row['median_ms'], row))} ({number(row['p20_ms'])}–{number(row['p80_ms'])})"
            for row in of.to_dict("records")
        ]
        numbers = {f"ms at d = {width} (p20–p80)": spread}
        if width == WIDTH:
            numbers |= {"bound, ms": of["bound_ms"], "saved, %": 100 * of["saved_ratio"]}
            numbers |= {"peak, MiB": of["peak_added_mib"]}
        parts.append(pd.DataFrame(numbers, index=of.index))
    return pd.concat(parts, axis=1).reset_index()


def _levels(rows: pd.DataFrame, dtype: str) -> SimpleNamespace:
    """Ratios of times and shares of bytes at `WIDTH`, in one type."""

    def ratio(variant: str, to: str) -> Number:
        chosen = rows[(rows["dtype"] == dtype) & (rows["hidden_dim"] == WIDTH) & (rows["variant"] == variant)]
        return _ratio(rows, chosen.iloc[0], f"ratio_to_{to}") if len(chosen) else lacking(variant, TIMES)

    one, two, three = (f"{OURS}{level}" for level in (1, 2, 3))
    stored = partial(pick, rows, "saved_ratio", PERCENT, 0, dtype=dtype, hidden_dim=WIDTH)
    peak = partial(pick, rows, "peak_added_mib", dtype=dtype, hidden_dim=WIDTH)
    peaks = {name: over(peak(variant=name), peak(variant=BASELINES["ratio_to_compiled"])) for name in (two, BUDGET)}
    return SimpleNamespace(
        dtype=NAMES[dtype],
        level1_to_level2=over(ratio(one, "plain"), ratio(two, "plain")),
        level2=ratio(two, "compiled"),
        level2_to_plain=ratio(two, "plain"),
        level3=ratio(three, "compiled"),
        budget=ratio(BUDGET, "compiled"),
        budget_to_level3=over(ratio(BUDGET, "compiled"), ratio(three, "compiled")),
        stored2=stored(variant=two),
        stored3=stored(variant=three),
        stored_budget=stored(variant=BUDGET),
        peak2=replace(peaks[two], derivation="allocated bytes"),
        peak_budget=replace(peaks[BUDGET], derivation="allocated bytes"),
    )
