"""What a training does while nothing slows it: where its wall time goes, line by line, and what no operator shows.

A thread looks at the stack of the thread that trains, a hundred times a second, and charges the time since its last
look to the innermost line of the user's code, and to what a library does for it there: waiting for the loader, saving,
drawing. A library's own time goes to the line that called it. Beside that are counted: the time of each iteration, the
memory of the process and the device, padded positions of what embeddings are given, garbage collections, compilations.

A look costs some 20 µs. What is patched (`nn.Module.train`, `torch.no_grad`, embeddings) costs less than a microsecond.
"""

import contextlib
import ctypes
import functools
import gc
import random
import re
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Generator, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ..lab.memory import RESIDENT, system_bytes
from . import run_script

PERIOD_S = 0.01
# A thread that waits for the interpreter's lock gets it at the next operator, which gives it up, or after this time. By
# Python's default, 5 ms, most looks would fall on operators, however long the Python before them took.
SWITCH_S = 1e-5
COMPUTING, DATASET, LOADING, EVALUATING = "computing", "in the dataset", "waiting for the loader", "evaluating"
SAVING, DRAWING, LOGGING, COMPILING = "saving", "drawing", "logging", "compiling"
COMMUNICATING, BACKWARD, OPTIMIZER, RECOMPUTING = "communicating", "backward", "optimizer", "recomputing activations"
# Of the innermost frame that one of these matches: what a library does.
_ACTIVITIES = (
    (r"/torch/utils/data/", ".*", LOADING),
    (r"/torch/serialization\.py|/safetensors/", "_?(legacy_)?save.*|serialize.*", SAVING),
    (r"/(matplotlib|plotly|seaborn|imageio)/", ".*", DRAWING),
    (r"/(logging|tqdm|rich|wandb|mlflow|loguru|tensorboardX?|torch/utils/tensorboard)/", ".*", LOGGING),
    (r"/torch/(_dynamo/convert_frame|_inductor/compile_fx)\.py", ".*", COMPILING),
    (r"/torch/distributed/distributed_c10d\.py", ".*", COMMUNICATING),
    (r"/torch/utils/checkpoint\.py", "recompute_fn|unpack_hook|backward", RECOMPUTING),
    (r"/torch/autograd/graph\.py", "_engine_run_backward", BACKWARD),
    (r"/torch/optim/", ".*", OPTIMIZER),
)
_EVALUATES = re.compile(r"(^|_)(eval|evaluate|evaluation|valid|validate|validation|test)(_|$)")
_LIBRARY = re.compile(r"^<|/(site|dist)-packages/|/c[a-z2-7]{51}\.py$")  # the last is what Inductor has written
_STANDARD = f"{sys.base_prefix}/lib/python"
_OURS = str(Path(__file__).resolve().parents[1]) + "/"
_SCRIPT_RUNNER = run_script.run_script.__code__.co_filename  # what is outside of it isn't the script's
_SET_TIMER_SLACK = 29
BATCHES, LOOKS = 8, 32  # whose padding is counted; inputs of embeddings that are looked at, each a wait on a GPU
USER = "user"
COUNTED = ("memory", "epochs", "evaluations", "garbage_s", "backwards", "retained", "anomaly", "unclaimed")
DEEPER = {"__enter__": 1, "__exit__": -1}  # by how many blocks without gradients


def looks(thread: int, ended: threading.Event) -> Iterator[tuple[float, float, FrameType]]:
    """A hundred times a second: when the last look was, when this one is, and the thread's innermost frame."""
    with contextlib.suppress(OSError, AttributeError):
        # Linux wakes this thread when its wait is over, not up to 50 µs later to save power.
        ctypes.CDLL(None).prctl(_SET_TIMER_SLACK, 1)
    began = time.perf_counter()
    while not ended.wait(PERIOD_S * (0.5 + random.random())):  # at odd times, or a loop might be in step
        now, frame = time.perf_counter(), sys._current_frames().get(thread)
        if frame is not None:
            yield began, now, frame
        began = now


