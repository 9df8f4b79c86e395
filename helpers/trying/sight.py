"""What a process of a trial sees of its script: losses, and facts that decide which changes apply.

Everything is noted by hooks that cost microseconds. A loss is read where backward begins: without the scaler's factor,
summed over the micro-batches of an iteration. On a GPU it stays there until the turn is over.
"""

import builtins
import functools
import logging
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..watching.observe import is_library

DRAWING = {  # what of which modules costs time
    "matplotlib.figure": ("Figure", ("savefig",)),
    "torch.utils.tensorboard.writer": ("SummaryWriter", ("add_scalar", "add_histogram", "add_image", "add_figure")),
}
LOSSES = 200  # iterations whose losses are told
FACTS_FROM = 5  # iterations after which the facts are told, and again whenever their number has doubled


class Sight:
    def __init__(self) -> None:
        self._losses: list[Tensor] = []
        self._waiting: list[list[Tensor]] = []
        self.iterations = 0
        self.facts: dict[str, Any] = {"loaders": {}, "optimizers": {}, "calls": {}, "models": {}}
        self._told_losses = 0
        self._facts_next = FACTS_FROM
        self._began, self._evaluating = time.perf_counter(), 0.0

    def waited(self, seconds: float) -> None:
        """So long the process had no turn."""
        self._began += seconds

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
        if self.iterations == 1:  # what came before isn't training
            self._began = time.perf_counter()
            for call in self.facts["calls"].values():
                call["count"], call["seconds"] = 0, 0.0
        if self._told_losses < LOSSES:
            self._waiting.append(self._losses)
            on_gpu = any(loss.device.type != "cpu" for losses in self._waiting for loss in losses)
            if len(self._waiting) >= 4 or self.iterations <= 4 or not on_gpu:
                tell(losses=[sum(x.double().sum().item() for x in each) if each else None for each in self._waiting])
                self._told_losses += len(self._waiting)
                self._waiting = []
        self._losses = []
        if self.iterations == self._facts_next:
            self._facts_next *= 2
            devices = {each["device"] for each in self.facts["optimizers"].values()}
            self.facts |= {
                "elapsed": time.perf_counter() - self._began,
                "anomaly": torch.is_anomaly_enabled(),
                "deterministic": torch.are_deterministic_algorithms_enabled(),
                "draws": [module for module in DRAWING if module in sys.modules],
                "precision": torch.get_float32_matmul_precision(),
                "threads": torch.get_num_threads(),
                "script": user_path(getattr(sys.modules["__main__"], "__file__", "")),
                "device": "cuda" if "cuda" in devices else "cpu",
            }
            tell(facts=self.facts)

    def count(self, call: str, seconds: float = 0.0, site: tuple[str, int] | None = None) -> None:
        entry = self.facts["calls"].setdefault(call, {"count": 0, "seconds": 0.0, "sites": []})
        entry["count"] += 1
        entry["seconds"] += seconds
        if site and list(site) not in entry["sites"] and len(entry["sites"]) < 10:
            entry["sites"].append(list(site))

    def _see_losses(self) -> None:
        backward, scale = torch.autograd.backward, torch.amp.GradScaler.scale

        @functools.wraps(backward)
        def seen(tensors: Any, *arguments: Any, **options: Any) -> None:
            self._evaluation_ended()
            if self._told_losses < LOSSES:
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
        from torch.utils.data import DataLoader
        from torch.utils.data.dataloader import _BaseDataLoaderIter

        init, following, iterate = DataLoader.__init__, _BaseDataLoaderIter.__next__, DataLoader.__iter__
        loaders = self.facts["loaders"]

        @functools.wraps(init)
        def built(loader: DataLoader, *arguments: Any, **options: Any) -> None:
            init(loader, *arguments, **options)
            if site := site_of_caller():
                known = loaders.setdefault(f"{site[0]}:{site[1]}", {"site": site, "batches": 0, "seconds": 0.0})
                object.__setattr__(loader, "_known", known)
                known |= {
                    "builder": sys._getframe(1).f_globals.get("__name__", "").partition(".")[0],
                    "workers": loader.num_workers,
                    "persistent": bool(getattr(loader, "persistent_workers", False)),
                    "pinned": bool(loader.pin_memory),
                }

        @functools.wraps(iterate)
        def iterated(loader: DataLoader) -> Any:
            began = time.perf_counter()
            iterator = iterate(loader)
            iterator._known = getattr(loader, "_known", None)
            if iterator._known:
                iterator._known["seconds"] += time.perf_counter() - began
            return iterator

        @functools.wraps(following)
        def next_batch(iterator: Any) -> Any:
            began = time.perf_counter()
            batch = following(iterator)
            known = getattr(iterator, "_known", None)
            if known and torch.is_grad_enabled():
                known["batches"] += 1
                known["seconds"] += time.perf_counter() - began
            return batch

        DataLoader.__init__, DataLoader.__iter__, _BaseDataLoaderIter.__next__ = built, iterated, next_batch

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
                    self.count("zero_grad", site=site_of_caller())
                original(holder, set_to_none)

            return zero

        for holder in (torch.optim.Optimizer, nn.Module):
            holder.zero_grad = zeroed(holder.zero_grad)
        for name in ("save", "use_deterministic_algorithms"):
            setattr(torch, name, self._timed(name, getattr(torch, name)))
        builtins.print = self._timed("print", builtins.print)
        logging.Logger.handle = self._timed("print", logging.Logger.handle)  # type: ignore[method-assign]
        torch.autocast.__enter__ = self._timed("autocast", torch.autocast.__enter__)
        for mode in (torch.autograd.set_detect_anomaly, torch.autograd.detect_anomaly):
            mode.__init__ = self._timed(mode.__name__, mode.__init__)
        train = nn.Module.train

        @functools.wraps(train)
        def trained(module: nn.Module, mode: bool = True) -> nn.Module:
            if mode:
                self._evaluation_ended()
            elif self.iterations and not self._evaluating:
                self._evaluating = time.perf_counter()
            return train(module, mode)

        nn.Module.train = trained

    def _timed(self, name: str, function: Callable) -> Callable:
        """The function, with its calls counted, timed and placed."""

        @functools.wraps(function)
        def called(*arguments: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                self.count(name, time.perf_counter() - began, site_of_caller())

        return called

    def _evaluation_ended(self) -> None:
        if self._evaluating:
            self.count("evaluation", time.perf_counter() - self._evaluating)
            self._evaluating = 0.0


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
        "blocks": blocks_of(model),
        "compiled": any(getattr(part, "_compiled_call_impl", None) for part in model.modules())
        or type(model).__name__ == "OptimizedModule",
    }


def blocks_of(model: nn.Module) -> str:
    """The path of the longest list of modules of one type, of at least 2: a model's repeated blocks."""
    best, length = "", 1
    for path, part in model.named_modules():
        alike = isinstance(part, (nn.ModuleList, nn.Sequential)) and len({type(child) for child in part}) == 1
        if alike and len(part) > length and any(True for _ in part[0].children()):
            best, length = path, len(part)
    return best
