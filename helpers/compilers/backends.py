"""One model by several backends, each a function with the model's inputs and outputs.

    run = build("ONNX Runtime", model, (images,), folder)
    logits = run(images)

Each is built for the shapes of its example only, and another batch size needs another build: static shapes are the
fastest for every backend, and TensorRT and CUDA graphs take nothing else. The build time is in the row.

All use torch's number of threads at the time of building, and compute in the model's dtype.
"""

import contextlib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..lab import machine
from ..lab.arguments import check_choice
from ..lab.timing import TOLERANCE, synchronize
from . import runtimes
from .messages import failures_named

Example = tuple[Tensor, ...]
Run = Callable[..., Any]

EAGER, CHANNELS_LAST = "eager", "eager, channels last"
TRACE, SCRIPT = "TorchScript, trace", "TorchScript, script"
COMPILE, OVERHEAD, AUTOTUNE = "compile", "compile, reduce-overhead", "compile, max-autotune"
AOT, ONNX, OPENVINO, TENSORRT = "export + AOTInductor", "ONNX Runtime", "OpenVINO", "TensorRT"
# What of ONNX Runtime's speedup is fusion, and what threads: the rest is its own products.
ONE_THREAD, ONNX_UNFUSED, ONNX_ONE_THREAD = "eager, one thread", f"{ONNX}, unfused", f"{ONNX}, one thread"

# backend -> mode of torch.compile
COMPILE_MODES = {COMPILE: "default", OVERHEAD: "reduce-overhead", AUTOTUNE: "max-autotune"}

# Calls until a backend has reached its full speed. The first compiles; on CUDA TorchScript fuses in the second, from
# types profiled in the first, and CUDA graphs run eagerly first, are recorded next, and replayed from the third on.
FIRST_RUNS = 3

# Tolerances in fp32. SAME_SUMS: the same products, added in another order. FOLDED: batch norms are folded into weights,
# which rounds these once more, and convolutions may use Winograd's transform, whose additions cancel digits. TACTICS:
# TensorRT takes the fastest kernel, among them some of lower precision.
SAME_SUMS, FOLDED, TACTICS = 1e-5, 1e-4, 1e-3


@dataclass(frozen=True)
class Backend:
    """How a backend is prepared, its tolerance against eager in fp32 as ‖a − b‖ / ‖b‖, and its requirements.

    `prepare(model, example, folder)` returns a function of inputs. `needs` are those of `lab.machine`.
    """

    prepare: Callable[[nn.Module, Example, Path], Run]
    tolerance: float
    needs: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()  # required; imported before the build is timed, and the last one's version recorded
    by_inductor: bool = False


def _channels_last(model: nn.Module) -> Run:
    """The model's weights are converted once; inputs at each call, as part of the measured time."""
    model = model.to(memory_format=torch.channels_last)
    return lambda images: model(images.contiguous(memory_format=torch.channels_last))


def _inductor(prepare: Callable[[nn.Module, Example, Path], Run], *needs: str) -> Backend:
    """An Inductor backend. C++ code for CPUs and Triton's kernel launchers are both compiled against Python.h."""
    return Backend(prepare, SAME_SUMS, (*needs, "C++ compiler", "Python.h"), ("triton",), by_inductor=True)


def _onnx(**options: Any) -> Backend:
    packages = ("onnx", "onnxscript", "onnxruntime")
    return Backend(partial(runtimes.onnx_session, **options), FOLDED, needs=("CPU",), packages=packages)


BACKENDS: dict[str, Backend] = {
    EAGER: Backend(lambda model, example, folder: model, SAME_SUMS),
    CHANNELS_LAST: Backend(lambda model, example, folder: _channels_last(model), SAME_SUMS),
    TRACE: Backend(lambda model, example, folder: runtimes.frozen(runtimes.traced(model, example)), FOLDED),
    SCRIPT: Backend(lambda model, example, folder: runtimes.frozen(runtimes.scripted(model)), FOLDED),
    COMPILE: _inductor(lambda model, example, folder: runtimes.compiled(model)),
    # It records CUDA graphs; on a CPU it is the same as the default mode.
    OVERHEAD: _inductor(lambda model, example, folder: runtimes.compiled(model, "reduce-overhead"), "CUDA"),
    AUTOTUNE: _inductor(lambda model, example, folder: runtimes.compiled(model, "max-autotune")),
    AOT: _inductor(runtimes.ahead_of_time),
    ONE_THREAD: Backend(lambda model, example, folder: runtimes.one_thread(model), SAME_SUMS, needs=("CPU",)),
    ONNX: _onnx(),
    ONNX_UNFUSED: _onnx(fused=False),
    ONNX_ONE_THREAD: _onnx(threads=1),
    OPENVINO: Backend(runtimes.openvino_request, FOLDED, needs=("CPU",), packages=("onnx", "onnxscript", "openvino")),
    TENSORRT: Backend(runtimes.tensorrt_engine, TACTICS, needs=("CUDA",), packages=("torch_tensorrt",)),
}


def missing_because(backend: str, device: torch.device | None = None) -> str:
    """Why a backend can't run on a device (by default the machine's), as one line; "" if it can."""
    chosen = _named(backend)
    return machine.missing_because(*chosen.needs, *chosen.packages, device=device or machine.device())


def build(backend: str, model: nn.Module, example: Example, folder: Path | str) -> Run:
    """A function of inputs with the example's shapes, compiled from an empty cache, after its first calls.

    `folder` receives the files that a backend writes, and must outlive the function. Raises `ExportFailed`, or a
    ValueError with the reason of `missing_because`.
    """
    if reason := missing_because(backend, example[0].device):
        raise ValueError(f"{backend}: {reason}")
    with empty_cache(backend, folder):
        fn = _named(backend).prepare(model, example, Path(folder))

        def run(*inputs: Tensor) -> Any:
            with torch.inference_mode():
                return fn(*inputs)

        # torch.compile compiles in its first call
        with failures_named("compile" if backend in COMPILE_MODES else "first runs"):
            for _ in range(FIRST_RUNS):
                run(*example)
            synchronize()
    return run


def empty_cache(backend: str, folder: Path | str) -> contextlib.AbstractContextManager[None]:
    """A context in which Inductor's cache is empty, under the folder; other backends have no cache."""
    return runtimes.empty_cache(Path(folder)) if _named(backend).by_inductor else contextlib.nullcontext()


def start(backend: str) -> None:
    """Import a backend's packages and start Inductor, so that build times exclude these one-off costs of a process."""
    chosen = _named(backend)
    for package in chosen.packages:
        if machine.installed(package) is not None:
            importlib.import_module(package)
    if chosen.by_inductor:
        with failures_named("compile"):
            runtimes.start_inductor()


def agree_within(backend: str, dtype: torch.dtype) -> float:
    """A backend's tolerance against eager: its own in fp32, at least the dtype's in other precisions."""
    return max(_named(backend).tolerance, 0.0 if dtype == torch.float32 else TOLERANCE[dtype])


def version(backend: str) -> str:
    """The version of torch, or of the package, that a backend's results depend on."""
    for package in _named(backend).packages[-1:]:
        if release := machine.installed(package):
            return f"{package} {release}"
    return f"torch {torch.__version__}"


def _named(backend: str) -> Backend:
    check_choice(BACKENDS, backend=backend)
    return BACKENDS[backend]
