"""Chapter 0: the whole training stage by stage, what each change is worth, and the roofline."""

import itertools
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter, itemgetter
from types import SimpleNamespace

import pandas as pd

from .. import experiments
from ..lab.estimate import EFFECT, NONE, UNDECIDED
from ..lab.records.experiment import Experiment
from ..lab.records.results import Named, recorded
from ..lab.records.values import PERCENT, TIMES, Number, cost, derived, judged, lacking, of_class, over_runs, speedup
from ..rush.rates import recorded_rates
from ..training.stages import COMPILED, STAGES
from . import compilers, profiling, rush

NOTHING = "–"  # in a table
SAME = 0.1  # two measurements apart of the same differ by up to that
UNITS = {"train_s": ("s", 1), "real_tokens_per_s": ("real tokens/s", 0)}
UNITS |= {"validation_loss": ("", 2), "validation_accuracy": (PERCENT, 1)}


def stages(rows: pd.DataFrame, steps: pd.DataFrame | None = None) -> SimpleNamespace:
    """The staircase of the stages: means over the seeds, speedups over the row above and over the start.

    `proven` has the stages by their `steps`, which took turns, where there are such.

    Compilation is measured with fewer seeds: what is told of it is against the same seeds, and it isn't part of `all`.
    """
    climbed = rows[rows["way"] != "alone"]
    names = [name for name in ("none", *STAGES) if name in set(climbed["stage"])]
    start, *_, end = best = [name for name in names if name != COMPILED]

    def by_run(stage: str, column: str) -> pd.Series:
        return climbed[climbed["stage"] == stage].set_index("seed")[column]

    gains = {
        after: over_runs(by_run(before, "train_s"), by_run(after, "train_s"))
        for before, after in itertools.pairwise(best)
    }
    ranked = [
        SimpleNamespace(stage=name, gain=gains[name]) for name in sorted(gains, key=lambda name: -gains[name].value)
    ]
    ranked = ranked or [SimpleNamespace(stage="", gain=lacking("a stage", TIMES))]
    last, guess = _scores(climbed, end), rows["constant_accuracy"].max()
    apart = by_run(end, "validation_loss") - by_run(start, "validation_loss")  # both begin with the same weights
    return SimpleNamespace(
        first=_scores(climbed, start),
        last=last,
        all=over_runs(by_run(start, "train_s"), by_run(end, "train_s")),
        all_steady=over_runs(by_run(end, "real_tokens_per_s"), by_run(start, "real_tokens_per_s")),
        gains=gains,
        proven={row["stage"]: speedup(row) for _, row in steps.iterrows()}
        if steps is not None and len(steps)
        else gains,
        largest=ranked[0],
        smallest=ranked[-1],
        reached=bool(len(apart.dropna())) and bool((apart.dropna() <= 0).all()),  # the first's last loss, by the last
        cost=cost(climbed, "stage", end, start),
        loss_apart=SimpleNamespace(mean=Number(apart.mean(), decimals=3), std=Number(apart.std(), decimals=3)),
        guess=Number(guess, PERCENT),
        over_guess=Number(last.validation_accuracy.value / guess, decimals=1),
        tokens=Number(rows["real_tokens"].max(), "real tokens", decimals=0),
        seeds=(seeds := rows["seed"].nunique()),
        fewer="".join(
            f"; {name}: {count}"
            for name, of in {COMPILED: climbed["stage"] == COMPILED, "alone": rows["way"] == "alone"}.items()
            if 0 < (count := rows.loc[of.index[of], "seed"].nunique()) < seeds
        ),
        compiled=_compiled(climbed, end),
        table=_staircase(rows, names, gains),
    )


def _scores(climbed: pd.DataFrame, stage: str) -> SimpleNamespace:
    """A stage's means over the seeds, the deviation of its loss, and its steps."""
    of = climbed[climbed["stage"] == stage]
    return SimpleNamespace(
        **{name: Number(of[name].mean(), unit, decimals=decimals) for name, (unit, decimals) in UNITS.items()},
        loss_std=Number(of["validation_loss"].std(), decimals=3),
        steps=derived(of["steps"].median(), "counted", "", 0),
    )


def _compiled(climbed: pd.DataFrame, before: str) -> SimpleNamespace:
    """What compilation saves in a step and costs once, against the same seeds without it."""
    seeds = climbed.loc[climbed["stage"] == COMPILED, "seed"]
    same = (
        climbed[climbed["seed"].isin(seeds)].groupby("stage")[["step_ms", "train_s"]].mean().reindex([before, COMPILED])
    )
    step_ms, train_s, missing = same["step_ms"], same["train_s"], "the compiled training"
    steps_s = climbed["steps"].max() * (step_ms[before] - step_ms[COMPILED]) / 1e3  # what compiling saves of them
    return SimpleNamespace(
        before_ms=Number(step_ms[before], "ms", missing=missing, decimals=1),
        after_ms=Number(step_ms[COMPILED], "ms", missing=missing, decimals=1),
        compiling_s=Number(train_s[COMPILED] - train_s[before] + steps_s, "s", missing=missing, decimals=0),
    )


