"""What makes a model faster to run, each a function of a model and an example that returns a function of inputs.

- TorchScript: a graph in a language of its own, run without Python. Deprecated since torch 2.10 or so; measured because
  models in production still run in it, and because the lecture does. Building costs a second or so.
- Inductor, by `torch.compile` while the program runs, or ahead of it (AOTInductor): C++ for the CPU, Triton for a GPU;
  products and convolutions mostly stay those of the libraries. Compiling costs 10 to 60 s for the models here, more for
  `max-autotune`, which times candidates.
- ONNX Runtime, OpenVINO and TensorRT read what `torch.export` captured: one graph of ATen operations for one set of
  sizes, or an error. Exporting costs a run over fake tensors, 1 to 5 s for the models here; writing ONNX as much again,
  and the size of the weights on disk; optimising the graph a second or more; TensorRT times its kernels, for minutes.
"""

import contextlib
import functools
import logging
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from helpers.lab import device
from helpers.lab.machine import installed

from .messages import failures_named

Example = tuple[Tensor, ...]
Outputs = Tensor | tuple[Tensor, ...]

TORCH_TENSORRT = "torch_tensorrt"
CPU, CUDA, TENSORRT = "CPUExecutionProvider", "CUDAExecutionProvider", "TensorrtExecutionProvider"


# TorchScript


def traced(model: nn.Module, example: Example) -> torch.jit.ScriptModule:
    """The operations that the model runs on the example, as a module: of a branch, the one that the example took.

    torch would run it a second time to see that it does the same; in training mode dropout and running means don't.
    """
    with without_deprecation(), failures_named("trace"):
        # Batch norm in training mode asks for the batch's size, for nothing but an error of its own.
        warnings.filterwarnings("ignore", category=torch.jit.TracerWarning, module=r"torch\.nn\.functional$")
        return torch.jit.trace(model, example, check_trace=not model.training)


def scripted(model: nn.Module) -> torch.jit.ScriptModule:
    """The model's source, compiled; what the language lacks is an `ExportFailed` that names the line."""
    with without_deprecation(), failures_named("script"):
        return torch.jit.script(model)


def frozen(module: torch.jit.ScriptModule) -> nn.Module:
    """The module for inference alone: weights become constants, batch norms go into the convolutions.

    The first two runs watch types and compile, so they are slow; warm up with three.
    """
    with without_deprecation():
        return torch.jit.optimize_for_inference(torch.jit.freeze(module))


@contextlib.contextmanager
def without_deprecation() -> Iterator[None]:
    """TorchScript's own deprecation warnings are not shown inside; every other is, as that of a trace gone wrong."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`torch\.jit\.\w+` is deprecated", DeprecationWarning)
        yield


# Inductor


def compiled(model: Callable, mode: str = "default") -> Callable:
    """A function that compiles the model when it is first called, for the sizes that it is called with.

    torch.compile keeps what it made with the code object of the function, eight variants at most, after which it runs
    eagerly and says so in a log. Models that are measured one after another share their class's `forward`; so the
    function gets code of its own, which also goes when the function does.
    """

    def call(*inputs: Tensor):
        return model(*inputs)

    own = types.FunctionType(call.__code__.replace(), call.__globals__, "call", None, call.__closure__)
    return torch.compile(own, mode=mode, dynamic=False, fullgraph=True)


def ahead_of_time(model: nn.Module, example: Example, folder: Path) -> Callable:
    """Export, compile to a shared library in a `.pt2` package, and load that: it runs without Python, too."""
    program = export(model, example)
    with failures_named("compile"), torch.no_grad(), _without_treespec_warning():
        package = torch._inductor.aoti_compile_and_package(program, package_path=str(folder / "model.pt2"))
    return torch._inductor.aoti_load_package(package)


@functools.cache
def start_inductor() -> None:
    """Compile something trivial: importing Inductor and asking for the processor's abilities take seconds, once."""
    torch.compile(lambda x: x + 1, dynamic=False)(torch.zeros(2, device=device()))


@contextlib.contextmanager
def empty_cache(folder: Path) -> Iterator[None]:
    """Inductor finds nothing compiled before inside; what it compiles is written under the folder, where it stays."""
    from torch._inductor.utils import fresh_cache

    with fresh_cache(dir=str(folder), delete=False):
        yield


# torch.export, and the ONNX file that the three others read


def export(model: nn.Module, example: Example) -> torch.export.ExportedProgram:
    """The graph of a model for inputs of these sizes; `ExportFailed` names what it stopped at."""
    with failures_named("export"), torch.no_grad():
        return torch.export.export(model, example)


def to_onnx(model: nn.Module, example: Example, folder: Path) -> Path:
    """Write `model.onnx` into the folder, with its weights beside it, and return its path.

    In two steps, so that a failure is either the export's or the translation's; `torch.onnx.export` of a module would
    try the first a second time and report both.
    """
    path = folder / "model.onnx"
    program = export(model, example)
    with failures_named("export to ONNX"), _without_torchvision_notes(), _without_treespec_warning():
        torch.onnx.export(program, (), str(path), dynamo=True, external_data=True, verbose=False)
    return path


@contextlib.contextmanager
def _without_torchvision_notes() -> Iterator[None]:
    """The exporter logs each of torchvision's operations that it will not know, whether a model has one or not."""
    logger = logging.getLogger("torch.onnx._internal.exporter._registration")

    def relevant(record: logging.LogRecord) -> bool:
        return "torchvision is not installed" not in record.getMessage()

    logger.addFilter(relevant)
    try:
        yield
    finally:
        logger.removeFilter(relevant)


