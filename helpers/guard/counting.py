"""What a training step does, counted by the line of the user's code that has it done.

    operators   those that compute or move something (views don't), by a dispatch mode; kernels that Inductor wrote
    FLOPs       by torch's formulas, of products, convolutions and attention; apart, those in 32 bits or more
    waits       what makes the host wait for a GPU; on a CPU, what would: `item`, `tolist`, `nonzero`, a mask as index …
    memory      bytes of the tensors that a step makes: saved for its backward pass, and alive at its peak
    calls       Python calls of the user's code, files opened, processes started, graph breaks, recompilations

An operator costs some 30 µs more, a Python call 0.3 µs. Nothing stays behind where a step has been counted.
"""

import contextlib
import ctypes
import functools
import gc
import os
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

from ..compilers.kernels import works, writes
from ..watching.observe import is_part, line_of, padded_positions
from .places import GENERATED, USER, Chain, Lines, kind, resumed_at

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
_READS = {f"aten::{name}" for name in _READS}
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
        self.steps = 0
        self.lines: dict[str, Counter[Chain]] = defaultdict(Counter)
        self.operators: Counter[str] = Counter()
        self.masks: list[tuple[Chain, Tensor]] = []
        self.positions = self.peak = self.launches = 0

    def operator(self, name: str, chain: Chain) -> None:
        self.operators[name] += 1
        self.lines[OPERATORS][chain] += 1

    def mask(self, real: Tensor) -> None:
        """Where a batch has real tokens (1 or True): its padding is what is left, not what ends rows of token ids."""
        self.masks.append((Lines().of(sys._getframe(1)), real.detach()))

    def of(self, counter: str) -> dict[Chain, float]:
        """A counter's number in a step by lines; of the peak, the bytes that were there."""
        return {chain: number / (1 if counter == PEAK else self.steps) for chain, number in self.lines[counter].items()}

    def a_step(self) -> dict[str, float]:
        """The number of each counter in a step."""
        if self.masks:
            self.positions, self.lines[PADDING] = sum(mask.numel() for _, mask in self.masks), Counter()
            for chain, mask in self.masks:
                self.lines[PADDING][chain] += mask.numel() - int(mask.count_nonzero())
        numbers = {counter: self.lines[counter].total() / self.steps for counter in COUNTERS}
        numbers |= {PEAK: self.peak, LAUNCHES: self.launches / self.steps}
        return numbers | {PADDING: self.lines[PADDING].total() / max(self.positions, 1)}


class Memory:
    """The bytes of the tensors that have been seen, until they are freed, by the line that made them."""

    def __init__(self, counts: Counts) -> None:
        self.live: Counter[Chain] = Counter()
        self._counts = counts
        self._known: dict[int, tuple[Any, int, Chain]] = {}
        self._total = 0
        self._rising = False
        self._older: set[int] = set()  # what the step has found
        self._stored: set[int] = set()

    def begin(self) -> None:
        self._older, self._stored = set(self._known), set()
        self._see_peak()

    def see(self, tensor: Tensor, chain: Chain) -> int:
        """The number of its storage, whose bytes count from now on; 0 if it has none."""
        try:
            storage = tensor.untyped_storage()
        except (RuntimeError, NotImplementedError):  # sparse
            return 0
        number, size = storage._cdata, storage.nbytes()
        freed, before, chain = self._known.get(number) or (weakref.ref(storage, lambda _: self._free(number)), 0, chain)
        if size != before:
            self._known[number] = freed, size, chain
            self._add(size - before, chain)
        return number

    def store(self, tensor: Tensor, chain: Chain) -> None:
        """Count a tensor that is saved for the backward pass, unless it has been there before the step."""
        number = self.see(tensor, chain)
        if number not in self._older and number not in self._stored and number:
            self._stored.add(number)
            self._counts.lines[STORED][chain] += self._known[number][1]

    def _free(self, number: int) -> None:
        _, size, chain = self._known.pop(number)
        self._older.discard(number)
        self._stored.discard(number)
        self._add(-size, chain)

    def _add(self, size: int, chain: Chain) -> None:
        if size < 0 and self._rising:
            self._see_peak()
        self._total += size
        self.live[chain] += size
        self._rising = size > 0

    def _see_peak(self) -> None:
        self._rising = False
        if self._counts.steps and self._total > self._counts.peak:
            self._counts.peak = self._total
            self._counts.lines[PEAK] = Counter(self.live)


