"""What each change is worth, on a GPU and on a CPU: in the settings that measure whole steps."""

from collections.abc import Iterable, Mapping
from operator import attrgetter
from types import SimpleNamespace

import pandas as pd

from ...book.table import Table
from ...book.values import TIMES, Number, judged, lacking
from ...lab.estimate import EFFECT, NONE, UNDECIDED
from .. import compilers, profiling, rush
from .stages import stages

NOTHING = "–"  # in a table
SAME = 0.1  # two measurements apart of the same differ by up to that
SETTINGS = {
    "Llama": (rush.ladder, "gains"),
    "ViT": (profiling.vit_fixes, "alone"),
    "language model": (profiling.gpt_fixes, "alone"),
    "compile": (compilers.training, "compiled"),
    "stages": (stages, "proven"),
}

Gains = dict[str, dict[str, Number]]  # setting -> change -> speedup


def settings(machine: str) -> Gains:
    """What each change of each setting gains on a machine."""
    numbers = {setting: (table.on(machine), name) for setting, (table, name) in SETTINGS.items()}
    return {setting: getattr(of, name) for setting, (of, name) in numbers.items() if of.measured}


def actions(rows: Iterable[tuple[str, Table, str, Table | None, str]], gpu: str, cpu: str) -> pd.DataFrame:
    """What changes gain on a GPU and on a CPU, the ratio of the peak of memory, and by how much the loss is higher.

    Each is its words, a table and the name of the gain in it, and a table and the name of the cost (`values.cost`).
    """
    lines = []
    for change, table, gain, trained, costs in rows:
        line = {f"{what}, {kind}": NOTHING for what in ("speedup", "memory", "loss") for kind in ("GPU", "CPU")}
        for kind, machine in (("GPU", gpu), ("CPU", cpu)):
            if (numbers := table.on(machine)).measured:
                line[f"speedup, {kind}"] = _in_table(attrgetter(gain)(numbers))
            if trained and (numbers := trained.on(machine)).measured:
                peak, loss = attrgetter(costs)(numbers)
                line |= {f"memory, {kind}": _in_table(peak), f"loss, {kind}": _in_table(loss)}
        lines.append({"change": change} | line)
    shown = pd.DataFrame(lines)
    return shown.loc[:, (shown != NOTHING).any()]


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
        effects=effects,
        nones=len(classes[NONE]),
        undecideds=len(classes[UNDECIDED]),
    )


def on_both(gpu: Gains, cpu: Gains) -> SimpleNamespace:
    """The changes that a GPU and a CPU have recorded: those whose verdict differs, or whose effects are opposite."""
    rows = []
    for setting, gains in gpu.items():
        for change, gain in gains.items():
            there = cpu.get(setting, {}).get(change, lacking("the CPU's"))
            if gain.measured and there.measured:
                rows.append((setting, change.replace("_", " "), f"{gain}", f"{there}", _way(gain) == _way(there)))
    table = pd.DataFrame(rows, columns=["setting", "change", "speedup on the GPU", "on the CPU", "same"])
    same = table.pop("same").astype(bool)
    return SimpleNamespace(table=table[~same], same=int(same.sum()), count=len(table))


def _way(gain: Number) -> tuple[str, bool]:
    kind = judged(gain, SAME)[0]
    return kind, kind == EFFECT and gain.value > 1
