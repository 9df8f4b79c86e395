"""What a cause of slowness could bring at most: the training without it, which isn't the same training any more.

They are tried in turns as changes are. Evaluation is no probe but counted in the profile: no turn is long enough to
hold its share of what happens rarely.
"""

import gc
import io
import itertools
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import torch

from ..script import hooks, running
from ..script.stacks import is_library
from .change import OF_ALL, Change, Facts


class SameBatch(Change):
    """The first batch of the DataLoader again and again: input for nothing."""

    kind, name, share = "probe", "same-batch", 0.5
    parts = ("loader", "idle")

    def missing_because(self, facts: Facts) -> str:
        trained = any(loader["trains"] for loader in facts["loaders"].values())
        return "" if trained else "batches come from no DataLoader"

    def apply(self, facts: Facts) -> None:
        def again(iterate: Callable[[Any], Iterator[Any]], loader: Any) -> Iterator[Any]:
            if not torch.is_grad_enabled():
                return iterate(loader)
            if not hasattr(loader, "_first"):
                loader._first = next(iterate(loader))
            return itertools.repeat(loader._first, len(loader))

        hooks.wrap({hooks.LOADER_BEGUN: again})


class NoOutput(Change):
    """Nothing printed, logged or drawn, nor computed for that alone."""

    kind, name = "probe", "no-output"
    parts = ("Python", "idle")

    def apply(self, facts: Facts) -> None:
        logging.disable(logging.CRITICAL)
        compiled = hooks.Point(running, "compiled")
        hooks.wrap({hooks.PRINT: _printed, hooks.SOURCE: _code, compiled: lambda _, script: _silent(script)})


def _code(get_code: Callable[..., Any], loader: Any, name: str) -> Any:
    path = loader.get_filename(name)
    return get_code(loader, name) if is_library(path) else _silent(path)


def _silent(script: str) -> CodeType:
    from .output import without_output  # only a process that is silent needs it

    tree = without_output(Path(script).read_bytes())
    return compile(tree, os.path.abspath(script), "exec", dont_inherit=True)


def _printed(_print: Callable[..., None], *_: Any, file: Any = None, **__: Any) -> None:
    if isinstance(file, io.StringIO):  # text that the script reads back
        file.write("\n")


def _nothing(*_: Any, **__: Any) -> None:
    pass


class NoCollection(Change):
    """No garbage collection."""

    kind, name, share = "probe", "no-collection", 0.02
    parts = OF_ALL

    def apply(self, facts: Facts) -> None:
        gc.disable()
        hooks.wrap({hooks.COLLECT: _nothing})


class NoCheckpoint(Change):
    """Nothing saved."""

    kind, name, parts = "probe", "no-checkpoint", ()  # only where a finding says so

    def apply(self, facts: Facts) -> None:
        hooks.wrap({hooks.SAVE: _nothing})


PROBES = (SameBatch, NoOutput, NoCollection, NoCheckpoint)
