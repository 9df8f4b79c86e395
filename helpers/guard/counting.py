"""What a training step does, counted by the line of the user's code that has it done.

    operators   those that compute or move something (views don't), by a dispatch mode; kernels that Inductor wrote
    FLOPs       by torch's formulas, of products, convolutions and attention; apart, those in 32 bits or more
    waits       what makes the host wait for a GPU; on a CPU, what would: `item`, `tolist`, `nonzero`, a mask as index …
    memory      bytes of the tensors that a step makes: saved for its backward pass, and alive at its peak
    calls       Python calls of the user's code, files opened, processes started, graph breaks, recompilations

An operator costs some 100 µs more, a Python call less than one. Nothing stays behind where a step has been counted.
"""

import contextlib
import ctypes
import functools
import gc
import sys
import warnings
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop, sdpa_flop

from ..lab.operators import works, writes
from ..script.stacks import is_part, line_of
from ..script.tensors import padded_positions
from .places import GENERATED, USER, Chain, Lines, kind, resumed_at, walk

FLOPS, WIDE, WIDEST = "FLOPs", "FLOPs in 32 bits or more", "FLOPs in 64 bits"
OPERATORS, LAUNCHES, WAITS, CASTS, COPIES = "operators", "kernel launches", "host waits", "casts", "copies"
MOVED, STORED, PEAK = "bytes between host and device", "bytes stored", "peak bytes"
BREAKS, RECOMPILED, PADDING = "graph breaks", "recompilations", "padding"
CALLS, WORKERS, FILES = "Python calls", "workers started", "files opened"
_OF_TORCH = (FLOPS, WIDE, WIDEST, OPERATORS, LAUNCHES, WAITS, MOVED, CASTS, COPIES, STORED, PEAK, BREAKS, RECOMPILED)
COUNTERS = (*_OF_TORCH, PADDING, CALLS, WORKERS, FILES)

_aten = torch.ops.aten
_FORMULAS = flop_registry | {
    _aten._scaled_dot_product_flash_attention_for_cpu: sdpa_flop,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: sdpa_backward_flop,
}
_READS = {"_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive"}
_READ_BY = {"tolist", "numpy", "cpu"}  # methods of a tensor that call no operator on a CPU
_SYNCHRONIZE = {"synchronize", "_cuda_synchronize"}
_PYTHON = {  # functions of libraries
    ("torch/_dynamo/convert_frame.py", "_compile"): RECOMPILED,
    ("torch/serialization.py", "_open_zipfile_writer_file.__init__"): FILES,  # opened in C++
    ("multiprocessing/process.py", "BaseProcess.start"): WORKERS,
    ("/subprocess.py", "Popen.__init__"): WORKERS,
}


