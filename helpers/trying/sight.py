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
from torch.utils.data import DataLoader

from ..watching.observe import is_library

ATTENTION = ("flash", "mem_efficient", "math", "cudnn")
VARIABLES = re.compile(  # of the environment: what decides how fast torch is
    r"(OMP|MKL|KMP|GOMP|(PY)?TORCH|CUDA|NVIDIA|CU(BLAS|DNN)|NCCL|ONEDNN|DNNL|MALLOC|GLIBC)_|LD_PRELOAD$"
)
LOSSES = 200  # iterations whose losses are told
FACTS_FROM = 5  # iterations after which the facts are told, and again whenever their number has doubled


class Sight:
    def __init__(self, most: int = LOSSES) -> None:
        self._most = most
        self._losses: list[Tensor] = []
        self._waiting: list[list[Tensor]] = []
        self.iterations = 0
        self.facts: dict[str, Any] = {"loaders": {}, "optimizers": {}, "calls": {}, "models": {}}
        self._told_losses = 0
        self._facts_next = FACTS_FROM

    def install(self) -> None:
        self._see_losses()
        self._see_loaders()
        self._see_optimizers()
        self._see_calls()

    def forget(self) -> None:
        """The script begins anew."""
        self._losses.clear()
        self._waiting.clear()

    def iteration_ended(self, tell: Callable[..., None]) -> None:
        self.iterations += 1
        if self._told_losses < self._most:
            self._waiting.append(self._losses)
            on_gpu = any(loss.device.type != "cpu" for losses in self._waiting for loss in losses)
            if len(self._waiting) >= 4 or self.iterations <= 4 or not on_gpu:
                self.tell_losses(tell)
        self._losses = []
        if self.iterations == self._facts_next:
            self._facts_next *= 2
            devices = {each["device"] for each in self.facts["optimizers"].values()}
            self.facts |= {
                "no-anomaly-mode": torch.is_anomaly_enabled(),
                "not-deterministic": torch.are_deterministic_algorithms_enabled(),
                "environment": environment(),
                "precision": torch.get_float32_matmul_precision(),
                "threads": torch.get_num_threads(),
                "script": user_path(getattr(sys.modules["__main__"], "__file__", "")),
                "device": "cuda" if "cuda" in devices else "cpu",
            }
            tell(facts=self.facts)

    def tell_losses(self, tell: Callable[..., None]) -> None:
        tell(losses=[sum(x.double().sum().item() for x in each) if each else None for each in self._waiting])
        self._told_losses += len(self._waiting)
        self._waiting = []

    def place(self, call: str, site: tuple[str, int] | None) -> None:
        """Note that there is such a call, and where."""
        sites = self.facts["calls"].setdefault(call, [])
        if site and list(site) not in sites and len(sites) < 10:
            sites.append(list(site))

    def _see_losses(self) -> None:
        backward, scale = torch.autograd.backward, torch.amp.GradScaler.scale

        @functools.wraps(backward)
        def seen(tensors: Any, *arguments: Any, **options: Any) -> None:
            if self._told_losses < self._most:
                for tensor in (tensors,) if isinstance(tensors, Tensor) else tensors:
                    self._losses.append(getattr(tensor, "unscaled", tensor).detach().clone())
            backward(tensors, *arguments, **options)

        @functools.wraps(scale)
        def scaled(scaler: Any, outputs: Any) -> Any:
            result = scale(scaler, outputs)
            if isinstance(outputs, Tensor) and result is not outputs:
                result.unscaled = outputs.detach()
            return result

        torch.autograd.backward, torch.amp.GradScaler.scale = seen, scaled

    def _see_loaders(self) -> None:
        init, iterate, loaders = DataLoader.__init__, DataLoader.__iter__, self.facts["loaders"]

        @functools.wraps(init)
        def built(loader: DataLoader, *arguments: Any, **options: Any) -> None:
            init(loader, *arguments, **options)
            if site := site_of_caller():
                key = loader._site = f"{site[0]}:{site[1]}"
                loaders.setdefault(key, {"trains": False})
                loaders[key] |= {
                    "site": site,
                    "builder": sys._getframe(1).f_globals.get("__name__", "").partition(".")[0],
                    "workers": loader.num_workers,
                    "persistent": bool(getattr(loader, "persistent_workers", False)),
                    "pinned": bool(loader.pin_memory),
                }

        @functools.wraps(iterate)
        def iterated(loader: DataLoader) -> Any:
            if torch.is_grad_enabled() and hasattr(loader, "_site"):
                loaders[loader._site]["trains"] = True
            return iterate(loader)

        DataLoader.__init__, DataLoader.__iter__ = built, iterated

    def _see_optimizers(self) -> None:
        init = torch.optim.Optimizer.__init__

        @functools.wraps(init)
        def built(optimizer: torch.optim.Optimizer, *arguments: Any, **options: Any) -> None:
            init(optimizer, *arguments, **options)
            frame = user_frame(sys._getframe(1))
            if site := site_of(frame):
                key = f"{site[0]}:{site[1]}"
                params = [p for group in optimizer.param_groups for p in group["params"]]
                self.facts["optimizers"][key] = {
                    "site": site,
                    "kind": type(optimizer).__name__,
                    "fused": bool(optimizer.defaults.get("fused")),
                    "foreach": optimizer.defaults.get("foreach"),
                    "device": params[0].device.type if params else "cpu",
                }
                for name, model in models_at(frame, params):
                    self.facts["models"][f"{key}:{name}"] = describe(name, model, site)
            for told in WHEN_BUILT:
                told(optimizer, frame)

        torch.optim.Optimizer.__init__ = built

    def _see_calls(self) -> None:
        def zeroed(original: Callable) -> Callable:
            @functools.wraps(original)
            def zero(holder: Any, set_to_none: bool = True) -> None:
                if not set_to_none:
                    self.place("zero_grad", site_of_caller())
                original(holder, set_to_none)

            return zero

        for holder in (torch.optim.Optimizer, nn.Module):
            holder.zero_grad = zeroed(holder.zero_grad)
        torch.set_num_threads = self._placed("set_num_threads", torch.set_num_threads)
        switch = torch.use_deterministic_algorithms
        torch.use_deterministic_algorithms = self._placed("use_deterministic_algorithms", switch)
        torch.autocast.__enter__ = self._placed("autocast", torch.autocast.__enter__)
        for mode in (torch.autograd.set_detect_anomaly, torch.autograd.detect_anomaly):
            mode.__init__ = self._placed(mode.__name__, mode.__init__)

    def _placed(self, name: str, function: Callable) -> Callable:
        @functools.wraps(function)
        def called(*arguments: Any, **options: Any) -> Any:
            self.place(name, site_of_caller())
            return function(*arguments, **options)

        return called


user_path: Callable[[str], str] = str  # the user's name of a file in the scratch
WHEN_BUILT: list[Callable[[torch.optim.Optimizer, Any], None]] = []  # told of an optimizer and the frame that built it


def user_frame(frame: Any) -> Any:
    """The innermost frame of the user's code, neither a library's nor ours."""
    while frame is not None and is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def site_of(frame: Any) -> tuple[str, int] | None:
    """The file and line at which a frame is."""
    return (user_path(frame.f_code.co_filename), frame.f_lineno) if frame is not None else None


def site_of_caller() -> tuple[str, int] | None:
    return site_of(user_frame(sys._getframe(2)))


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
