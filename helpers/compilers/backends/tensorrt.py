"""TensorRT: torch_tensorrt where it is installed, else ONNX Runtime's provider. Building times kernels, for minutes."""

from collections.abc import Callable
from pathlib import Path

from torch import Tensor, nn

from helpers.lab.machine import NOT_INSTALLED, installed

from . import onnx_runtime
from .exported import export
from .failures import failures_named

PACKAGE = "torch_tensorrt"


def engine_run(model: nn.Module, example: tuple[Tensor, ...], folder: Path, *, tf32: bool = False) -> Callable:
    """A function of the inputs that runs engines; what TensorRT lacks runs in torch, or in ONNX Runtime."""
    if installed(PACKAGE) is None:
        return onnx_runtime.session_run(model, example, folder, onnx_runtime.TENSORRT, tf32=tf32)
    import torch_tensorrt

    program = export(model, example)
    with failures_named("TensorRT"):
        return torch_tensorrt.dynamo.compile(
            program, arg_inputs=list(example), disable_tf32=not tf32, min_block_size=1, truncate_double=True
        )


def missing() -> str | None:
    """What is not installed of what TensorRT needs, as a row's status."""
    if installed(PACKAGE) is not None:
        return None
    if any(installed(name) is None for name in ("onnx", "onnxscript", "onnxruntime")):
        return NOT_INSTALLED + PACKAGE
    import onnxruntime

    return None if onnx_runtime.TENSORRT in onnxruntime.get_available_providers() else NOT_INSTALLED + PACKAGE
