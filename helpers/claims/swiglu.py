"""Chapter 4: what each level of saving costs in time, bytes and accuracy, measured and derived."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pandas as pd

from ..experiments.swiglu import BASELINES, GRADIENTS, derived_costs
from ..experiments.swiglu.layer_variants import BUDGET, OURS, SAVES
from ..lab.memory import GIB
from ..lab.records.values import (
    NOISY,
    PERCENT,
    TIMES,
    Number,
    derived,
    is_noisy,
    lacking,
    marked,
    mean_of,
    number,
    of_kernels,
    of_rounds,
    over,
    pick,
    quiet,
    timed,
)
from ..rush.rates import recorded_rates

NAMES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
HALF = ("bfloat16", "float16")
WIDTH, INTERMEDIATE = 2048, 8192  # Llama-3.2-1B's
LEVEL = "checkpoint_level"
SHAPE = ["batch", "seq_len", "hidden_dim", "num_layers", "intermediate_size"]
GROWING = {"seq_len": "sequence length", "hidden_dim": "width d, I = 4d", "num_layers": "layers"}

PRINTED = pd.DataFrame(  # in the task: peaks of levels 0 and 1 in GiB, backward in seconds
    [
        (16, 128, 2048, 2, 0.305, 0.258, 0.0093, 0.0120),
        (32, 128, 2048, 2, 0.535, 0.442, 0.018, 0.023),
        (8, 512, 4096, 3, 1.469, 1.094, 0.092, 0.119),
        (16, 512, 4096, 3, 2.594, 1.844, 0.180, 0.233),
        (4, 1024, 16384, 5, 14.391, 11.391, 2.016, 2.668),
    ],
    columns=["batch", "sequence", "I", "layers", "peak_0", "peak_1", "backward_0", "backward_1"],
)


def costs() -> pd.DataFrame:
    """Bytes a token and matrix products of each variant whose cost is known without measuring, in 16 bits."""
    known = {name: derived_costs.derived(name, WIDTH, INTERMEDIATE, 2) for name in SAVES}
    return pd.DataFrame(
        {
            "variant": name,
            "saves": SAVES[name],
            "saved, KiB/token": cost.saved_per_token / 1024,
            "share of plain module": cost.saved_ratio,
            "matrix products": cost.products,
        }
        for name, cost in known.items()
    )


def printed() -> SimpleNamespace:
    """The task's own table: level 1 against level 0, and the reduction that its allocations give.

    Level 0 holds three tensors of T·I in fp32 for each of L layers when backward starts; level 1 holds the three of the
    layer that it is computing again, and none for the other L − 1.
    """
    table = PRINTED[["batch", "sequence", "I", "layers"]].assign(reduction_gib=PRINTED["peak_0"] - PRINTED["peak_1"])
    tensors = 3 * (table["layers"] - 1)
    table["derived_gib"] = tensors * table["batch"] * table["sequence"] * table["I"] * 4 / GIB
    table["share of peak"] = table["reduction_gib"] / PRINTED["peak_0"]
    table["backward longer by"] = PRINTED["backward_1"] / PRINTED["backward_0"] - 1
    return SimpleNamespace(
        table=table, lower=_range(table["share of peak"]), longer=_range(table["backward longer by"])
    )


def ceilings(rows: pd.DataFrame) -> SimpleNamespace:
    """The rates of large products and copies."""
    names = ["operation", "dtype", "size", "median_ms", "p20_ms", "p80_ms", "n", "tflops", "gb_per_s"]
    dtypes = NAMES | {"tf32": "TF32", "float8_e4m3fn": "float8"}
    return SimpleNamespace(table=timed(rows.rename(columns={"ceiling": "operation"}).replace({"dtype": dtypes}), names))


def sweep(rows: pd.DataFrame) -> SimpleNamespace:
    """Steps of stacks in fp32: each shape at each level, and how far the levels lie from level 0."""
    task = rows[rows["dtype"] == "float32"]
    lines = []
    for (batch, length, hidden, layers, intermediate), of_shape in task.groupby(SHAPE, sort=False):
        base = of_shape.loc[of_shape[LEVEL] == 0, "peak_gib"].max()
        for row in of_shape.sort_values(LEVEL).to_dict("records"):
            level = int(row[LEVEL])
            shape = (batch * length, hidden, intermediate, layers, 4)
            saving = derived_costs.peak_bytes(0, *shape) - derived_costs.peak_bytes(level, *shape)
            line = {"batch": batch, "sequence": length, "d": hidden, "layers": layers, "level": level}
            line |= {"forward, s": marked(row["forward_s"], row), "backward, s": marked(row["backward_s"], row)}
            line["peak, GiB"] = row["peak_gib"]
            less = {"reduction, GiB": base - row["peak_gib"], "derived, GiB": saving / GIB}
            lines.append(line | (less if level else {}))
    by_level = {level: task[task[LEVEL] == level].set_index(SHAPE) for level in (0, 1, 2)}
    return SimpleNamespace(
        table=pd.DataFrame(lines),
        level1=_against(by_level[0], by_level[1]),
        level2=_against(by_level[0], by_level[2]),
        predicted=derived(8 / 6 - 1, "eight products for six", PERCENT, 0),
    )


def _against(base: pd.DataFrame, level: pd.DataFrame) -> SimpleNamespace:
    return SimpleNamespace(
        lower=_range(1 - level["peak_gib"] / base["peak_gib"]),
        longer=_range(level["backward_s"] / base["backward_s"] - 1),
    )


def _range(shares: pd.Series) -> SimpleNamespace:
    """The least and the largest of some shares."""
    share = partial(Number, unit=PERCENT, missing="stacks in fp32 at both levels", decimals=0)
    return SimpleNamespace(least=share(shares.min()), most=share(shares.max()))


def growth(rows: pd.DataFrame) -> SimpleNamespace:
    """The peak of a step against each of length, width and depth, the other two as in most rows."""
    dtype = next(name for name in NAMES if (rows["dtype"] == name).any())
    stacks = rows[rows["dtype"] == dtype]
    base = stacks[list(GROWING)].mode().iloc[0]
    panels = {}
    for column, title in GROWING.items():
        fixed = [name for name in GROWING if name != column]
        panel = stacks[(stacks[fixed] == base[fixed]).all(axis=1)].sort_values(column)
        panels[title] = panel.assign(x=panel[column], peak_mib=panel["peak_gib"] * 1024)
    return SimpleNamespace(panels=panels, dtype=NAMES[dtype])


def peers(rows: pd.DataFrame, ceilings: pd.DataFrame) -> SimpleNamespace:
    """One layer by each variant against the bound of its matrix products, and the levels' ratios."""
    rates = recorded_rates(ceilings)
    known = {name: derived_costs.derived(name, WIDTH, INTERMEDIATE, 2) for name in rows["variant"].unique()}
    products = rows["variant"].map({name: cost.products if cost else 9 for name, cost in known.items()})
    tokens = rows["batch"] * rows["seq_len"]
    operations = 2 * tokens * rows["hidden_dim"] * rows["intermediate_size"]
    rows = rows.assign(tokens=tokens, bound_ms=products * operations / rows["dtype"].map(rates) / 1e9)
    level2 = rows[rows["variant"] == f"{OURS}2"]
    half = next((name for name in HALF if (rows["dtype"] == name).any()), HALF[0])
    return SimpleNamespace(
        table=_by_dtype(rows),
        widths=", ".join(map(str, rows["hidden_dim"].unique())),
        tokens=", ".join(f"{_tokens(of)} in {NAMES[name]}" for name, of in rows.groupby("dtype")),
        wide={NAMES[name]: of for name, of in rows[rows["hidden_dim"] == WIDTH].groupby("dtype")},
        half=_levels(rows, half),
        single=_levels(rows, "float32"),
        level2_slowest=_slowest(rows, level2),
        level2_bytes=derived(1 / level2["saved_ratio"].max(), "counted bytes", decimals=1),
        level2_stored=Number(level2["saved_ratio"].max(), PERCENT, missing="level 2", decimals=0),
        predicted=derived(11 / 9, "eleven products for nine"),
    )