class Operators(TorchDispatchMode):
    """Counts what torch computes, also in compiled code's calls of a library."""

    def __init__(self, counts: Counts, memory: Memory, lines: Lines, warned: list[Any]) -> None:
        super().__init__()
        self.away = False  # while something is counted, or compiled
        self._counts, self._memory, self._lines, self._warned = counts, memory, lines, warned
        self._process = os.getpid()
        self._on_gpu = torch.cuda.is_available()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """What is compiled stays compiled."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if any(map(_is_made_of_others, types)):  # whose operators are counted
            return NotImplemented
        kwargs, warned = kwargs or {}, len(self._warned)
        result = func(*args, **kwargs)
        counted = not (self.away or func.namespace == "profiler" or os.getpid() != self._process)
        if counted:
            self.away = True
            try:
                self._count(func, args, kwargs, result, warned)
            finally:
                self.away = False
        return result

    def _count(self, func: Any, args: tuple, kwargs: dict, result: Any, warned: int) -> None:
        chain, on_host = self._lines.of_operator(sys._getframe(2))
        name, lines = func._schema.name, self._counts.lines
        if self._on_gpu:
            lines[WAITS][chain] += sum("synchronizing" in str(each.message) for each in self._warned[warned:])
        else:
            lines[WAITS][chain] += not on_host and _reads(name, args)
        for tensor in _tensors((*args, *kwargs.values(), result)):
            self._memory.see(tensor, chain)
        if works(name) and writes(func._schema):
            self._counts.operator(name, chain)
        if name in ("aten::copy_", "aten::_to_copy", "aten::clone"):
            self._copied(*((args[1], args[0]) if name == "aten::copy_" else (args[0], result)), chain)
        if name == "aten::embedding" and (seen := padded_positions(args[1])):
            self._counts.positions += seen[0]
            lines[PADDING][chain] += seen[1]
        if formula := _FORMULAS.get(func._overloadpacket):
            self._multiplied(formula(*args, **kwargs, out_val=result), args, chain)
        del self._warned[warned:]

    def _copied(self, source: Tensor, target: Tensor, chain: Chain) -> None:
        if source.device.type != target.device.type:
            self._counts.lines[MOVED][chain] += target.numel() * target.element_size()
        else:
            self._counts.lines[COPIES if source.dtype == target.dtype else CASTS][chain] += 1

    def _multiplied(self, flops: int, args: tuple, chain: Chain) -> None:
        width = max(tensor.element_size() for tensor in _tensors(args) if tensor.is_floating_point())
        for counter, least in ((FLOPS, 0), (WIDE, 4), (WIDEST, 8)):
            self._counts.lines[counter][chain] += flops * (width >= least)


def _is_made_of_others(kind: Any) -> bool:
    return kind.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl


def _reads(name: str, args: tuple) -> bool:
    """Whether the host waits for an operator's result, on a GPU."""
    if name in ("aten::index", "aten::index_put_"):  # a number under a mask is filled in without a wait
        masks = any(mask is not None and mask.dtype in (torch.bool, torch.uint8) for mask in args[1])
        return masks and not (name == "aten::index_put_" and args[2].numel() == 1)
    return name in _READS


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