class Observer:
    """Told of each iteration's end by the thread that trains, which it looks at between `start` and `stop`."""

    def __init__(self) -> None:
        self.seconds: Any = Counter()  # (function, line, activity) -> charged
        self.iterations: deque[float] = deque(maxlen=5000)  # seconds of each
        self.memory: list[tuple[int, int, int]] = []  # iteration, bytes of the process, of the device
        self.observed_s = 0.0  # of all iterations
        self.epochs = 0  # that began after the first iteration
        self.evaluations = 0
        self.garbage_s = 0.0
        self.backwards = self.retained = 0  # backward passes, and those that kept their graph
        self.anomaly = False
        self.unclaimed: tuple[str, int, float, bool] | None = None  # what `unclaimed` returns
        self.padding: list[tuple[int, int, int]] = []  # positions, padded ones, those beyond a batch's longest sample
        self.looks = 0  # for padding
        self.calls: Counter[CodeType] = Counter()  # of each function of the user's, in an iteration
        self.away = 1  # until it starts, and as often as `looking_away` is entered
        self.count = 0
        self._last = 0.0  # when the iteration began
        self._turned = self._away_s = 0.0  # when it last turned away or back, and the seconds away until then
        self._evaluating = False
        self._no_grad = 0
        self._collecting = 0.0
        self._thread = 0
        self._ended = threading.Event()
        self._looking: threading.Thread | None = None

    def start(self) -> None:
        """Look at this thread from now on."""
        self._thread = threading.get_ident()
        self._last = self._turned = time.perf_counter()
        self.away = 0
        self._looking = threading.Thread(target=self._look, name="observer", daemon=True)
        self._looking.start()

    def stop(self) -> None:
        self._ended.set()
        if self._looking is not None:
            self._looking.join(1.0)

    @contextlib.contextmanager
    def looking_away(self) -> Iterator[None]:
        """Charge what is done in here to nothing: what is ours, or slowed by us."""
        self._turn(1)
        try:
            yield
        finally:
            self._turn(-1)

    def _turn(self, by: int) -> None:
        self._away_s = self._away_until(now := time.perf_counter())
        self._turned = self._last = now
        self.away += by

    def _away_until(self, now: float) -> float:
        """Seconds looked away until now, those too that no look fell into."""
        return self._away_s + (now - self._turned if self.away else 0.0)

    def iteration_ended(self) -> None:
        if self._looking is None:
            self.start()
            return
        self._evaluating = False
        if self.away:
            return
        now = time.perf_counter()
        self.count += 1
        self.observed_s += now - self._last
        self.anomaly = torch.is_anomaly_enabled()
        self.iterations.append(now - self._last)
        self._last = now
        if self.count % max(1, self.count // 100) == 0:
            on_device = torch.cuda.memory_allocated() if torch.cuda.is_initialized() else 0
            self.memory.append((self.count, system_bytes(RESIDENT), on_device))

    def _look(self) -> None:
        away = 0.0
        for began, now, frame in looks(self._thread, self._ended):
            before, away = away, self._away_until(now)
            if not self.away:
                activity, code, line = read_stack(frame)
                activity = EVALUATING if self._evaluating and self._no_grad else activity
                if code.co_filename.startswith(_OURS):  # the script has ended
                    continue
                self.seconds[code, line, activity] += max(now - began - (away - before), 0.0)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """See evaluations, epochs, padding and garbage collections."""
        train, iterate, embed = nn.Module.train, DataLoader.__iter__, nn.Embedding.forward
        backward = torch.autograd.backward

        @functools.wraps(train)
        def trained(module: nn.Module, mode: bool = True) -> nn.Module:
            if self.count and threading.get_ident() == self._thread:
                self.evaluations += not mode and not self._evaluating
                self._evaluating = not mode
            return train(module, mode)

        @functools.wraps(iterate)
        def iterated(loader: DataLoader) -> Any:
            self.epochs += bool(self.count) and torch.is_grad_enabled()
            return iterate(loader)

        @functools.wraps(embed)
        def embedded(module: nn.Embedding, input: Tensor) -> Tensor:
            plain = self.count and not self.away and not torch.compiler.is_compiling()
            if plain and len(self.padding) < BATCHES and self.looks < LOOKS:
                self.looks += 1
                self.padding += filter(None, [padded_positions(input)])
            return embed(module, input)

        @functools.wraps(backward)
        def gone_back(*arguments: Any, **options: Any) -> None:
            if not self.away:
                self.backwards += 1
                self.retained += bool(options.get("retain_graph", len(arguments) > 2 and arguments[2]))
            backward(*arguments, **options)

        def deepening(method: Any, by: int) -> Any:
            @functools.wraps(method)
            def passed(mode: Any, *error: Any) -> Any:
                self._no_grad += by
                return method(mode, *error)

            return passed

        def collected(phase: str, _about: dict) -> None:
            if phase == "start":
                self._collecting = time.perf_counter()
            elif not self.away and threading.get_ident() == self._thread:
                self.garbage_s += time.perf_counter() - self._collecting

        replaced: list[tuple[Any, str, Any]] = [(nn.Module, "train", trained), (DataLoader, "__iter__", iterated)]
        replaced += [(nn.Embedding, "forward", embedded), (torch.autograd, "backward", gone_back)]
        for mode in (torch.no_grad, torch.inference_mode):
            replaced += [(mode, name, deepening(getattr(mode, name), by)) for name, by in DEEPER.items()]
        with contextlib.ExitStack() as undo:
            for holder, name, function in replaced:
                undo.enter_context(mock.patch.object(holder, name, function))
            gc.callbacks.append(collected)
            undo.callback(gc.callbacks.remove, collected)
            undo.callback(sys.setswitchinterval, sys.getswitchinterval())
            sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_S))
            undo.callback(self.stop)
            yield

    def data(self) -> dict[str, Any]:
        """What was seen, for JSON."""
        lines = [
            [code.co_filename, line, code.co_name, activity, seconds, self.calls[code]]
            for (code, line, activity), seconds in self.seconds.most_common(200)
        ]
        return {
            "seconds": sum(self.seconds.values()),
            "iterations": list(self.iterations),
            "lines": lines,
            "device_bytes": torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_initialized() else 0,
            "padding": [sum(counts) for counts in zip(*self.padding, strict=True)],
            "recompiles": recompiles(),
        } | {name: getattr(self, name) for name in COUNTED}