class Counts:
    """Numbers by counter and line, of `steps` steps."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.steps = self.positions = self.peak = self.launches = 0
        self.lines: dict[str, Counter[Chain]] = defaultdict(Counter)
        self.operators: Counter[str] = Counter()
        self.masked = self.over = False

    def operator(self, name: str, chain: Chain) -> None:
        self.operators[name] += 1
        self.lines[OPERATORS][chain] += 1

    def mask(self, real: Tensor) -> None:
        """Where a batch has real tokens (1 or True): its padding is what is left, not what ends rows of token ids."""
        if not self.masked:
            self.masked, self.positions, self.lines[PADDING] = True, 0, Counter()
        if not self.over:
            with torch._C._DisableTorchDispatch():  # it is no part of the step
                self.lines[PADDING][walk(sys._getframe(1))[0]] += real.numel() - int(real.count_nonzero())
            self.positions += real.numel()

    def a_step(self) -> dict[str, float]:
        """The number of each counter in a step."""
        padding = self.lines[PADDING].total() / max(self.positions, 1)
        numbers = {counter: self.lines[counter].total() / self.steps for counter in COUNTERS}
        return numbers | {PEAK: self.peak, LAUNCHES: self.launches / self.steps, PADDING: padding}


class Memory:
    """The bytes of the tensors that have been seen, until they are freed, by the line that made them."""

    def __init__(self, counts: Counts, where: Lines) -> None:
        self._counts, self._where, self._total, self._rising = counts, where, 0, False
        self._live: Counter[Chain] = Counter()
        self._known: dict[int, tuple[Any, int, Chain]] = {}
        self._older: set[int] = set()  # what the step has found, and what it has stored
        self._stored: set[int] = set()

    def begin(self) -> None:
        self._see_peak()
        self._older, self._stored = set(self._known), set()

    def see(self, tensor: Tensor, chain: Chain) -> tuple[int, Chain]:
        """The number of its storage, whose bytes count from now on, and the line that made it; 0 if it has none."""
        try:
            storage = tensor.untyped_storage()
        except (RuntimeError, NotImplementedError):  # sparse
            return 0, chain
        number, size = storage._cdata, storage.nbytes()
        freed, before, chain = self._known.get(number) or (weakref.ref(storage, lambda _: self._free(number)), 0, chain)
        if size != before:
            self._known[number] = freed, size, chain
            self._add(size - before, chain)
        return number, chain

    def store(self, tensor: Tensor) -> Tensor:
        """Count a tensor that is saved for the backward pass, unless it has been there before the step."""
        chain = self._where.of(sys._getframe(1))
        number, _ = self.see(tensor, chain)
        if number in self._known and number not in self._older and number not in self._stored:
            self._stored.add(number)
            self._counts.lines[STORED][chain] += self._known[number][1]
        return tensor

    def _free(self, number: int) -> None:
        _, size, chain = self._known.pop(number)
        self._older.discard(number)
        self._stored.discard(number)
        self._add(-size, chain)

    def _add(self, size: int, chain: Chain) -> None:
        if size < 0 and self._rising:
            self._see_peak()
        self._total += size
        self._live[chain] += size
        self._rising = size > 0

    def _see_peak(self) -> None:
        if self._counts.steps and self._total > self._counts.peak:
            self._counts.peak, self._counts.lines[PEAK] = self._total, Counter(self._live)


class Counting(TorchDispatchMode):
    """Counts the operators that torch runs, also in compiled code's calls of a library, and calls of Python."""

    def __init__(self, counts: Counts, memory: Memory, where: Lines, warned: list[Any]) -> None:
        super().__init__()
        self._counts, self._memory, self._where, self._warned = counts, memory, where, warned
        self._on_gpu = torch.cuda.is_available()
        self._last: Chain = ()  # of the last operator: torch warns of some waits after it has returned
        self._compiling: FrameType | None = None

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """What is compiled stays compiled."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if any(kind.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl for kind in types):
            return NotImplemented  # a tensor made of others, whose operators are counted
        self.waited()
        result = func(*args, **(kwargs or {}))
        if self._compiling is None and func.namespace != "profiler":
            profile = sys.getprofile()
            sys.setprofile(None)  # of what is counted here
            self._count(func, args, kwargs or {}, result)
            self.waited()
            sys.setprofile(profile)
        return result

    def waited(self) -> None:
        """Count what a GPU warned of since the last operator."""
        if waits := sum("synchronizing" in str(each.message) for each in self._warned):
            self._counts.lines[WAITS][self._last] += waits
        self._warned.clear()

    def _count(self, func: Any, args: tuple, kwargs: dict, result: Any) -> None:
        chain, on_host = self._where.of_operator(sys._getframe(2))
        space, _, name = func._schema.name.partition("::")
        lines, tensors = self._counts.lines, list(_tensors((*args, *kwargs.values(), result)))
        lines[WAITS][chain] += not self._on_gpu and not on_host and _reads(name, args)
        self._last = chain
        for tensor in tensors:
            self._memory.see(tensor, chain)
        if works(func._schema.name) and writes(func._schema):
            self._counts.operator(name if space == "aten" else f"{space}::{name}", chain)
        if name in ("copy_", "_to_copy", "clone"):
            source, target = (args[1], args[0]) if name == "copy_" else (args[0], result)
            moved = source.device.type != target.device.type
            lines[MOVED][chain] += moved * target.numel() * target.element_size()
            lines[COPIES if source.dtype == target.dtype else CASTS][chain] += not moved
        if name == "embedding" and not self._counts.masked and (seen := padded_positions(args[1])):
            self._counts.positions += seen[0]
            lines[PADDING][self._memory.see(args[1], chain)[1]] += seen[1]
        if formula := _FORMULAS.get(func._overloadpacket):
            flops = formula(*args, **kwargs, out_val=result)
            width = max(tensor.element_size() for tensor in tensors if tensor.is_floating_point())
            for counter, least in ((FLOPS, 0), (WIDE, 4), (WIDEST, 8)):
                lines[counter][chain] += flops * (width >= least)

    def called(self, frame: FrameType, event: str, function: Any) -> None:
        """What `sys.setprofile` asks for."""
        if self._compiling is not None:
            if frame is self._compiling and event == "return":
                self._compiling = None
        elif event == "call":
            self._called_python(frame)
        elif event == "c_call":
            self._called_builtin(frame, function)

    def _called_python(self, frame: FrameType) -> None:
        code, caller = frame.f_code, frame.f_back
        if counter := _counter(code):
            self._counts.lines[counter][self._where.of(frame)] += 1
            self._compiling = frame if counter == RECOMPILED else None
        if broken := resumed_at(code):
            self._counts.lines[BREAKS][broken,] += 1
        elif kind(caller.f_code) == USER and not is_part(code):
            self._counts.lines[CALLS][(caller.f_code.co_filename, line_of(caller)),] += 1
        elif kind(code) == USER and not is_part(code):
            self._counts.lines[CALLS][(code.co_filename, code.co_firstlineno),] += 1

    def _called_builtin(self, frame: FrameType, function: Any) -> None:
        what, name = kind(frame.f_code), function.__name__
        if what == USER:
            self._counts.lines[CALLS][(frame.f_code.co_filename, line_of(frame)),] += 1
        if what == GENERATED and name == "kernel":
            self._counts.operator("Inductor's kernel", self._where.of_operator(frame)[0])
        elif name == "open" and function.__module__ in ("_io", "io", "posix", "nt"):
            self._counts.lines[FILES][self._where.of(frame)] += 1
        elif name in _SYNCHRONIZE if self._on_gpu else name in _READ_BY and isinstance(function.__self__, Tensor):
            chain, on_host = self._where.of_operator(frame)
            self._counts.lines[WAITS][chain] += self._on_gpu or not on_host


@functools.cache
def _counter(code: CodeType) -> str:
    """What a function of a library's is counted as, if it is."""
    names = (c for (file, name), c in _PYTHON.items() if code.co_qualname == name and code.co_filename.endswith(file))
    return next(names, "")


