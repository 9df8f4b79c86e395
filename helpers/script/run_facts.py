"""What a process of a trial sees of its script: losses, and facts that decide which changes apply.

Everything is noted by hooks that cost microseconds. A loss is read where backward begins: without the scaler's factor,
summed over the micro-batches of an iteration. On a GPU it stays there until the turn is over.
"""

import functools
import os
import platform
import re
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from . import hooks
from .stacks import is_library

ATTENTION = ("flash", "mem_efficient", "math", "cudnn")
VARIABLES = re.compile(  # of the environment: what decides how fast torch is
    r"(OMP|MKL|KMP|GOMP|(PY)?TORCH|CUDA|NVIDIA|CU(BLAS|DNN)|NCCL|ONEDNN|DNNL|MALLOC|GLIBC)_|LD_PRELOAD$"
)
LOSSES = 200  # iterations whose losses are told
CALLS = {  # of the script's that are noted, by the name that it calls
    "set_num_threads": hooks.THREADS,
    "use_deterministic_algorithms": hooks.DETERMINISTIC,
    "autocast": hooks.AUTOCAST,
    "set_detect_anomaly": hooks.ANOMALY_SET,
    "detect_anomaly": hooks.ANOMALY_BUILT,
}
FACTS_FROM = 5  # iterations after which the facts are told, and again whenever their number has doubled