def read_stack(frame: FrameType) -> tuple[str, CodeType, int]:
    """What the thread is doing, and the user's function and line that has it done.

    In a loader's iterator the user's code is the dataset's; a library's frames inside the user's call are the call's.
    Whatever a function does that is called `evaluate`, `validate_epoch` or `test`, it evaluates.
    """
    activity, user, outer = "", None, frame
    current: FrameType | None = frame
    while current is not None and current.f_code.co_filename != _SCRIPT_RUNNER:
        code, kind = current.f_code, _kind(current.f_code)
        if kind in (USER, EVALUATING):
            if user is None or is_part(user[0]):
                user = code, line_of(current)
            activity = kind if kind == EVALUATING else activity
        elif kind == LOADING and user is not None and not activity:
            activity = DATASET
        elif kind and not activity and not (kind == OPTIMIZER and user is not None):
            activity = kind
        current = current.f_back
    return activity or COMPUTING, *(user or (outer.f_code, line_of(outer)))


def line_of(frame: FrameType) -> int:
    """The line that runs; the function's first where the interpreter is between two."""
    return frame.f_lineno or frame.f_code.co_firstlineno


def is_part(code: CodeType) -> bool:
    """Whether it is a comprehension or the like, which is part of the function around it."""
    return code.co_name.startswith("<") and code.co_name != "<module>"