def _reads(name: str, args: tuple) -> bool:
    """Whether the host waits for an operator's result, on a GPU."""
    if name in ("index", "index_put_"):  # a number under a mask is filled in without a wait
        masks = any(mask is not None and mask.dtype in (torch.bool, torch.uint8) for mask in args[1])
        return masks and not (name == "index_put_" and args[2].numel() == 1)
    return name in _READS


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


@contextlib.contextmanager
def counting(counts: Counts) -> Iterator[Callable[[], None]]:
    """Count what this thread does; the function begins a step. What comes before the first step settles memory.

    No garbage is collected meanwhile, as it would be by chance in one step or another.
    """
    where, warned = Lines(), []
    memory = Memory(counts, where)
    with contextlib.ExitStack() as undo:
        if torch.cuda.is_available():
            warned = undo.enter_context(warnings.catch_warnings(record=True))
            warnings.simplefilter("always")
            undo.callback(torch.cuda.set_sync_debug_mode, torch.cuda.get_sync_debug_mode())
            torch.cuda.set_sync_debug_mode("warn")
        gc.collect()
        undo.callback(gc.enable if gc.isenabled() else gc.disable)
        gc.disable()
        mode = undo.enter_context(Counting(counts, memory, where, warned))
        undo.enter_context(saved_tensors_hooks(memory.store, lambda tensor: tensor))
        undo.callback(sys.setprofile, sys.getprofile())
        sys.setprofile(mode.called)

        def begin() -> None:
            mode.waited()
            if not counts.steps:
                counts.clear()
                undo.enter_context(_launches(counts))
            memory.begin()
            counts.steps += 1

        yield begin
        mode.waited()
    memory.begin()
    counts.over = True


@contextlib.contextmanager
def _launches(counts: Counts) -> Iterator[None]:
    """Count the kernels that a GPU is given, or a CUDA runtime without one, which only counts."""
    if not torch.cuda.is_available():
        yield
    elif hasattr(runtime := ctypes.CDLL(None), "null_launches"):
        before = runtime.null_launches()
        yield
        counts.launches = runtime.null_launches() - before
    else:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            yield
            torch.cuda.synchronize()
        kernels = [e.name for e in profile.events() if e.device_type == DeviceType.CUDA and not e.is_user_annotation]
        counts.launches = sum(not name.startswith(("Memcpy ", "Memset ")) for name in kernels)
