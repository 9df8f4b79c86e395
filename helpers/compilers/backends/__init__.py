"""One model by several runtimes: each a function of the same inputs that returns what the model returns.

    run = build("ONNX Runtime", model, (images,), folder)
    logits = run(images)

Each is built for the sizes of its example and no others, so that a batch of another size is another build. That is what
each of them does best, TensorRT and CUDA graphs want nothing else, and a program for any size that is faster at one of
them would be compared with a slower twin of itself. The price is a build for each size, which stands beside the result.

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

from helpers.lab.machine import NOT_INSTALLED, installed
from helpers.lab.timing import TOLERANCE, synchronize, tensors

from . import inductor, onnx_runtime, open_vino, tensorrt, torchscript
from .failures import ExportFailed, failures_named

__all__ = [
    "EAGER",
    "FIRST_RUNS",
    "WAYS",
    "ExportFailed",
    "Way",
    "agree_within",
    "build",
    "compiling",
    "first_runs",
    "largest_difference",
    "obstacle",
    "prepare",
    "start",
    "version",
    "way_named",
]

Example = tuple[Tensor, ...]
Run = Callable[..., Any]

EAGER, CHANNELS_LAST = "eager", "eager, channels last"
TRACE, SCRIPT = "TorchScript, trace", "TorchScript, script"
COMPILE, OVERHEAD, AUTOTUNE = "compile", "compile, reduce-overhead", "compile, max-autotune"
AOT, ONNX, OPENVINO, TENSORRT = "export + AOTInductor", "ONNX Runtime", "OpenVINO", "TensorRT"

# Calls until a way is as fast as it gets. The first compiles, but on CUDA TorchScript fuses in the second, by what it
# saw in the first, and what goes into a CUDA graph runs once as it is, is recorded next, and only then replayed.
FIRST_RUNS = 3

_ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")


@dataclass(frozen=True)
class Way:
    """How a way is prepared, what it needs, and how far from eager it may be in fp32, as ‖a − b‖ / ‖b‖."""

    prepare: Callable[[nn.Module, Example, Path, bool], Run]
    tolerance: float
    packages: tuple[str, ...] = ()
    needs_compiler: bool = False
    needs: str | None = None  # the only device that it runs on
    pictures_only: bool = False


def _channels_last(model: nn.Module, example: Example, folder: Path, tf32: bool) -> Run:
    """The weights of the model that is given are laid out anew, and each picture at each call, in its time."""
    model = model.to(memory_format=torch.channels_last)
    return lambda images: model(images.contiguous(memory_format=torch.channels_last))


# Tolerances in fp32. SAME_SUMS: the same products, added in another order. FOLDED: a batch norm's scale is multiplied
# into weights first, which rounds them once more, and a convolution may be transformed (Winograd), whose additions
# cancel. TACTICS: TensorRT takes whichever kernel is fastest, among them some that keep less.
SAME_SUMS, FOLDED, TACTICS = 1e-5, 1e-4, 1e-3

WAYS: dict[str, Way] = {
    EAGER: Way(lambda model, example, folder, tf32: model, SAME_SUMS),
    CHANNELS_LAST: Way(_channels_last, SAME_SUMS, pictures_only=True),
    TRACE: Way(lambda model, example, folder, tf32: torchscript.frozen_trace(model, example), FOLDED),
    SCRIPT: Way(lambda model, example, folder, tf32: torchscript.frozen_script(model, example), FOLDED),
    COMPILE: Way(lambda model, example, folder, tf32: inductor.compiled(model), SAME_SUMS, needs_compiler=True),
    OVERHEAD: Way(
        lambda model, example, folder, tf32: inductor.compiled(model, "reduce-overhead"),
        SAME_SUMS,
        needs_compiler=True,
        needs="cuda",  # it records CUDA graphs; elsewhere it is the default mode
    ),
    AUTOTUNE: Way(
        lambda model, example, folder, tf32: inductor.compiled(model, "max-autotune"), SAME_SUMS, needs_compiler=True
    ),
    AOT: Way(
        lambda model, example, folder, tf32: inductor.ahead_of_time(model, example, folder),
        SAME_SUMS,
        needs_compiler=True,
    ),
    ONNX: Way(
        lambda model, example, folder, tf32: onnx_runtime.session_run(model, example, folder, tf32=tf32),
        FOLDED,
        packages=_ONNX_PACKAGES,
    ),
    OPENVINO: Way(
        lambda model, example, folder, tf32: open_vino.request_run(model, example, folder),
        FOLDED,
        packages=("onnx", "onnxscript", "openvino"),
        needs="cpu",
    ),
    TENSORRT: Way(
        lambda model, example, folder, tf32: tensorrt.engine_run(model, example, folder, tf32=tf32),
        TACTICS,
        needs="cuda",
    ),
}


def obstacle(way: str, device: torch.device) -> str | None:
    """Why a way can't run on this machine, in a line for a table's status; None if it can."""
    chosen = way_named(way)
    for package in chosen.packages:
        if installed(package) is None:
            return NOT_INSTALLED + package
    if chosen.needs not in (None, device.type):
        return {"cuda": "needs CUDA", "cpu": "runs on the CPU only"}[chosen.needs]
    if chosen.needs_compiler and (reason := inductor.missing(device)):
        return reason
    if way == TENSORRT:
        return tensorrt.missing()
    if way == ONNX and device.type == "cuda":
        import onnxruntime

        if onnx_runtime.CUDA not in onnxruntime.get_available_providers():
            return NOT_INSTALLED + "onnxruntime-gpu"
    return None


def prepare(way: str, model: nn.Module, example: Example, folder: Path | str, *, tf32: bool = False) -> Run:
    """A function of inputs with the example's sizes; compilers that work when it is first called have not worked yet.

    `folder` takes what is written on the way, and must outlive the function. TF32 counts for the runtimes that don't
    follow torch's settings. Raises `ExportFailed`, or a ValueError where `obstacle` says that the way can't run.
    """
    if reason := obstacle(way, example[0].device):
        raise ValueError(f"{way}: {reason}")
    chosen = way_named(way)
    if chosen.pictures_only and example[0].dim() != 4:
        raise ValueError(f"{way} takes pictures (B, C, H, W); the input has shape {tuple(example[0].shape)}")
    fn = chosen.prepare(model, example, Path(folder), tf32)

    def run(*inputs: Tensor) -> Any:
        with torch.inference_mode():
            return fn(*inputs)

    return run


def build(
    way: str, model: nn.Module, example: Example, folder: Path | str, *, tf32: bool = False, cold: bool = True
) -> Run:
    """Like `prepare`, and the first calls are done: whatever is compiled is compiled, from an empty cache if `cold`."""
    with compiling(way, folder, cold):
        run = prepare(way, model, example, folder, tf32=tf32)
        with first_runs(way):
            for _ in range(FIRST_RUNS):
                run(*example)
            synchronize()
    return run


def first_runs(way: str) -> contextlib.AbstractContextManager[None]:
    """What fails in a way's first calls is that way's failure, in a line."""
    return failures_named("compile" if way in (COMPILE, OVERHEAD, AUTOTUNE) else "first runs")


@contextlib.contextmanager
def compiling(way: str, folder: Path | str, cold: bool = True) -> Iterator[None]:
    """Where Inductor has a part in a way, what it made before doesn't count inside, if `cold`."""
    with inductor.empty_cache(Path(folder)) if cold and way_named(way).needs_compiler else contextlib.nullcontext():
        yield