@functools.cache
def _kind(code: CodeType) -> str:
    """USER or EVALUATING for the user's, what a library's function does, or "" for one of no interest."""
    name = code.co_filename
    if not is_library(name):
        return EVALUATING if _EVALUATES.search(code.co_name) else USER
    for path, function, activity in _ACTIVITIES:
        if re.search(path, name) and re.fullmatch(function, code.co_name):
            return activity
    return ""


@functools.cache
def is_library(name: str) -> bool:
    """Whether a file is not the user's: installed, of Python's own, made up, or ours."""
    return is_installed(name) or name.startswith(_OURS)


@functools.cache
def is_installed(name: str) -> bool:
    """Whether a file is installed, of Python's own, or made up."""
    return bool(_LIBRARY.search(name)) or name.startswith((_STANDARD, torch.__path__[0]))


def padded_positions(ids: Tensor) -> tuple[int, int, int] | None:
    """Positions of a batch of token ids (B, T), those in constant ends of rows, and those that all rows have there.

    None if the ids are no such batch, or all rows are constant, such as types of tokens.
    """
    if ids.dim() != 2 or ids.is_floating_point() or min(ids.shape) < 2 or not torch.is_grad_enabled():
        return None
    ids = ids.detach().cpu()
    most, shared = 0, 0
    for flipped in (ids.flip(1), ids):  # padded behind, and before
        runs = flipped.eq(flipped[:, :1]).long().cumprod(1).sum(1)
        if bool((runs == ids.shape[1]).all()):
            return None
        padding = flipped[:, 0].mode().values
        runs = runs.where(flipped[:, 0].eq(padding) & (runs > 1), 0)
        if int(runs.sum()) > most:
            most, shared = int(runs.sum()), int(runs.min()) * ids.shape[0]
    return ids.numel(), most, shared


def unclaimed() -> Generator[None, None, tuple[str, int, float, bool] | None]:
    """Of the weights that get gradients in the next iteration, those that no optimizer has: a module, number, share.

    The share is of all numbers that get gradients; the last tells whether the module holds weights that an optimizer
    has, such as adapters, so that gradients pass through it all the same. Embeddings don't count, whose gradients cost
    little for their size.
    """
    objects = gc.get_objects()
    optimizers = [each for each in objects if issubclass(type(each), torch.optim.Optimizer)]
    taken = {id(weight) for each in optimizers for group in each.param_groups for weight in group["params"]}
    modules = [each for each in objects if issubclass(type(each), nn.Module) and "_parameters" in vars(each)]
    inner = [module._parameters.values() for module in modules if not isinstance(module, nn.Embedding)]
    weights = {weight for each in inner for weight in each if weight is not None}
    trained = [weight for weight in weights if weight.requires_grad and weight.is_leaf]
    del objects  # which would keep all of this iteration's tensors
    reached: dict[Tensor, int] = {}
    hooks = [w.register_post_accumulate_grad_hook(lambda w: reached.update({w: w.numel()})) for w in trained]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    gone = {weight: size for weight, size in reached.items() if id(weight) not in taken}
    if not gone or not taken:
        return None
    sizes = [sum(gone.get(weight, 0) for weight in module.parameters()) for module in modules]
    most = [module for module, size in zip(modules, sizes, strict=True) if size == max(sizes)]
    module = min(most, key=lambda module: len(list(module.parameters())))
    passed = any(id(weight) in taken for weight in module.parameters())
    return type(module).__name__, len(gone), sum(gone.values()) / sum(reached.values()), passed


def recompiles() -> list[str]:
    """Why torch.compile compiled functions again, each reason once."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    reasons = [each.recompile_reason for each in dynamo.get_compilation_metrics()] if dynamo else []
    return [" ".join(reason.split())[:200] for reason in reasons if reason]