class Calls:
    """Told of every call of Python by `sys.setprofile`."""

    def __init__(self, counts: Counts, operators: Operators, lines: Lines) -> None:
        self._counts, self._operators, self._lines = counts, operators, lines
        self._on_gpu, self._process = torch.cuda.is_available(), os.getpid()
        self._compiling: FrameType | None = None

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if self._operators.away:
            if frame is self._compiling and event == "return":
                self._operators.away, self._compiling = False, None
        elif event == "call":
            self._called(frame)
        elif event == "c_call":
            self._called_builtin(frame, argument)

    def _called(self, frame: FrameType) -> None:
        code, caller = frame.f_code, frame.f_back
        if counter := _counter(code):
            if os.getpid() != self._process:  # a fork's
                sys.setprofile(None)
                return
            self._counts.lines[counter][self._lines.of(frame)] += 1
            if counter == RECOMPILED:
                self._operators.away, self._compiling = True, frame
        if broken := resumed_at(code):
            self._counts.lines[BREAKS][broken,] += 1
        elif caller is not None and kind(caller.f_code) == USER:
            if not is_part(code):
                self._call(caller.f_code, line_of(caller))
        elif kind(code) == USER:
            self._call(code, code.co_firstlineno)

    def _call(self, code: CodeType, line: int) -> None:
        self._counts.lines[CALLS][(code.co_filename, line),] += 1

    def _called_builtin(self, frame: FrameType, function: Any) -> None:
        what, name = kind(frame.f_code), function.__name__
        if what == USER:
            self._call(frame.f_code, line_of(frame))
        if what == GENERATED and name == "kernel":
            self._counts.operator("Inductor's kernel", self._lines.of_operator(frame)[0])
        elif name == "open" and function.__module__ in ("_io", "io", "posix", "nt"):
            self._counts.lines[FILES][self._lines.of(frame)] += 1
        elif name in _SYNCHRONIZE if self._on_gpu else name in _READ_BY and isinstance(function.__self__, Tensor):
            chain, on_host = self._lines.of_operator(frame)
            self._counts.lines[WAITS][chain] += self._on_gpu or not on_host


@functools.cache
def _counter(code: CodeType) -> str:
    """What a function of a library's is counted as, if it is."""
    names = (c for (file, name), c in _PYTHON.items() if code.co_qualname == name and code.co_filename.endswith(file))
    return next(names, "")


@contextlib.contextmanager
def counting() -> Iterator[tuple[Counts, Callable[[], None]]]:
    """Count what this thread does; the function begins a step. What comes before the first step settles memory.

    No garbage is collected meanwhile, as it would be by chance in one step or another.
    """
    counts, lines, warned = Counts(), Lines(), []
    memory = Memory(counts)
    with contextlib.ExitStack() as undo:
        if torch.cuda.is_available():
            warned = undo.enter_context(warnings.catch_warnings(record=True))
            warnings.simplefilter("always")
            undo.callback(torch.cuda.set_sync_debug_mode, torch.cuda.get_sync_debug_mode())
            torch.cuda.set_sync_debug_mode("warn")
        gc.collect()
        if gc.isenabled():
            gc.disable()
            undo.callback(gc.enable)
        operators = undo.enter_context(Operators(counts, memory, lines, warned))
        store = functools.partial(_store, memory, lines)
        undo.enter_context(saved_tensors_hooks(store, lambda tensor: tensor))
        undo.callback(sys.setprofile, sys.getprofile())
        sys.setprofile(Calls(counts, operators, lines))

        def begin() -> None:
            if not counts.steps:
                counts.clear()
                undo.enter_context(_launches(counts))
            counts.steps += 1
            memory.begin()

        yield counts, begin
    memory.begin()


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
        on_device = [e for e in profile.events() if e.device_type == DeviceType.CUDA and not e.is_user_annotation]
        counts.launches = sum(not event.name.startswith(("Memcpy ", "Memset ")) for event in on_device)


def _store(memory: Memory, lines: Lines, tensor: Tensor) -> Tensor:
    memory.store(tensor, lines.of(sys._getframe(1)))
    return tensor