def start(way: str) -> None:
    """Import what a way needs, so that building it isn't charged with that: it is paid once in a process."""
    for package in way_named(way).packages:
        importlib.import_module(package)
    if way_named(way).needs_compiler:
        with failures_named("compile"):
            inductor.start()


def agree_within(way: str, dtype: torch.dtype, *, tf32: bool = False) -> float:
    """How far a way's outputs may be from eager's: its own bound in fp32, at least the dtype's elsewhere.

    TF32 keeps as many bits of a factor as fp16 does.
    """
    least = TOLERANCE[torch.float16] if tf32 and dtype == torch.float32 else 0.0
    return max(way_named(way).tolerance, least if dtype == torch.float32 else TOLERANCE[dtype])


def largest_difference(found: Any, reference: Any) -> float:
    """The largest absolute difference of two results, over all of their tensors."""
    pairs = zip(tensors(found), tensors(reference), strict=True)
    return max(float((ours.double() - theirs.double()).abs().max()) for ours, theirs in pairs)


def version(way: str) -> str:
    """Whose release a row about a way depends on."""
    package = {ONNX: "onnxruntime", OPENVINO: "openvino", TENSORRT: tensorrt.PACKAGE}.get(way)
    if package is None or installed(package) is None:
        return f"torch {torch.__version__}"
    return f"{package} {installed(package)}"


def way_named(way: str) -> Way:
    if way not in WAYS:
        raise ValueError(f"unknown way {way!r}; valid: {'; '.join(WAYS)}")
    return WAYS[way]
