"""What each change is worth, on a GPU and on a CPU."""

from collections.abc import Iterable
from operator import attrgetter

import pandas as pd

from ...book.table import Table
from ...book.values import TIMES, Number, told

NOTHING = "–"  # in a table
SAME = 0.1  # two measurements apart of the same differ by up to that


def actions(rows: Iterable[tuple[str, str, Table, str, Table | None, str]], gpu: str, cpu: str) -> pd.DataFrame:
    """What changes gain on a GPU and on a CPU, the ratio of the peak of memory, and by how much the loss is higher.

    Each is its words, what it is compared with, a table and the name of the gain in it, and a table and the name of the
    cost (`values.cost`).
    """
    lines = []
    for change, over, table, gain, trained, costs in rows:
        line = {f"{what}, {kind}": NOTHING for what in ("speedup", "memory", "loss") for kind in ("GPU", "CPU")}
        for kind, machine in (("GPU", gpu), ("CPU", cpu)):
            if (numbers := table.on(machine)).measured:
                line[f"speedup, {kind}"] = _in_table(attrgetter(gain)(numbers))
            if trained and (numbers := trained.on(machine)).measured:
                peak, loss = attrgetter(costs)(numbers)
                line |= {f"memory, {kind}": _in_table(peak), f"loss, {kind}": _in_table(loss)}
        lines.append({"change": change, "over": over} | line)
    shown = pd.DataFrame(lines)
    return shown.loc[:, (shown != NOTHING).any()]


def _in_table(number: Number) -> str:
    """A speedup that has no effect is told by its verdict; a loss has its sign."""
    if not number.measured:
        return NOTHING
    if number.unit != TIMES:
        return f"{number.value:+.2f}".replace("-0.00", "+0.00")
    return f"{number:bare}" if number.derivation or number.low is None else told(number, SAME)
