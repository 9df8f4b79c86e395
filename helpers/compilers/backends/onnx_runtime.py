"""ONNX Runtime, and TensorRT through it: a session over an exported file.

On the CPU tensors are handed over as NumPy views, without a copy; on CUDA by their addresses, results into tensors that
torch allocated, on the stream that torch uses. Building costs the export, then a second or so for the graph's
optimisations; TensorRT times its kernels, for minutes.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from .exported import to_onnx
from .failures import failures_named

CPU, CUDA, TENSORRT = "CPUExecutionProvider", "CUDAExecutionProvider", "TensorrtExecutionProvider"


def session_run(
    model: nn.Module, example: tuple[Tensor, ...], folder: Path, provider: str | None = None, *, tf32: bool = False
) -> Callable:
    """A function of the inputs that runs a session. The provider is CUDA's for inputs there, else the CPU's."""
    import onnxruntime

    on_cuda = example[0].is_cuda
    provider = provider or (CUDA if on_cuda else CPU)
    file = to_onnx(model, example, folder)
    wanted = [(provider, provider_options(provider, tf32))]
    wanted += [(CUDA, provider_options(CUDA, tf32))] if provider == TENSORRT else []  # for what it lacks
    with failures_named("ONNX Runtime"):
        session = onnxruntime.InferenceSession(str(file), session_options(), providers=wanted)
    if provider not in session.get_providers():  # it falls back with a line in a log
        raise RuntimeError(f"ONNX Runtime could not load {provider}, and took {', '.join(session.get_providers())}")
    return _bound(session, model, example) if on_cuda else _by_numpy(session)


def session_options():
    """As many threads as torch has, and none that goes on spinning after a run, on a core that the next way needs."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.force_spinning_stop", "1")
    options.log_severity_level = 3  # errors; it warns of operations that it puts on the CPU on purpose
    return options


def provider_options(provider: str, tf32: bool = False) -> dict[str, str]:
    """CUDA's provider would round products of fp32 to TF32 if it were not told otherwise."""
    if provider == CPU:
        return {}
    options = {"device_id": str(torch.cuda.current_device())}
    if torch.cuda.is_available():
        options["user_compute_stream"] = str(torch.cuda.current_stream().cuda_stream)
    return options | ({"use_tf32": str(int(tf32))} if provider == CUDA else {})


def _by_numpy(session) -> Callable:
    names = [each.name for each in session.get_inputs()]

    def run(*inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        outputs = session.run(None, {name: tensor.numpy() for name, tensor in zip(names, inputs, strict=True)})
        return one_or_all([torch.from_numpy(output) for output in outputs])

    return run


def _bound(session, model: nn.Module, example: tuple[Tensor, ...]) -> Callable:
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

    def run(*inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        binding = session.io_binding()
        outputs = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in like]
        inputs = [tensor.contiguous() for tensor in inputs]
        for name, tensor in zip(sources, inputs, strict=True):
            place = tensor.device.index or 0
            binding.bind_input(name, "cuda", place, kinds[tensor.dtype], tuple(tensor.shape), tensor.data_ptr())
        for name, tensor in zip(sinks, outputs, strict=True):
            place = tensor.device.index or 0
            binding.bind_output(name, "cuda", place, kinds[tensor.dtype], tuple(tensor.shape), tensor.data_ptr())
        session.run_with_iobinding(binding)
        return one_or_all(outputs)

    return run


def one_or_all(outputs: list[Tensor]) -> Tensor | tuple[Tensor, ...]:
    """What the model would return: a tensor, or a tuple if there are several."""
    return outputs[0] if len(outputs) == 1 else tuple(outputs)
