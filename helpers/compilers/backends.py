"""One model by several backends: each a function of the same inputs that returns what the model returns.

    run = build("ONNX Runtime", model, (images,), folder)
    logits = run(images)

Each is built for the sizes of its example and no others, so a batch of another size is another build. That is what
each of them does best, TensorRT and CUDA graphs take nothing else, and a program for any size that is faster at one of
them would be compared with a slower build of itself. The price is a build for each size; its time is in the row.

All use as many threads as torch does at the time of building, and compute in the model's dtype.
"""

import contextlib
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from helpers.lab import machine
from helpers.lab.arguments import check_choice
from helpers.lab.timing import TOLERANCE, synchronize, tensors

from . import runtimes
from .messages import failures_named

Example = tuple[Tensor, ...]
Run = Callable[..., Any]

EAGER, CHANNELS_LAST = "eager", "eager, channels last"
TRACE, SCRIPT = "TorchScript, trace", "TorchScript, script"
COMPILE, OVERHEAD, AUTOTUNE = "compile", "compile, reduce-overhead", "compile, max-autotune"
AOT, ONNX, OPENVINO, TENSORRT = "export + AOTInductor", "ONNX Runtime", "OpenVINO", "TensorRT"

# backend -> mode of torch.compile
COMPILE_MODES = {COMPILE: "default", OVERHEAD: "reduce-overhead", AUTOTUNE: "max-autotune"}

# Calls until a backend is as fast as it gets. The first compiles, but on CUDA TorchScript fuses in the second, by what
# it saw in the first, and what goes into a CUDA graph runs once as it is, is recorded next, and only then replayed.
FIRST_RUNS = 3

# Tolerances in fp32. SAME_SUMS: the same products, added in another order. FOLDED: a batch norm's scale is multiplied
# into weights first, which rounds them once more, and a convolution may be transformed (Winograd), whose additions
# cancel. TACTICS: TensorRT takes whichever kernel is fastest, among them some that keep fewer bits.
SAME_SUMS, FOLDED, TACTICS = 1e-5, 1e-4, 1e-3


@dataclass(frozen=True)
class Backend:
    """How a backend is prepared, how far from eager it may be in fp32, as ‖a − b‖ / ‖b‖, and what it needs.

    `prepare(model, example, folder, tf32)` returns a function of inputs. Needs are those of `lab.machine`.
    """

    prepare: Callable[[nn.Module, Example, Path, bool], Run]
    tolerance: float
    needs: tuple[str, ...] = ()
    needs_on_cuda: tuple[str, ...] = ()  # there, and in addition
    packages: tuple[str, ...] = ()  # needed too, and imported before building is timed; the last has its release
    instead: tuple[str, ...] = ()  # what serves in place of all of those
    by_inductor: bool = False
    pictures_only: bool = False


def _channels_last(model: nn.Module) -> Run:
    """The weights of the given model are laid out anew once, and each picture at each call, within its time."""
    model = model.to(memory_format=torch.channels_last)
    return lambda images: model(images.contiguous(memory_format=torch.channels_last))


def _inductor(prepare: Callable[[nn.Module, Example, Path, bool], Run], *needs: str) -> Backend:
    """Both the C++ for a CPU and what Triton launches its kernels with are compiled against Python's header."""
    return Backend(prepare, SAME_SUMS, (*needs, "C++ compiler", "Python.h"), ("triton",), by_inductor=True)


BACKENDS: dict[str, Backend] = {
    EAGER: Backend(lambda model, example, folder, tf32: model, SAME_SUMS),
    CHANNELS_LAST: Backend(lambda model, example, folder, tf32: _channels_last(model), SAME_SUMS, pictures_only=True),
    TRACE: Backend(lambda model, example, folder, tf32: runtimes.frozen(runtimes.traced(model, example)), FOLDED),
    SCRIPT: Backend(lambda model, example, folder, tf32: runtimes.frozen(runtimes.scripted(model)), FOLDED),
    COMPILE: _inductor(lambda model, example, folder, tf32: runtimes.compiled(model)),
    # It records CUDA graphs; elsewhere it is the default mode.
    OVERHEAD: _inductor(lambda model, example, folder, tf32: runtimes.compiled(model, "reduce-overhead"), "CUDA"),
    AUTOTUNE: _inductor(lambda model, example, folder, tf32: runtimes.compiled(model, "max-autotune")),
    AOT: _inductor(lambda model, example, folder, tf32: runtimes.ahead_of_time(model, example, folder)),
    ONNX: Backend(
        lambda model, example, folder, tf32: runtimes.onnx_session(model, example, folder, tf32=tf32),
        FOLDED,
        needs_on_cuda=("onnxruntime-gpu",),
        packages=("onnx", "onnxscript", "onnxruntime"),
    ),
    OPENVINO: Backend(
        lambda model, example, folder, tf32: runtimes.openvino_request(model, example, folder),
        FOLDED,
        needs=("CPU",),
        packages=("onnx", "onnxscript", "openvino"),
    ),
    TENSORRT: Backend(
        lambda model, example, folder, tf32: runtimes.tensorrt_engine(model, example, folder, tf32=tf32),
        TACTICS,
        needs=("CUDA",),
        packages=(runtimes.TORCH_TENSORRT,),
        instead=("CUDA", "onnx", "onnxscript", "onnxruntime-gpu"),
    ),
}


