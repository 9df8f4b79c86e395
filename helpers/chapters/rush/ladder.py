"""The ladder: each change of a training loop, what it brings over the rung that it stands on, and the best one."""

import math
from collections.abc import Iterable, Iterator
from types import SimpleNamespace

import pandas as pd

from ...book.table import Worth, table
from ...book.values import (
    PERCENT,
    TIMES,
    Number,
    chained,
    cost,
    derived,
    in_unit,
    lacking,
    of_class,
    over,
    pick,
    speedup,
    timed,
)
from ...lab import Row, device
from ...lab.estimate import LUCK, NONE, UNDECIDED
from ...rush import CPU_LADDER, LADDER
from ...rush.measurement import LOSS_STEPS, ON_CPU_LOSS_STEPS, first_loss
from ...rush.rates import flops_per_token, parameters, product_type, recorded_rates
from ...rush.setup import CHANGES, LADDERS, START, Setup, climb, stands_on
from ..swiglu.ceilings import ceilings
from . import setups
from .pairs import in_pairs, pairs
from .peers import peers
from .transformers_llama import ALIKE


@table(
    small=[setups.SMALL | {"step": step} for step in ("no optimisation", "fused AdamW", "FlashAttention", "batch 2")],
    cpu=[setups.ON_CPU | {"step": step} for step in CPU_LADDER],
    gpu=[setups.MEDIUM | setups.PAIRED | {"step": step} for step in LADDER],
    big_gpu=[setups.FULL | setups.PAIRED | {"step": step} for step in LADDER],
    version=3,
    missing=setups.missing,
    columns=setups.RUN_PAIRED + " seed_loss?",
    worth=Worth(
        100,
        "each change of the ladder, with loss, memory and MFU",
        cpu=21.9,
        gpu=20,
        big_gpu=15.5,
        headline={"step": setups.HEADLINES},
        on_gpu=1,
        one_run=True,
    ),
)
def ladder(model: str, sequence: int, step: str, trial_s: float = 0.0) -> Row:
    """Each step of the ladder: speed, memory, and the loss after equally many training steps on the same text.

    On a GPU, whose trainers can live in one process, in turns with the step that it stands on (on a CPU: `pairs`).
    Where a step changes what is computed, `seed_loss` is the loss of the step that it stands on with another seed.
    """
    setup = setups.setup_of(model, sequence, step)
    if step == START:
        return setups.run_apart(setup)
    below = stands_on(step, device().type)
    baseline = setups.setup_of(model, sequence, below)
    row = setups.beside(setup, below, baseline, trial_s) if trial_s else setups.run_apart(setup)
    if LADDERS[device().type][1].get(step) != CHANGES:
        return row
    return row | {"seed_loss": setups.apart(baseline, first_loss, baseline.possible(device()), seed=1)}


# Numbers

MIXED, ONEDNN = "mixed precision", "fp32 products by oneDNN"
NAMED = {"fp32": ONEDNN, "tf32": "TF32", "mixed": MIXED, "flash": "FlashAttention", "compiled": "compile"}
NAMED |= {"adamw": "fused AdamW"}
SHOWN = ["rung", "gain", "baseline", "tokens/s", "step_ms", "mfu", "matmul_share", "peak_gib", "loss"]
ROUNDING = 10  # times what losses of the same training differ by from rung to rung: less than two seeds do
ANOTHER = "trains to another loss"
HEADS = {"gain": "speedup", "mfu": "MFU", "matmul_share": "share of matmul rate"}


