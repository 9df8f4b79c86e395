"""`fit` as a page to play with: `dlspeed fit --page FILE.html`.

Every number is computed here, by `fit` and `speed`, for each setting of a grid; the page only looks them up. It needs
no network, and no browser newer than 2020.
"""

import itertools
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..lab.cards import cards
from ..lab.memory import GIB
from ..lab.process import without_ctrl_c, workers
from .ledger import PARTS
from .plan import MANY, Plan, peak, plan_run
from .speed import speed

TEMPLATE = Path(__file__).with_name("templates") / "page.html"
GPUS = {"1": ("single", 1), "8, DDP": ("ddp", 8), "8, ZeRO-3": ("zero3", 8)}


@dataclass(frozen=True)
class Grid:
    """The values of each control of the page."""

    model: tuple[str, ...] = ("llama-60m", "llama-3.2-1b", "llama-3.1-8b")
    sequence: tuple[int, ...] = (1024, 2048, 4096, 8192)
    batch: tuple[int, ...] = (1, 4, 16)  # of a GPU
    checkpointing: tuple[str, ...] = ("none", "full")
    precision: tuple[str, ...] = ("amp-bf16", "bf16")
    gpus: tuple[str, ...] = tuple(GPUS)
    card: tuple[str, ...] = tuple(cards())

    @property
    def axes(self) -> dict[str, tuple]:
        """The controls whose every combination is counted, in the order of the page's lists; the card comes last."""
        return {name: value for name, value in vars(self).items() if name != "card"}

    def plans(self) -> Iterator[Plan | None]:
        """The plan of each combination; None where `fit` can't count it."""
        for values in itertools.product(*self.axes.values()):
            chosen = dict(zip(self.axes, values, strict=True))
            strategy, ranks = GPUS[chosen.pop("gpus")]
            chosen["batch"] *= ranks
            counted = ranks == 1 or chosen["precision"] in MANY["precision"]
            yield Plan(**chosen, strategy=strategy, ranks=ranks) if counted else None


def page(grid: Grid = Grid(), processes: int | None = None) -> str:
    """The page as one HTML file. It takes two minutes on two cores."""
    return render(grid, table(grid, processes))


def render(grid: Grid, settings: list[dict[str, Any] | None]) -> str:
    memory = [cards()[name].memory_gib for name in grid.card]
    data = {"axes": grid.axes | {"card": grid.card}, "memory": memory, "parts": PARTS, "settings": settings}
    count = len(grid.card) * sum(each is not None for each in settings)
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return TEMPLATE.read_text(encoding="utf-8").replace("{{count}}", f"{count:,}").replace("{{data}}", text)


def table(grid: Grid, processes: int | None = None) -> list[dict[str, Any] | None]:
    """Of each combination the GiB of each part at the peak, and what each card makes of it."""
    plans = list(grid.plans())
    processes = processes or os.cpu_count() or 1
    with workers(processes, "spawn") as pool:
        with without_ctrl_c():
            settings = [pool.submit(setting, plan, grid.card) for plan in plans]
        return [counted.result() for counted in settings]


def setting(plan: Plan | None, names: tuple[str, ...]) -> dict[str, Any] | None:
    """The record of a plan: `gib` of each part, `moment`, and for each card whether it fits and how fast it is."""
    if plan is None:
        return None
    needed = peak(plan)
    of_cards = []
    for name in names:
        row = speed(plan_run(plan) | {"gpu": name})
        fits = needed.bytes <= cards()[name].memory_gib * GIB
        rates = [round(row[each]) for each in ("tokens_per_s_gpu", "low", "high")]
        of_cards.append([int(fits), *rates, round(row["step_ms"], 1), round(row["mfu"], 3), row["bound"]])
    return {
        "gib": [round(needed.parts[part] / GIB, 2) for part in PARTS],
        "peak": round(needed.bytes / GIB, 2),
        "moment": needed.moment,
        "cards": of_cards,
    }
