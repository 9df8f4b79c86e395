"""Compilers and runtimes, each a function of a model and an example that returns a function of inputs.

- TorchScript: a graph in a language of its own, run without Python. Deprecated since torch 2.10 or so; measured because
  models in production still use it, and because the lecture does. Building costs about a second.
- Inductor, by `torch.compile` just in time, or ahead of time (AOTInductor): C++ for the CPU, Triton for a GPU; matrix
  products and convolutions mostly remain library calls. Compiling costs 10 to 60 s for the models here, more with
  `max-autotune`, which times candidates.
- ONNX Runtime, OpenVINO and TensorRT read the graph of `torch.export`: ATen operations for fixed shapes. Exporting
  costs a run over fake tensors, 1 to 5 s for the models here; writing ONNX as much again, and the size of the weights
  on disk; optimising the graph a second or more; TensorRT times its kernels for minutes.
"""

import contextlib
import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..lab import device
from ..lab.compiling import compiled_apart
from . import capture
from .messages import failures_named

Example = tuple[Tensor, ...]
Outputs = Tensor | tuple[Tensor, ...]


# TorchScript


def traced(model: nn.Module, example: Example) -> torch.jit.ScriptModule:
    """The operations that the model runs on the example, as a module; only the branches that the example took.

    torch's check by a second run is on in evaluation mode only: in training, dropout and running means differ.
    """
    with warnings.catch_warnings(), failures_named("trace"):
        # Batch norm in training mode reads the batch's size, only to check it: the warning is harmless.
        warnings.filterwarnings("ignore", category=torch.jit.TracerWarning, module=r"torch\.nn\.functional$")
        return torch.jit.trace(model, example, check_trace=not model.training)


def scripted(model: nn.Module) -> torch.jit.ScriptModule:
    """The model's source, compiled; unsupported code raises an `ExportFailed` that names the line."""
    with failures_named("script"):
        return torch.jit.script(model)


def frozen(module: torch.jit.ScriptModule) -> nn.Module:
    """The module for inference only: weights become constants, batch norms are folded into convolutions.

    The first two runs profile types and compile; warm up with three.
    """
    return torch.jit.optimize_for_inference(torch.jit.freeze(module))


# Inductor


def compiled(model: Callable, mode: str = "default") -> Callable:
    """A function that compiles the model at its first call, for the shapes of that call."""
    return compiled_apart(model, mode=mode, dynamic=False, fullgraph=True)


def ahead_of_time(model: nn.Module, example: Example, folder: Path) -> Callable:
    """Export, compile to a shared library in a `.pt2` package, and load it; it can also run without Python.

    The wrapper, which only calls kernels, is compiled without optimisation: that halves the time to build.
    """
    options = {"aot_inductor.compile_wrapper_opt_level": "O0"}
    program = export(model, example)
    with failures_named("compile"), torch.no_grad(), capture.silent():
        package = torch._inductor.aoti_compile_and_package(
            program, package_path=str(folder / "model.pt2"), inductor_configs=options
        )
    return torch._inductor.aoti_load_package(package)


@functools.cache
def start_inductor() -> None:
    """Compile a trivial function: importing Inductor and detecting the processor's features take seconds, once."""
    torch.compile(lambda x: x + 1, dynamic=False)(torch.zeros(2, device=device()))


def empty_cache(folder: Path) -> contextlib.AbstractContextManager[Any]:
    """A context with an empty Inductor cache under the folder, which isn't deleted afterwards."""
    from torch._inductor.utils import fresh_cache

    return fresh_cache(dir=str(folder), delete=False)


# torch.export, and the ONNX file that the three others read


def export(model: nn.Module, example: Example) -> torch.export.ExportedProgram:
    """The graph of a model for inputs of these shapes, or an `ExportFailed`."""
    with failures_named("export"), torch.no_grad():
        return torch.export.export(model, example)


def to_onnx(model: nn.Module, example: Example, folder: Path) -> Path:
    """Write `model.onnx` and a file of its weights into the folder; returns the path of the former.

    In two steps, so that an error is either of the export or of the translation; `torch.onnx.export` of a module would
    retry the first and report both.
    """
    path = folder / "model.onnx"
    program = export(model, example)
    with failures_named("export to ONNX"), capture.silent():
        torch.onnx.export(program, (), str(path), dynamo=True, external_data=True, verbose=False)
    return path


# ONNX Runtime


def one_thread(model: nn.Module) -> Callable[..., Outputs]:
    """The model, computed by one thread whatever torch's number is."""

    def run(*inputs: Tensor) -> Outputs:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return model(*inputs)
        finally:
            torch.set_num_threads(threads)

    return run


def onnx_session(
    model: nn.Module, example: Example, folder: Path, *, threads: int = 0, fused: bool = True
) -> Callable[..., Outputs]:
    """A session of ONNX Runtime for this processor; tensors are passed as NumPy views, without a copy.

    It has torch's number of threads unless given, which don't spin after a run on cores that the next backend needs.
    """
    import onnxruntime

    file = to_onnx(model, example, folder)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads or torch.get_num_threads()
    if not fused:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.force_spinning_stop", "1")
    options.log_severity_level = 3  # errors only
    with failures_named("ONNX Runtime"):
        session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]

    def run(*inputs: Tensor) -> Outputs:
        outputs = session.run(None, {name: tensor.numpy() for name, tensor in zip(names, inputs, strict=True)})
        return _one_or_all([torch.from_numpy(output) for output in outputs])

    return run


def _one_or_all(outputs: list[Tensor]) -> Outputs:
    """Outputs as the model returns them: a tensor, or a tuple if there are several."""
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


# OpenVINO


def openvino_request(model: nn.Module, example: Example, folder: Path) -> Callable[..., Outputs]:
    """The model compiled by OpenVINO for this processor; inputs are not copied.

    One stream, for latency, on torch's number of threads, in fp32 (the default is bf16 on processors with AMX).
    Hyper-threads are used, as torch does, and threads aren't pinned, as other processes may use the same cores.
    """
    import openvino

    file = to_onnx(model, example, folder)
    settings = {
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": "1",
        "INFERENCE_NUM_THREADS": str(torch.get_num_threads()),
        "ENABLE_HYPER_THREADING": "YES",
        "ENABLE_CPU_PINNING": "NO",
        "INFERENCE_PRECISION_HINT": "f32",
    }
    with failures_named("OpenVINO"):
        program = openvino.Core().compile_model(str(file), "CPU", settings)
    request = program.create_infer_request()

    def run(*inputs: Tensor) -> Outputs:
        outputs = request.infer([tensor.numpy() for tensor in inputs], share_inputs=True)
        return _one_or_all([torch.from_numpy(outputs[port]) for port in program.outputs])

    return run


# TensorRT


def tensorrt_engine(model: nn.Module, example: Example, folder: Path) -> Callable[..., Outputs]:
    """Engines by torch_tensorrt, in fp32 without TF32."""
    import torch_tensorrt

    program = export(model, example)
    with failures_named("TensorRT"):
        return torch_tensorrt.dynamo.compile(
            program, arg_inputs=list(example), disable_tf32=True, min_block_size=1, truncate_double=True
        )