@ladder.numbers(beside=[ceilings, pairs, peers])
def _(rows: pd.DataFrame, ceilings: pd.DataFrame, trials: pd.DataFrame, peers: pd.DataFrame) -> SimpleNamespace:
    """Each rung against its baseline, by `trials` where there are any, and against matrix products of its own type.

    Their rate is that of the row's own process: a card's differs from day to day.
    `best` is what the best rung reaches in all timings of its setup, also in those beside its peers; `gains` are over
    the baselines, and `rung` has some of these by name.
    """
    kind, first = kind_of(rows), rows.iloc[0]
    _, left = LADDERS[kind]
    trials = _trials(rows, trials)
    measured = _rungs(rows, trials)
    apart = _trains_apart(measured, left)
    no_gain = lacking("a gain at the same loss", TIMES)
    measured["gain"] = [no_gain if other else gain for other, gain in zip(apart, measured["gain"], strict=True)]
    rungs, others = measured[~measured["rung"].isin(left)], measured[measured["rung"].isin(left)]
    best = _best(rungs[~apart[rungs.index]], trials)
    gains = dict(zip(measured["rung"], measured["gain"], strict=True))
    kept = {name: gains[name] for name in rungs["rung"] if gains[name].measured}
    climbed = list(kept)[: list(kept).index(best["rung"]) + 1] if best["rung"] in kept else []
    ranked = sorted(kept.items(), key=lambda item: -item[1].value)
    most = [*ranked, *[("", lacking("more rungs of the ladder", TIMES))] * 3][:3]
    total = _speedup(rows, trials, best["rung"], START)
    below = dict(zip(measured["rung"], measured["baseline"], strict=True))
    costs = {name: cost(rows, "step", after, below.get(after)) for name, after in NAMED.items()}
    return SimpleNamespace(
        job=f"{first['model']}, sequences of {int(first['sequence'])} tokens, {first['text']}",
        rungs=_shown(measured, apart, in_pairs(rows)),
        left=", ".join(f"{rung} ({ANOTHER if apart[place] else left[rung]})" for place, rung in others["rung"].items()),
        gains=dict.fromkeys(LADDERS[kind][0], lacking("this rung", TIMES)) | gains,
        without=SimpleNamespace(none=of_class(kept, NONE), undecided=of_class(kept, UNDECIDED)),
        largest=[SimpleNamespace(rung=name, gain=gain) for name, gain in most],
        total=total,
        product=derived(math.prod(float(kept[name]) for name in climbed), "product of gains", decimals=1),
        best=_reached(best, first, _timings(best, rows, trials, peers), _slowed(best, ceilings)),
        again=_again(rows),
        start_share=pick(measured, "matmul_share", PERCENT, 0, rung=START),
        losses=_losses(measured, apart, kind),
        rung=_by_name(rows, trials, kept, rungs),
        cost=SimpleNamespace(**costs, total=cost(rows, "step", best["rung"], START)),
    )


def _shown(measured: pd.DataFrame, apart: pd.Series, tried: pd.DataFrame) -> pd.DataFrame:
    """The rungs as they are read. What trains to another loss does other work: its time is no share of this work's.

    A baseline that only the rung on it was timed beside has a row above it, without memory and loss.
    """
    rungs = measured.assign(gain=[f"{gain:bare}" if gain.measured else "–" for gain in measured["gain"]])
    rungs[["mfu", "matmul_share"]] = rungs[["mfu", "matmul_share"]].astype(float).mask(apart, axis=0)
    rows, known = [], set(rungs["rung"])
    for rung in rungs.to_dict("records"):
        beside = tried[(tried["step"] == rung["rung"]) & ~tried["baseline"].isin(known)]
        if beside["baseline_ms"].notna().any() and beside["baseline"].iloc[0] == rung["baseline"]:
            slower = rung["step_ms"] / beside["baseline_ms"].iloc[0]
            rates = {name: rung[name] * slower for name in ("tokens/s", "mfu", "matmul_share")}
            named = f"{rung['baseline']} (timed beside {rung['rung']})"
            rows.append(rates | {"rung": named, "gain": "–", "baseline": rung["baseline"]})
            rung["baseline"] = named
        rows.append(rung)
    return _named_baselines(timed(pd.DataFrame(rows), SHOWN)).rename(columns=HEADS)


def _named_baselines(rungs: pd.DataFrame) -> pd.DataFrame:
    """Without the baselines that are the row above; without the column, if all are."""
    own = rungs["baseline"].isna() | (rungs["tokens/s"].notna() & rungs["step_ms"].isna())
    rungs = rungs.assign(baseline=rungs["baseline"].where((rungs["baseline"] != rungs["rung"].shift()) & ~own))
    return rungs if rungs["baseline"].notna().any() else rungs.drop(columns="baseline")


def _trains_apart(measured: pd.DataFrame, left: dict[str, str]) -> pd.Series:
    """Whether a rung's loss differs from its baseline's by more than that of two seeds: its speed is no gain then.

    Where a row has the baseline's loss of another seed, that is measured. Else, for rungs that change what is computed,
    it is `ROUNDING` times what the losses of all others differ by.
    """
    losses = measured.set_index("rung")["loss"]
    before = measured["baseline"].map(losses)
    apart = (measured["loss"] - before).abs()
    seeds = (measured.reindex(columns=["seed_loss"])["seed_loss"].astype(float) - before).abs()
    changing = measured["rung"].map(left) == CHANGES
    alike = measured.loc[~changing, "loss"]
    of_two_seeds = seeds.max() if seeds.notna().any() else ROUNDING * (alike.max() - alike.min())
    return (apart > of_two_seeds) & (changing | seeds.notna().any())


