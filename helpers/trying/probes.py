"""What a cause of slowness could bring at most: the training without it, which isn't the same training any more.

Some are tried in turns as changes are. What happens rarely, evaluation and checkpoints, is counted in the unchanged run
instead: no turn is long enough to hold its share of it.
"""

import builtins
import gc
import importlib
import io
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data.dataloader import _BaseDataLoaderIter

from .change import Change, Facts
from .sight import DRAWING
from .table import Tried


class SameBatch(Change):
    """The first batch of the DataLoader again and again: input for nothing."""

    kind, name = "probe", "same-batch"

    def missing_because(self, facts: Facts) -> str:
        return "" if _loader_seconds(facts) else "batches come from no DataLoader"

    def apply(self, facts: Facts) -> None:
        following = _BaseDataLoaderIter.__next__

        def again(iterator: Any) -> Any:
            if not torch.is_grad_enabled():
                return following(iterator)
            loader = iterator._loader
            if "_first" not in vars(loader):
                object.__setattr__(loader, "_first", following(iterator))
            iterator._given = getattr(iterator, "_given", 0) + 1
            if iterator._given > len(loader):
                raise StopIteration
            return loader._first

        _BaseDataLoaderIter.__next__ = again
        init = _BaseDataLoaderIter.__init__

        def made(iterator: Any, loader: Any) -> None:
            init(iterator, loader)
            iterator._loader = loader

        _BaseDataLoaderIter.__init__ = made

    def promise(self, facts: Facts) -> float:
        return _loader_seconds(facts) / max(facts["elapsed"], 1e-9)


def _loader_seconds(facts: Facts) -> float:
    return sum(each["seconds"] for each in facts["loaders"].values() if each["batches"])


class NoOutput(Change):
    """Nothing printed, logged or drawn."""

    kind, name = "probe", "no-output"

    def missing_because(self, facts: Facts) -> str:
        return "" if "print" in facts["calls"] or facts["draws"] else "next to nothing is printed"

    def apply(self, facts: Facts) -> None:
        builtins.print = _nothing
        logging.disable(logging.CRITICAL)
        for module, (kind, names) in DRAWING.items():
            if module in facts["draws"]:
                for name in names:
                    setattr(getattr(importlib.import_module(module), kind), name, _nothing)

    def promise(self, facts: Facts) -> float:
        return facts["calls"].get("print", {"seconds": 0.0})["seconds"] / max(facts["elapsed"], 1e-9)


def _nothing(*_: Any, file: Any = None, **__: Any) -> None:
    if isinstance(file, io.StringIO):  # text that the script reads back
        file.write("\n")


class NoCollection(Change):
    """No garbage collection."""

    kind, name, share = "probe", "no-collection", 0.02

    def apply(self, facts: Facts) -> None:
        gc.disable()
        gc.collect = _nothing


PROBES = (SameBatch, NoOutput, NoCollection)
COUNTED = {"evaluation": "no-evaluation", "save": "no-checkpoint"}  # calls that are seen, and their probes


def counted(facts: Facts, only: Sequence[str]) -> list[Tried]:
    """What rarely happens: its share of the unchanged script's time."""
    rows = []
    for call, name in COUNTED.items():
        seen = facts["calls"].get(call)
        if not seen or not seen["count"] or (only and name not in only):
            continue
        reason = f"{seen['count']} times, {seen['seconds']:.2g} s of {facts['elapsed']:.3g} s"
        share = seen["seconds"] / facts["elapsed"]
        rows.append(Tried(name, "probe", gain_share=share, verdict="counted", same=False, reason=reason))
    return rows