class RunFacts:
    """Tells, as keywords of `tell`, the `losses` of up to `most` iterations, and now and then the `facts`."""

    def __init__(self, tell: Callable[..., None], most: int = LOSSES) -> None:
        self._tell, self._most = tell, most
        self._losses: list[Tensor] = []  # of this iteration's backward passes
        self._waiting: list[list[Tensor]] = []
        self.iterations = 0
        self.facts: dict[str, Any] = {"loaders": {}, "optimizers": {}, "calls": {}, "models": {}}
        self._losses_told = 0
        self._facts_next = FACTS_FROM

    def install(self) -> None:
        arounds: dict[hooks.Point, Callable[..., Any]] = {
            hooks.BACKWARD: self._backward,
            hooks.SCALE: _scaled,
            hooks.LOADER_BUILT: self._loader_built,
            hooks.LOADER_BEGUN: self._loader_begun,
            hooks.OPTIMIZER_BUILT: self._optimizer_built,
            **dict.fromkeys(hooks.ZEROED, self._zeroed),
        }
        for name, point in CALLS.items():
            arounds[point] = functools.partial(self._called, name)
        hooks.wrap(arounds)

    def forget(self) -> None:
        """The script begins anew."""
        self._losses.clear()
        self._waiting.clear()

    def iteration_ended(self) -> None:
        self.iterations += 1
        if self._losses_told < self._most:
            self._waiting.append(self._losses)
            on_gpu = any(loss.device.type != "cpu" for losses in self._waiting for loss in losses)
            if len(self._waiting) >= 4 or self.iterations <= 4 or not on_gpu:
                self.tell_losses()
        self._losses = []
        if self.iterations == self._facts_next:
            self._facts_next *= 2
            devices = {optimizer["device"] for optimizer in self.facts["optimizers"].values()}
            self.facts |= {
                "no-anomaly-mode": torch.is_anomaly_enabled(),
                "not-deterministic": torch.are_deterministic_algorithms_enabled(),
                "environment": environment(),
                "precision": torch.get_float32_matmul_precision(),
                "threads": torch.get_num_threads(),
                "script": user_path(getattr(sys.modules["__main__"], "__file__", "")),
                "device": "cuda" if "cuda" in devices else "cpu",
            }
            self._tell(facts=self.facts)

    def tell_losses(self) -> None:
        sums = [sum(x.double().sum().item() for x in losses) if losses else None for losses in self._waiting]
        self._tell(losses=sums)
        self._losses_told += len(self._waiting)
        self._waiting = []

    def _backward(self, backward: Callable[..., None], tensors: Any, *arguments: Any, **options: Any) -> None:
        if self._losses_told < self._most:
            for tensor in (tensors,) if isinstance(tensors, Tensor) else tensors:
                self._losses.append(getattr(tensor, "unscaled", tensor).detach().clone())
        backward(tensors, *arguments, **options)

    def _loader_built(self, init: Callable[..., None], loader: DataLoader, *arguments: Any, **options: Any) -> None:
        init(loader, *arguments, **options)
        if site := site_of_caller():
            key = loader._site = f"{site[0]}:{site[1]}"
            self.facts["loaders"].setdefault(key, {"trains": False})
            self.facts["loaders"][key] |= {
                "site": site,
                "builder": sys._getframe(2).f_globals.get("__name__", "").partition(".")[0],
                "workers": loader.num_workers,
                "persistent": bool(getattr(loader, "persistent_workers", False)),
                "pinned": bool(loader.pin_memory),
            }

    def _loader_begun(self, iterate: Callable[[DataLoader], Any], loader: DataLoader) -> Any:
        if torch.is_grad_enabled() and hasattr(loader, "_site"):
            self.facts["loaders"][loader._site]["trains"] = True
        return iterate(loader)

    def _optimizer_built(
        self, init: Callable[..., None], optimizer: Optimizer, *arguments: Any, **options: Any
    ) -> None:
        init(optimizer, *arguments, **options)
        frame = user_frame(sys._getframe(1))
        if site := site_of(frame):
            key = f"{site[0]}:{site[1]}"
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            self.facts["optimizers"][key] = {
                "site": site,
                "kind": type(optimizer).__name__,
                "fused": bool(optimizer.defaults.get("fused")),
                "foreach": optimizer.defaults.get("foreach"),
                "device": parameters[0].device.type if parameters else "cpu",
            }
            for name, model in models_at(frame, parameters):
                self.facts["models"][f"{key}:{name}"] = describe(name, model, site)

    def _zeroed(self, zero_grad: Callable[..., None], holder: Any, set_to_none: bool = True) -> None:
        if not set_to_none:
            self._note("zero_grad")
        zero_grad(holder, set_to_none)

    def _called(self, name: str, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        self._note(name)
        return function(*arguments, **options)

    def _note(self, call: str) -> None:
        """Note that there is such a call, and where."""
        sites, site = self.facts["calls"].setdefault(call, []), site_of_caller()
        if site and list(site) not in sites and len(sites) < 10:
            sites.append(list(site))


def _scaled(scale: Callable[..., Any], scaler: Any, outputs: Any) -> Any:
    result = scale(scaler, outputs)
    if isinstance(outputs, Tensor) and result is not outputs:
        result.unscaled = outputs.detach()
    return result


user_path: Callable[[str], str] = str  # the user's name of a file in the scratch


def user_frame(frame: Any) -> Any:
    """The innermost frame of the user's code, neither a library's nor ours."""
    while frame is not None and is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def site_of(frame: Any) -> tuple[str, int] | None:
    """The file and line at which a frame is."""
    return (user_path(frame.f_code.co_filename), frame.f_lineno) if frame is not None else None


def site_of_caller() -> tuple[str, int] | None:
    return site_of(user_frame(sys._getframe(1)))


def models_at(frame: Any, params: list[Tensor]) -> list[tuple[str, nn.Module]]:
    """The outermost modules, with the names that a frame has for them, whose parameters an optimizer is given."""
    if frame is None:
        return []
    values, owner = {**frame.f_globals, **frame.f_locals}, frame.f_locals.get("self")
    if owner is not None and not isinstance(owner, nn.Module):
        values |= {f"self.{name}": value for name, value in vars(owner).items()}
    wanted = {id(param) for param in params}
    named: dict[int, tuple[str, nn.Module]] = {}
    for name, value in values.items():
        if isinstance(value, nn.Module) and any(id(param) in wanted for param in value.parameters()):
            named.setdefault(id(value), (name, value))
    inner = {id(part) for _, model in named.values() for part in model.modules() if part is not model}
    return [(name, model) for key, (name, model) in named.items() if key not in inner]


def describe(name: str, model: nn.Module, site: tuple[str, int]) -> dict[str, Any]:
    return {
        "name": name,
        "site": site,
        "convolutions": any(isinstance(part, (nn.Conv2d, nn.ConvTranspose2d)) for part in model.modules()),
        "device": next((param.device.type for param in model.parameters()), "cpu"),
        "dtype": str(next((param.dtype for param in model.parameters()), torch.float32)),
        "compiled": any(getattr(part, "_compiled_call_impl", None) for part in model.modules())
        or type(model).__name__ == "OptimizedModule",
    }


def environment() -> dict[str, str]:
    """What may differ between two environments of one machine: versions, threads, and what torch chooses by default."""
    backends = torch.backends
    facts = {
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "CUDA": torch.version.cuda,
        "cuDNN": backends.cudnn.version(),
        "numpy": np.__version__,
        "threads": torch.get_num_threads(),
        "BLAS": "".join(re.findall(r"BLAS_INFO=(\w+)", torch.__config__.show())),
        "instruction sets": backends.cpu.get_cpu_capability(),
        "fp32 products": torch.get_float32_matmul_precision(),
        "TF32 in convolutions": backends.cudnn.allow_tf32,
        "attention": [name for name in ATTENTION if getattr(backends.cuda, f"{name}_sdp_enabled", bool)()],
        "CUDA allocator": torch.cuda.is_available() and torch.cuda.get_allocator_backend(),
    }
    facts |= dict(re.findall(r"  - (.+?),?(?: Version:?| v| )(\d[\w.]*)", torch.__config__.show()))  # of libraries
    facts |= {name: value for name, value in os.environ.items() if VARIABLES.match(name)}
    return {name: str(value) for name, value in facts.items()}