def _by_name(
    rows: pd.DataFrame, trials: pd.DataFrame, gains: dict[str, Number], rungs: pd.DataFrame
) -> SimpleNamespace:
    """Gains by name: `in_16_bits` is over fp32, `compile_steps` until compiling has paid."""
    compiled = NAMED["compiled"]
    mixed = [gains.get(rung, lacking(rung, TIMES)) for rung in (MIXED, stands_on(MIXED, kind_of(rows)))]
    compile_s = pick(rungs, "compile_s", "s", 0, rung=compiled)
    saved_ms = float(pick(rungs, "step_ms", rung=compiled)) * (float(gains.get(compiled, math.nan)) - 1)
    steps = derived(1e3 * float(compile_s) / saved_ms, "time to compile over time saved", "", 0)
    products_ms = (rungs["matmul_share"] * rungs["step_ms"]).set_axis(rungs["rung"])
    return SimpleNamespace(
        **{name: gains.get(rung, lacking(rung, TIMES)) for name, rung in NAMED.items()},
        compile_s=compile_s,
        compile_steps=steps if saved_ms > 0 else lacking("a compiled rung in pairs"),
        in_16_bits=chained(*mixed),
        batch4=gains.get("batch 4", lacking("batch 4", TIMES)),
        batch1=_speedup(rows, trials, "bf16 residual stream", START),
        batch4_best=_speedup(rows, trials, "batch 4", "bf16 residual stream"),
        products={
            name: Number(products_ms.get(NAMED[name], math.nan), "ms", missing=name, decimals=0) for name in NAMED
        },
    )


def _again(rows: pd.DataFrame) -> SimpleNamespace:
    """The rung whose step differs most between its own trial and that of the rung on it, with both times."""
    tried = in_pairs(rows).set_index("baseline")["baseline_ms"]
    single = rows[~rows["step"].str.startswith("batch ")].set_index("step")
    both = single[["step_ms"]].join(tried, how="inner").dropna()
    apart = both["baseline_ms"] / both["step_ms"] - 1
    rung = apart.abs().idxmax() if len(apart) else ""
    own, below = both.loc[rung, ["step_ms", "baseline_ms"]] if rung else (math.nan, math.nan)
    own_ms, below_ms = (Number(ms, "ms", missing="pairs", decimals=1) for ms in (own, below))
    gain = derived(float(single.at[rung, "baseline_ms"]) / below, "two trials", TIMES, 2) if rung else lacking("pairs")
    return SimpleNamespace(
        rung=rung, own=own_ms, below=below_ms, gain=gain, **_power(single.loc[rung] if rung else rows.iloc[0])
    )


def _reached(
    best: pd.Series, first: pd.Series, timings: Iterable[tuple[float, float]], slowed: float
) -> SimpleNamespace:
    """The best rung's tokens/s and its share of the matmul rate: the median of its timings, the least and the largest.

    `causal` is the share if half of attention's operations count, `of_fastest` that of what such a product reaches
    where it isn't `slowed`.
    """
    operations = flops_per_token(first["model"], int(first["sequence"]))
    causal = (operations + 6 * parameters(first["model"])) / 2 / operations
    took = pd.DataFrame(timings, columns=["ms", "tflops"])
    rates = best["tokens/s"] * best["step_ms"] / took["ms"]
    shares = rates / best["tokens/s"] * best["matmul_share"] * best["product_tflops"] / took["tflops"]
    return SimpleNamespace(
        rung=best["rung"],
        rate=_range(rates, "tokens/s"),
        share=_range(shares, PERCENT),
        causal=_range(causal * shares, PERCENT),
        of_fastest=_range(shares * slowed, PERCENT),
        timings=derived(len(rates), "counted", "", 0),
        mfu=Number(best["mfu"], PERCENT, missing="the vendor's peak", decimals=0),
        **_power(best),
    )


def _slowed(best: pd.Series, ceilings: pd.DataFrame) -> float:
    """By how much the card's power limit slows a large product: its rate in the median and in its fastest fifth."""
    if "p20_ms" not in ceilings:
        return math.nan
    fastest = recorded_rates(ceilings.assign(tflops=ceilings["tflops"] * ceilings["median_ms"] / ceilings["p20_ms"]))
    return best["product_tflops"] / fastest.get(_type(best["rung"], kind_of(best.to_frame().T)), math.nan)


def _power(row: pd.Series) -> dict[str, Number]:
    """The clock and the power that a card had in a row."""
    units = {"clock_mhz": ("mhz", "MHz"), "power_w": ("watts", "W")}
    return {name: Number(row.get(key, math.nan), unit, missing=key, decimals=0) for key, (name, unit) in units.items()}