def _staircase(rows: pd.DataFrame, names: list[str], gains: dict[str, Number]) -> pd.DataFrame:
    alone = rows["way"] == "alone"
    stages = rows[~alone].groupby("stage")
    means, deviation = stages.mean(numeric_only=True).reindex(names), stages.std(numeric_only=True).reindex(names)
    single = rows[alone].groupby("stage")["train_s"].mean().reindex(names)
    table = pd.DataFrame({"stage": ["start", *(f"+ {name}" for name in names[1:])]}, index=means.index)
    table["wall time, s"] = means["train_s"]
    table["speedup"] = [gains.get(name, lacking("before the start", TIMES)) for name in names]
    if alone.any():
        table["alone"] = [Number(gain, TIMES) for gain in means["train_s"].iloc[0] / single]
    table["real tokens/s"], table["peak, GiB"] = means["real_tokens_per_s"], means["peak_gib"]
    for column, name in (("loss", "validation_loss"), ("accuracy", "validation_accuracy")):
        pairs = zip(means[name], deviation[name].fillna(0), strict=True)
        table[column] = [f"{mean:.3f} ± {std:.3f}" if std else f"{mean:.3f}" for mean, std in pairs]
    return table.reset_index(drop=True)


def machines(known: pd.DataFrame, first: str) -> str:
    """The machines that have records with their versions and dates, the one named `first` before the others."""
    ordered = known.sort_values("gpu", key=lambda names: names != first)
    dates = ordered["first_date"].where(
        ordered["first_date"] == ordered["last_date"], ordered["first_date"] + " to " + ordered["last_date"]
    )
    return "; ".join(ordered["gpu"] + " (torch " + ordered["torch"] + ", " + dates + ")")


def settings(on_cpu: bool = False, labelled: bool = False) -> dict[str, dict[str, Number]]:
    """What each change of each setting gains; `on_cpu`: there, where a GPU is shown.

    `labelled`: the names say which kind of device it was, where there are both.
    """

    def named(table: Experiment, made: Callable[..., SimpleNamespace], *others: Experiment) -> Named:
        first, *rest = (recorded(each) for each in (table, *others))
        shown = first.named(made, beside=tuple(rest))
        return shown.on_cpu if on_cpu else shown

    ladder = named(experiments.rush.ladder, rush.ladder, experiments.swiglu.ceilings, experiments.rush.pairs)
    numbers = {
        "Llama": (ladder, "gains"),
        "ViT": (named(experiments.profiling.vit_fixes, profiling.vit_fixes), "alone"),
        "language model": (named(experiments.profiling.gpt_fixes, profiling.gpt_fixes), "alone"),
        "compile": (named(experiments.compilers.training, compilers.training), "compiled"),
        "stages": (named(experiments.summary.stages, stages, experiments.summary.stage_steps), "proven"),
    }
    kinds = {name: kind_of(of) for name, (of, _) in numbers.items()}
    both = labelled and len(set(kinds.values())) > 1
    heads = {name: f"{name}, {kind}" if both else name for name, kind in kinds.items()}
    return {heads[name]: getattr(of, what) for name, (of, what) in numbers.items() if of.measured}


def placed(named: Named, number: str) -> tuple[Number, str]:
    """A number, and the kind of device that it is of; a dot leads into a namespace."""
    return attrgetter(number)(named) if named.measured else lacking(number), kind_of(named)


def kind_of(named: Named) -> str:
    return "CPU" if named.sources[0].machine.startswith("cpu-") else "GPU"


def actions(rows: Iterable[tuple[str, Named, str, Named | None, str]]) -> pd.DataFrame:
    """What changes gain on a GPU and on the CPU, the ratio of the peak of memory, and by how much the loss is higher.

    Each is its words, a table and the name of the gain in it, and a table and the name of the cost (`values.cost`).
    """
    lines = []
    for change, gains, gain, trained, costs in rows:
        line = {f"{what}, {kind}": NOTHING for what in ("speedup", "memory", "loss") for kind in ("GPU", "CPU")}
        for there in (gains, gains.on_cpu):
            if there.measured:
                line[f"speedup, {kind_of(there)}"] = _in_table(attrgetter(gain)(there))
        for there in (trained, trained.on_cpu) if trained else ():
            if there.measured:
                peak, loss = attrgetter(costs)(there)
                line |= {f"memory, {kind_of(there)}": _in_table(peak), f"loss, {kind_of(there)}": _in_table(loss)}
        lines.append({"change": change} | line)
    table = pd.DataFrame(lines)
    return table.loc[:, (table != NOTHING).any()]