@contextlib.contextmanager
def _without_treespec_warning() -> Iterator[None]:
    """torch warns of a class that torch itself uses, when a program is copied."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated", FutureWarning)
        yield


# ONNX Runtime


def onnx_session(
    model: nn.Module, example: Example, folder: Path, provider: str | None = None, *, tf32: bool = False
) -> Callable[..., Outputs]:
    """A session of ONNX Runtime; the provider is CUDA's for inputs there, else the CPU's.

    On the CPU tensors are handed over as NumPy views, without a copy; on CUDA by their addresses, results into tensors
    that torch allocated, on the stream that torch uses.
    """
    import onnxruntime

    on_cuda = example[0].is_cuda
    provider = provider or (CUDA if on_cuda else CPU)
    file = to_onnx(model, example, folder)
    wanted = [(provider, _provider_options(provider, tf32))]
    wanted += [(CUDA, _provider_options(CUDA, tf32))] if provider == TENSORRT else []  # for what it lacks
    with failures_named("ONNX Runtime"):
        session = onnxruntime.InferenceSession(str(file), session_options(), providers=wanted)
        if provider not in session.get_providers():  # it falls back with a line in a log
            raise RuntimeError(f"{provider} could not be loaded; it took {', '.join(session.get_providers())}")
    if on_cuda:
        return _bound(session, model, example)
    names = [each.name for each in session.get_inputs()]

    def run(*inputs: Tensor) -> Outputs:
        outputs = session.run(None, {name: tensor.numpy() for name, tensor in zip(names, inputs, strict=True)})
        return _one_or_all([torch.from_numpy(output) for output in outputs])

    return run


def session_options():
    """As many threads as torch has, and none that spins on after a run, on a core that the next backend needs."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.force_spinning_stop", "1")
    options.log_severity_level = 3  # errors; it warns of operations that it puts on the CPU on purpose
    return options


def _provider_options(provider: str, tf32: bool) -> dict[str, str]:
    """CUDA's provider would round products of fp32 to TF32 if it were not told otherwise."""
    if provider == CPU:
        return {}
    options = {"device_id": str(torch.cuda.current_device())}
    options["user_compute_stream"] = str(torch.cuda.current_stream().cuda_stream)
    return options | ({"use_tf32": str(int(tf32))} if provider == CUDA else {})


def _bound(session: Any, model: nn.Module, example: Example) -> Callable[..., Outputs]:
    """Inputs and outputs stay on the device. The outputs' sizes are those of the model's on the example."""
    from onnx import TensorProto

    kinds = {
        torch.float32: TensorProto.FLOAT,
        torch.float16: TensorProto.FLOAT16,
        torch.bfloat16: TensorProto.BFLOAT16,
        torch.int64: TensorProto.INT64,
        torch.bool: TensorProto.BOOL,
    }
    with torch.no_grad():
        like = model(*example)
    like = like if isinstance(like, tuple) else (like,)
    sources = [each.name for each in session.get_inputs()]
    sinks = [each.name for each in session.get_outputs()]

    def run(*inputs: Tensor) -> Outputs:
        binding = session.io_binding()
        inputs = [tensor.contiguous() for tensor in inputs]
        outputs = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in like]
        for bind, names, given in ((binding.bind_input, sources, inputs), (binding.bind_output, sinks, outputs)):
            for name, x in zip(names, given, strict=True):
                bind(name, "cuda", x.device.index or 0, kinds[x.dtype], tuple(x.shape), x.data_ptr())
        session.run_with_iobinding(binding)
        return _one_or_all(outputs)

    return run


def _one_or_all(outputs: list[Tensor]) -> Outputs:
    """What the model would return: a tensor, or a tuple if there are several."""
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


# OpenVINO


def openvino_request(model: nn.Module, example: Example, folder: Path) -> Callable[..., Outputs]:
    """A request of OpenVINO, compiled for this processor; inputs are not copied."""
    import openvino

    file = to_onnx(model, example, folder)
    with failures_named("OpenVINO"):
        program = openvino.Core().compile_model(str(file), "CPU", openvino_settings())
    request = program.create_infer_request()

    def run(*inputs: Tensor) -> Outputs:
        outputs = request.infer([tensor.numpy() for tensor in inputs], share_inputs=True)
        return _one_or_all([torch.from_numpy(outputs[port]) for port in program.outputs])

    return run


def openvino_settings() -> dict[str, str]:
    """One stream, for latency, on as many threads as torch has, in fp32: by default it is bf16 where there is AMX.

    Its threads may share a core, as torch's may, and are not pinned to one, which would bind them to cores that others
    use too.
    """
    return {
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": "1",
        "INFERENCE_NUM_THREADS": str(torch.get_num_threads()),
        "ENABLE_HYPER_THREADING": "YES",
        "ENABLE_CPU_PINNING": "NO",
        "INFERENCE_PRECISION_HINT": "f32",
    }


# TensorRT


def tensorrt_engine(model: nn.Module, example: Example, folder: Path, *, tf32: bool = False) -> Callable[..., Outputs]:
    """Engines by torch_tensorrt where it is installed, else by ONNX Runtime; what TensorRT lacks is run by those."""
    if installed(TORCH_TENSORRT) is None:
        return onnx_session(model, example, folder, TENSORRT, tf32=tf32)
    import torch_tensorrt

    program = export(model, example)
    with failures_named("TensorRT"):
        return torch_tensorrt.dynamo.compile(
            program, arg_inputs=list(example), disable_tf32=not tf32, min_block_size=1, truncate_double=True
        )
