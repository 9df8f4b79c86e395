"""What a cause of slowness could bring at most: the training without it, which isn't the same training any more.

They are tried in turns as changes are. Evaluation is no probe but counted in the profile: no turn is long enough to
hold its share of what happens rarely.
"""

import builtins
import gc
import io
import itertools
import logging
import os
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch.utils.data import DataLoader

from ..watching import run_script
from ..watching.observe import is_library
from .change import OF_ALL, Change, Facts
from .output import without_output


class SameBatch(Change):
    """The first batch of the DataLoader again and again: input for nothing."""

    kind, name, share = "probe", "same-batch", 0.5
    parts = ("loader", "idle")

    def missing_because(self, facts: Facts) -> str:
        trained = any(loader["trains"] for loader in facts["loaders"].values())
        return "" if trained else "batches come from no DataLoader"

    def apply(self, facts: Facts) -> None:
        iterate = DataLoader.__iter__

        def again(loader: Any) -> Iterator[Any]:
            if not torch.is_grad_enabled():
                return iterate(loader)
            if not hasattr(loader, "_first"):
                loader._first = next(iterate(loader))
            return itertools.repeat(loader._first, len(loader))

        DataLoader.__iter__ = again  # type: ignore[method-assign]


class NoOutput(Change):
    """Nothing printed, logged or drawn, nor computed for that alone."""

    kind, name = "probe", "no-output"
    parts = ("Python", "idle")

    def apply(self, facts: Facts) -> None:
        builtins.print = _nothing
        logging.disable(logging.CRITICAL)
        get_code = SourceFileLoader.get_code

        def code(loader: Any, name: str) -> Any:
            path = loader.get_filename(name)
            return get_code(loader, name) if is_library(path) else _silent(path)

        SourceFileLoader.get_code, run_script.compiled = code, _silent  # type: ignore[method-assign]


def _silent(script: str) -> CodeType:
    tree = without_output(Path(script).read_bytes())
    return compile(tree, os.path.abspath(script), "exec", dont_inherit=True)


def _nothing(*_: Any, file: Any = None, **__: Any) -> None:
    if isinstance(file, io.StringIO):  # text that the script reads back
        file.write("\n")


class NoCollection(Change):
    """No garbage collection."""

    kind, name, share = "probe", "no-collection", 0.02
    parts = OF_ALL

    def apply(self, facts: Facts) -> None:
        gc.disable()
        gc.collect = _nothing


class NoCheckpoint(Change):
    """Nothing saved."""

    kind, name, parts = "probe", "no-checkpoint", ()  # only where a finding says so

    def apply(self, facts: Facts) -> None:
        torch.save = _nothing


PROBES = (SameBatch, NoOutput, NoCollection, NoCheckpoint)
