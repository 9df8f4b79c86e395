"""OpenVINO on the CPU: reads the ONNX file and compiles it for the processor at hand.

Where a processor multiplies bf16 matrices, OpenVINO computes in bf16 unless it is told that fp32 is wanted. Building
costs the export and some seconds.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from .exported import to_onnx
from .failures import failures_named
from .onnx_runtime import one_or_all


def request_run(model: nn.Module, example: tuple[Tensor, ...], folder: Path) -> Callable:
    """A function of the inputs that runs one request, without copies of the inputs."""
    import openvino

    file = to_onnx(model, example, folder)
    with failures_named("OpenVINO"):
        compiled = openvino.Core().compile_model(str(file), "CPU", settings())
    request = compiled.create_infer_request()

    def run(*inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        outputs = request.infer([tensor.numpy() for tensor in inputs], share_inputs=True)
        return one_or_all([torch.from_numpy(outputs[port]) for port in compiled.outputs])

    return run


def settings() -> dict[str, str]:
    """One stream, for latency, on as many threads as torch has, in fp32.

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