def _losses(measured: pd.DataFrame, others: pd.Series, kind: str) -> SimpleNamespace:
    """The loss of the plain loop, what all that train alike differ from it by, and those that train to `another`."""
    start = pick(measured, "loss", decimals=3, rung=START)
    apart = (measured["loss"] - float(start)).abs()[~others]
    another = measured[others]
    return SimpleNamespace(
        start=start,
        apart=Number(apart.max(), decimals=3) if start.measured else start,
        another=", ".join(f"{row['rung']} {row['loss']:.3f}" for row in another.to_dict("records")) or "none",
        steps=derived(ON_CPU_LOSS_STEPS if kind == "cpu" else LOSS_STEPS, "counted", "", 0),
    )


def _trials(rows: pd.DataFrame, trials: pd.DataFrame) -> pd.DataFrame:
    """The pairs of rungs: those that a GPU's ladder has in its rows, and those of a table of their own."""
    of_rows = in_pairs(rows)
    given = [table for table in (of_rows.assign(rung=of_rows["step"]), trials) if len(table)]
    return pd.concat(given) if given else pd.DataFrame(columns=["baseline", "rung"])


def _best(rungs: pd.DataFrame, trials: pd.DataFrame) -> pd.Series:
    """The rung that was tried against the plain loop, else the fastest."""
    before = dict(zip(rungs["rung"], rungs["baseline"], strict=True))
    whole = [rung for rung in trials.loc[trials["baseline"] == START, "rung"] if before.get(rung, START) != START]
    return rungs.loc[rungs["rung"] == whole[-1]].iloc[0] if whole else rungs.loc[rungs["tokens/s"].idxmax()]


def _timings(
    best: pd.Series, rows: pd.DataFrame, trials: pd.DataFrame, peers: pd.DataFrame
) -> Iterator[tuple[float, float]]:
    """Milliseconds of a step of the best rung, wherever they were recorded, and the rate of products on that day."""
    rate = best["product_tflops"]
    yield best["step_ms"], rate
    alike = [_type(step, kind_of(rows)) == _type(best["rung"], kind_of(rows)) for step in rows["step"]]
    by_day = rows[alike].groupby("date")["product_tflops"].max() if "date" in rows else {}
    again = trials[trials["rung"] == best["rung"]].reindex(columns=["median_ms", "date"]).dropna(subset="median_ms")
    yield from ((ms, by_day.get(day, rate)) for ms, day in again.itertuples(index=False))
    if len(peers) and not best["rung"].startswith("batch "):  # the peers' is smaller
        yield from ((ms, rate) for ms in peers.loc[~peers["variant"].str.endswith(ALIKE), "baseline_ms"])


def _range(values: pd.Series, unit: str) -> Number:
    """Their median, between the least and the largest."""
    return Number(float(values.median()), unit, values.min(), values.max(), decimals=0)


def kind_of(rows: pd.DataFrame) -> str:
    return "cpu" if rows["preset"].iloc[0] == "cpu" else "cuda"


def _type(rung: str, kind: str) -> str:
    """The type that a rung multiplies in."""
    return product_type(climb(Setup(model=setups.TINY), kind)[rung].precision)


def _rungs(rows: pd.DataFrame, trials: pd.DataFrame) -> pd.DataFrame:
    """The measured rungs in the ladder's order, each with its baseline and its speedup over that."""
    kind = kind_of(rows)
    order = [name for name in (START, *LADDERS[kind][0]) if name in set(rows["step"])]
    rungs = rows.set_index("step", drop=False).loc[order]
    rungs = rungs.rename(columns={"step": "rung", "tokens_per_s": "tokens/s"}).reset_index(drop=True)
    rungs["baseline"] = [None if name == START else stands_on(name, kind) for name in order]
    return rungs.assign(gain=[_speedup(rows, trials, n, b) for n, b in zip(order, rungs["baseline"], strict=True)])


def _speedup(rows: pd.DataFrame, trials: pd.DataFrame, step: str, baseline: str | None) -> Number:
    """How many times as many tokens/s a step trains as another one: of their trial, else of their rows.

    Each row is of a process of its own.
    """
    if baseline is None:
        return lacking("a rung before the first", TIMES)
    together = trials[(trials["rung"] == step) & (trials["baseline"] == baseline)]
    if len(together):
        return speedup(together.iloc[0], 2)
    rate, base = (pick(rows, "tokens_per_s", step=name) for name in (step, baseline))
    return in_unit(over(rate, base, LUCK), TIMES, 2)
