"""Another machine's card, as far as planning asks for it: its class and name, what it can run, its release of torch.

What only the card decides is taken as met, and packages count as installed, as `carry` brings them.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import torch
import torch.nn.functional as F

from ..lab import machine
from ..lab.cards import Card, likely
from . import store

SINCE = {"linear_cross_entropy": (2, 13)}  # functions that an older release of torch lacks
INSTALLED = "as carried"  # in place of a package's version


@contextlib.contextmanager
def as_if_on(folder: str, results: Path | str | None = None) -> Iterator[Card]:
    """Plan for the GPU of a folder of records, which need not be there yet. Nothing can be computed meanwhile.

    A ValueError for a card that isn't in the table.
    """
    card = likely(folder)
    if card is None:
        raise ValueError(f"no card is known by the name of {folder!r}; a folder's name is like nvidia-h200")
    rows = [row for file in (store.folder(results) / folder).rglob("*.csv") for row in store.whole_rows(file)]
    last = max(rows, key=lambda row: row["date"], default={"gpu": folder, "torch": torch.__version__})
    known = machine.environment() | {"torch": last["torch"]}
    answers = {
        "is_available": True,
        "get_device_name": last["gpu"],
        "get_device_capability": divmod(round(10 * card.capability), 10),
        "get_device_properties": SimpleNamespace(total_memory=int(card.memory_gib * 2**30)),
        "current_device": 0,
    }
    with contextlib.ExitStack() as patches:
        for name, answer in answers.items():
            patches.enter_context(patch.object(torch.cuda, name, lambda *_, answer=answer: answer))
        patches.enter_context(patch.object(torch, "__version__", last["torch"]))
        patches.enter_context(patch.object(machine, "environment", lambda: known))
        patches.enter_context(patch.object(machine, "without_kernels", str))
        patches.enter_context(patch.object(machine, "installed", lambda _package: INSTALLED))
        for name in SINCE:
            if hasattr(F, name) and _release(last["torch"]) < SINCE[name]:
                patches.callback(setattr, F, name, getattr(F, name))
                delattr(F, name)
        yield card


def _release(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:2]))