def _tokens(rows: pd.DataFrame) -> str:
    """`8192 tokens`, or for each number of tokens the widths that took them."""
    widths = {int(tokens): of["hidden_dim"].unique() for tokens, of in rows.groupby("tokens")}
    if len(widths) == 1:
        return f"{min(widths)} tokens"
    return ", ".join(f"{tokens} tokens at d = {' and '.join(map(str, of))}" for tokens, of in widths.items())


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


def _by_dtype(rows: pd.DataFrame) -> pd.DataFrame:
    """Variants below each other, types and widths beside each other; of widths but `WIDTH` the times alone."""
    parts, several = [], rows["hidden_dim"].nunique() > 1
    for (dtype, width), of in rows.set_index("variant").groupby(["dtype", "hidden_dim"]):
        marks = [NOISY * is_noisy(row) for row in of.to_dict("records")]
        spread = [
            f"{number(marked(row['median_ms'], row))}{mark} ({number(row['p20_ms'])}–{number(row['p80_ms'])})"
            for mark, row in zip(marks, of.to_dict("records"), strict=True)
        ]
        numbers = {f"ms at d = {width} (p20–p80)" if several else "ms (p20–p80)": spread}
        if width == WIDTH or not several:
            numbers |= {"bound, ms": of["bound_ms"], "saved, %": 100 * of["saved_ratio"]}
            numbers |= {"peak, MiB": of["peak_added_mib"]}
        parts.append(pd.DataFrame(numbers, index=of.index).add_prefix(f"{NAMES[dtype]} "))
    return pd.concat(parts, axis=1).reset_index()