def missing_because(backend: str, device: torch.device | None = None) -> str:
    """Why a backend can't run on a device (by default the machine's), in a line for a table's status; "" if it can."""
    chosen, device = _named(backend), device or machine.device()
    needs = (*chosen.needs, *chosen.packages, *(chosen.needs_on_cuda if device.type == "cuda" else ()))
    reason = machine.missing_because(*needs, device=device)
    if reason and chosen.instead and not machine.missing_because(*chosen.instead, device=device):
        return ""
    return reason


def prepare(backend: str, model: nn.Module, example: Example, folder: Path | str, *, tf32: bool = False) -> Run:
    """A function of inputs with the example's sizes; compilers that work when it is first called have not worked yet.

    `folder` takes the files that a backend writes, and must outlive the function. TF32 counts for the runtimes that
    don't follow torch's settings. Raises `ExportFailed`, or a ValueError with the reason of `missing_because`.
    """
    if reason := missing_because(backend, example[0].device):
        raise ValueError(f"{backend}: {reason}")
    chosen = _named(backend)
    if chosen.pictures_only and example[0].dim() != 4:
        raise ValueError(f"{backend} takes pictures (B, C, H, W); the input has shape {tuple(example[0].shape)}")
    fn = chosen.prepare(model, example, Path(folder), tf32)

    def run(*inputs: Tensor) -> Any:
        with torch.inference_mode():
            return fn(*inputs)

    return run


def build(
    backend: str, model: nn.Module, example: Example, folder: Path | str, *, tf32: bool = False, cold: bool = True
) -> Run:
    """Like `prepare`, and the first calls are done: whatever is compiled is compiled, from an empty cache if `cold`."""
    with compile_cache(backend, folder, cold):
        run = prepare(backend, model, example, folder, tf32=tf32)
        with first_runs(backend):
            for _ in range(FIRST_RUNS):
                run(*example)
            synchronize()
    return run


def first_runs(backend: str) -> contextlib.AbstractContextManager[None]:
    """A failure in a backend's first calls is an `ExportFailed`: torch.compile compiles in them."""
    return failures_named("compile" if backend in COMPILE_MODES else "first runs")


@contextlib.contextmanager
def compile_cache(backend: str, folder: Path | str, cold: bool = True) -> Iterator[None]:
    """If `cold`, a backend that Inductor compiles for finds nothing inside that was compiled before."""
    cold = cold and _named(backend).by_inductor
    with runtimes.empty_cache(Path(folder)) if cold else contextlib.nullcontext():
        yield


def start(backend: str) -> None:
    """Import what a backend needs, so that the time of building it doesn't include what is paid once in a process."""
    chosen = _named(backend)
    for package in chosen.packages:
        if machine.installed(package) is not None:
            importlib.import_module(package)
    if chosen.by_inductor:
        with failures_named("compile"):
            runtimes.start_inductor()


def agree_within(backend: str, dtype: torch.dtype, *, tf32: bool = False) -> float:
    """How far a backend's outputs may be from eager's: its own bound in fp32, at least the dtype's elsewhere.

    TF32 keeps as many bits of a factor as fp16 does.
    """
    least = TOLERANCE[torch.float16] if tf32 and dtype == torch.float32 else 0.0
    return max(_named(backend).tolerance, least if dtype == torch.float32 else TOLERANCE[dtype])


def largest_difference(found: Any, reference: Any) -> float:
    """The largest absolute difference of two results, over all of their tensors."""
    pairs = zip(tensors(found), tensors(reference), strict=True)
    return max(float((ours.double() - theirs.double()).abs().max()) for ours, theirs in pairs)


def version(backend: str) -> str:
    """The release of torch, or of the package, that a row about a backend depends on."""
    *_, package = ("", *_named(backend).packages)
    release = machine.installed(package) if package else None
    return f"{package} {release}" if release else f"torch {torch.__version__}"


def _named(backend: str) -> Backend:
    check_choice(BACKENDS, backend=backend)
    return BACKENDS[backend]
