"""`torch.export`, and the ONNX file that three of the backends read.

`torch.export` is the successor of TorchScript: one graph of ATen operations for one set of sizes, or an error; nothing
is cut out and left to Python. Exporting costs a run over fake tensors: 1 to 5 s for the models here; writing ONNX costs
as much again, and the size of the weights on disk.
"""

import contextlib
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from .failures import failures_named


def export(model: nn.Module, example: tuple[Tensor, ...]) -> torch.export.ExportedProgram:
    """The graph of a model for inputs of these sizes; `ExportFailed` names what it stopped at."""
    with failures_named("export"), torch.no_grad():
        return torch.export.export(model, example)


def to_onnx(model: nn.Module, example: tuple[Tensor, ...], folder: Path) -> Path:
    """Write `model.onnx` into the folder, with its weights beside it, and return its path.

    In two steps, so that a failure is either the export's or the translation's; `torch.onnx.export` of a module would
    try the first a second time and report both.
    """
    path = folder / "model.onnx"
    program = export(model, example)
    with failures_named("export to ONNX"), _without_its_own_notes():
        torch.onnx.export(program, (), str(path), dynamo=True, external_data=True, verbose=False)
    return path


@contextlib.contextmanager
def _without_its_own_notes() -> Iterator[None]:
    """The exporter logs each of torchvision's operations that it will not know, whether a model has one or not."""
    logger = logging.getLogger("torch.onnx._internal.exporter._registration")

    def keep(record: logging.LogRecord) -> bool:
        return "torchvision is not installed" not in record.getMessage()

    logger.addFilter(keep)
    try:
        with without_treespec_warning():
            yield
    finally:
        logger.removeFilter(keep)


@contextlib.contextmanager
def without_treespec_warning() -> Iterator[None]:
    """torch warns of a class that torch itself uses, when a program is copied."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated", FutureWarning)
        yield