def _levels(rows: pd.DataFrame, dtype: str) -> SimpleNamespace:
    """Ratios of times and shares of bytes at `WIDTH`, in one type."""

    def ratio(variant: str, to: str) -> Number:
        chosen = rows[(rows["dtype"] == dtype) & (rows["hidden_dim"] == WIDTH) & (rows["variant"] == variant)]
        return _ratio(rows, chosen.iloc[0], f"ratio_to_{to}") if len(chosen) else lacking(variant, TIMES)

    one, two, three = (f"{OURS}{level}" for level in (1, 2, 3))
    stored = partial(pick, rows, "saved_ratio", PERCENT, 0, dtype=dtype, hidden_dim=WIDTH)
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
    )


def accuracy(rows: pd.DataFrame) -> SimpleNamespace:
    """The largest relative errors against fp64, of the plain module, the exact levels and level 3."""
    lines = []
    for dtype, of_dtype in rows.groupby("dtype", sort=False):
        rounds = of_dtype[LEVEL] == 3
        layers = {"plain module": (of_dtype, "plain_"), "levels 0 to 2": (of_dtype[~rounds], "")}
        for layer, (of_layer, prefix) in (layers | {"level 3": (of_dtype[rounds], "")}).items():
            errors = {name: of_layer[f"{prefix}{name}_error"].max() for name in GRADIENTS}
            lines.append({"dtype": NAMES[dtype], "layer": layer} | errors)
    rounded = pick(rows, "grad_W_error", PERCENT, 1, dtype="float32", checkpoint_level=3)
    return SimpleNamespace(table=pd.DataFrame(lines), rounded=rounded)


def training(rows: pd.DataFrame) -> SimpleNamespace:
    """Held-out losses by level, mean ± standard deviation over the seeds."""
    losses = rows.groupby(LEVEL)[["first_loss", "final_loss"]].agg(["mean", "std"])
    table = pd.DataFrame(
        {"level": losses.index}
        | {
            heading: [f"{mean:.3g} ± {std:.2g}" for mean, std in losses[column].itertuples(index=False)]
            for column, heading in (("first_loss", "loss before"), ("final_loss", "loss after"))
        }
    )
    by_seed = rows.pivot(index="seed", columns=LEVEL, values="final_loss").reindex(columns=[0, 3])
    return SimpleNamespace(
        table=table,
        seeds=derived(rows["seed"].nunique(), "counted", "", 0),
        excess=mean_of(by_seed[3] - by_seed[0], "nats", "level 3", 4),
        model=f"{rows['dtype'].iloc[0]}, {rows['source'].iloc[0].partition(',')[0]}",
    )