def _in_table(number: Number) -> str:
    """A speedup that has no effect is told by its verdict; a loss has its sign."""
    if not number.measured:
        return NOTHING
    if number.unit != TIMES:
        return f"{number.value:+.2f}".replace("-0.00", "+0.00")
    kind, most = (EFFECT, 0) if number.derivation else judged(number, SAME)
    return f"{number:bare}" if kind == EFFECT else f"≤ {100 * most:.2g} %" if kind == NONE else kind


def worth(settings: Mapping[str, Mapping[str, Number]]) -> SimpleNamespace:
    """What each change gains in each setting: those with an effect, the largest first, and the other two classes."""
    changes = [
        (setting, change.replace("_", " "), gain)
        for setting, gains in settings.items()
        for change, gain in gains.items()
        if gain.measured
    ]
    classes = {
        kind: [each for each in changes if judged(each[2], SAME)[0] == kind] for kind in (EFFECT, NONE, UNDECIDED)
    }
    ordered = {
        f"{change} ({setting})": gain
        for of in classes.values()
        for setting, change, gain in sorted(of, key=lambda each: -each[2].value)
    }
    effects = len(classes[EFFECT])
    largest, largest_gain = next(iter(ordered.items())) if effects else ("none", lacking("an effect", TIMES))
    return SimpleNamespace(
        gains=ordered,
        largest=largest,
        largest_gain=largest_gain,
        none=_by_setting(classes[NONE], NONE),
        undecided=_by_setting(classes[UNDECIDED], UNDECIDED),
        effects=effects,
        nones=len(classes[NONE]),
        undecideds=len(classes[UNDECIDED]),
    )


def on_both() -> SimpleNamespace:
    """The changes that a GPU and the CPU have recorded: those whose verdict differs, or whose effects are opposite."""
    cpu, rows = settings(on_cpu=True), []
    for setting, gains in settings().items():
        for change, gain in gains.items():
            there = cpu.get(setting, {}).get(change, lacking("the CPU's"))
            if gain.measured and there.measured:
                ways = [
                    (judged(each, SAME)[0], judged(each, SAME)[0] == EFFECT and each.value > 1)
                    for each in (gain, there)
                ]
                rows.append((setting, change.replace("_", " "), f"{gain}", f"{there}", ways[0] == ways[1]))
    table = pd.DataFrame(rows, columns=["setting", "change", "speedup on the GPU", "on the CPU", "same"])
    same = table.pop("same").astype(bool)
    return SimpleNamespace(table=table[~same], same=int(same.sum()), count=len(table))


def _by_setting(changes: Iterable[tuple[str, str, Number]], kind: str) -> str:
    """Their names, each with the largest effect that isn't excluded: `ViT: bf16 (30 %), workers (9 %); compile: …`."""
    groups = itertools.groupby(changes, key=itemgetter(0))
    named = ((setting, {change: gain for _, change, gain in of}) for setting, of in groups)
    return "; ".join(f"{setting}: {of_class(gains, kind, SAME)}" for setting, gains in named)


# Columns that name a row's variant, the first that a table has
NAMES = ("variant", "step", "rung", "backend", "strategy", "reader", "decoder", "format", "way", "fix", "case", "loop")


def not_measured(tables: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """The rows without figures, by table and reason."""
    lines = []
    for name, rows in tables.items():
        if not len(rows):
            lines.append({"table": name, "rows": "all", "reason": "never measured here"})
            continue
        absent = rows[rows["status"] != "ok"]
        column = next((column for column in NAMES if column in absent and absent[column].notna().any()), None)
        for reason, group in absent.groupby(absent["status"].str.replace(r": \d.*", "", regex=True), sort=False):
            named = ", ".join(dict.fromkeys(group[column].dropna().astype(str))) if column else f"{len(group)}"
            lines.append({"table": name, "rows": named, "reason": reason})
    return pd.DataFrame(lines, columns=["table", "rows", "reason"])


def roofline(ceilings: pd.DataFrame, layers: pd.DataFrame) -> SimpleNamespace:
    """The machine's limits, and those layers of chapter 3's models that compute matrix products, by FLOP per byte."""
    bandwidth = ceilings["gb_per_s"].max()
    peaks = pd.Series(recorded_rates(ceilings)).sort_values()
    apart = (peaks.pct_change() > SAME).cumsum()  # types of nearly one rate share a line
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
