"""Forward and backward time and memory of every module of a model, in a training loop, by hooks.

    with ModuleProfiler(model) as profiler:
        for batch in loader:
            loss = model(batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()
    profiler.summary()

Times are device times: from the end of the work queued before a module to the end of the module's work. On CUDA they
are taken with events, and nothing waits inside a step; on the CPU with the host's clock. A module called twice in a
step counts twice. What activation checkpointing recomputes within backward is backward.
Where torch.profiler records too, each call of a module is a range in its trace, under the module's name.

Forward: a hook before and one after each module. Backward: a hook on the node of each tensor that a module gets or
gives in tuples, lists and dicts, which says whose node is about to run; from there until the next such node, time is
that module's. Autograd runs a call's nodes one after the other. What a module computes without passing it on, or
changes in place within views, counts for the module whose backward comes before it. Nothing is inserted into the graph,
as `nn.Module`'s backward hooks do, which breaks operations in place on a module's output.

Memory is measured in warm-up steps, whose times don't count: a query takes the host longer than most modules take.
Without a warm-up step it is not known (NaN).
    activation_mib      what autograd saves for the backward of a module and of those it calls, by saved-tensor hooks:
                        each storage once, for the module that saved it first, without parameters and buffers.
    peak_mib            on CUDA: the peak of allocated memory during a forward call, above what was allocated when it
                        began; the maximum over its calls. The CPU's allocator keeps no total, so there it is NaN.
A warm-up step resets `torch.cuda`'s peak statistics: `max_memory_allocated()` counts from the last one on.

Cost: 15 to 25 µs of the host's time for a module call with its backward; no GPU time as long as the host stays ahead
of it; nothing in steps that the schedule leaves out.

Limits: a compiled model runs without hooks, and is refused. Under `no_grad`, `nn.TransformerEncoderLayer` leaves its
fused path while a module has hooks. Work on a side stream counts once the current stream waits for it.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerAction, schedule
from torch.utils._pytree import tree_leaves

from ..lab.memory import MIB
from ..lab.timing import between_ms, clock, synchronize

# Private: the id of the backward that this thread is in, or −1, and the node that is running.
_backward_id, _running_node = torch._C._current_graph_task_id, torch._C._current_autograd_node
_autograd: Any = torch._C._autograd  # whose stubs lack this query, private as well
_saved_tensors_hooks_is_enabled = _autograd._saved_tensors_hooks_is_enabled

Schedule = Callable[[int], ProfilerAction]
# The first step of most loops is slower: libraries choose their kernels, and the optimizer makes its state.
DEFAULT_SCHEDULE = schedule(wait=1, warmup=1, active=20, repeat=1)
COLUMNS = ["calls", "forward_ms", "backward_ms", "total_ms", "self_ms"]


@dataclass(eq=False, slots=True)
class Call:
    """A module's call; `begin` and `end` are indices of marks."""

    module: int
    around: "Call | None"  # which called it; of what is computed again, the caller in forward
    owner: "Owner"  # whose time it was before
    in_backward: bool  # computed again
    begin: int
    end: int = -1
    range: record_function | None = None  # in a trace of torch's profiler, while one records

    def modules(self) -> list[int]:
        """Its module and those that called it, each once."""
        modules, call = set(), self
        while call is not None:
            modules.add(call.module)
            call = call.around
        return list(modules)


Owner = tuple[Call | None, bool]  # whose time it is, and whether it is that of its backward


@dataclass(eq=False)
class Step:
    """A profiled step: the time from each mark to the next, but for the last, belongs to an owner."""

    marks: list[Any] = field(default_factory=list)
    owners: list[Owner] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    nodes: dict[int, Call | None] = field(default_factory=dict)  # a node's number, by autograd -> the call that made it
    levels: list[tuple[float, float]] = field(default_factory=list)  # of a warm-up, by mark: bytes, peak since the last
    saved: np.ndarray | None = None  # bytes for backward: of each module with what it calls, and of all


class ModuleProfiler:
    """Profiles the steps that the schedule chooses. `step()` ends a step; one that was not ended doesn't count.

    `schedule` is a function from a step's number to a `torch.profiler.ProfilerAction`, as `torch.profiler.schedule`
    makes it. By default: one step left out, one for memory, twenty recorded, the rest left out. A recorded step of 100
    module calls takes some 100 kB of the host's memory.
    `name` is what the model is called in the table.
    """

    def __init__(self, model: nn.Module, name: str = "model", schedule: Schedule = DEFAULT_SCHEDULE) -> None:
        if not isinstance(model, nn.Module):
            raise ValueError(f"model is a {type(model).__name__}; it must be a torch.nn.Module")
        self._modules = {(f"{name}.{path}" if path else name): module for path, module in model.named_modules()}
        _check_not_compiled(self._modules)
        self._tensors = [*model.parameters(), *model.buffers()]
        if next(model.parameters(), None) is None:
            raise ValueError(f"{name!r} has no parameters, so nothing in it is trained: pass the model that holds it")
        self.name, self._schedule, self._device = name, schedule, _device(name, self._tensors)
        self._handles: list[Any] = []  # of hooks on modules
        self._step: Step | None = None  # the one that is running, if it is profiled
        self._steps: list[Step] = []
        self._number, self._inside = 0, False  # of the running step; whether the with block is

    def __enter__(self) -> "ModuleProfiler":
        self._steps, self._number, self._inside = [], 0, True
        self._begin()
        return self

    def __exit__(self, *exception: Any) -> None:
        """Removes the hooks. The step that was not ended by `step()` is dropped."""
        self._inside = False
        self._detach()

    def step(self) -> None:
        """End the step that is running and begin the next."""
        if not self._inside:
            raise RuntimeError("step() outside of the with block: call it inside, at the end of each iteration")
        if self._step is not None:
            self._switch((None, False))
            self._steps.append(self._step)
        self._number += 1
        self._begin()

    def summary(self, median: bool = False) -> pd.DataFrame:
        """One row for each module in the model's order, then "outside" (of all modules), then the whole "step".

        Milliseconds are sums over a module's calls in a step, and means over the steps between the 20th and the 80th
        percentile, or, with `median`, each a median over all steps. `forward_ms`, `backward_ms` and their sum
        `total_ms` include the modules that a module calls; `self_ms` doesn't, and adds up to the step (means do).
        `share` is `total_ms` as a fraction of the step.
        `.attrs` has the device, the number of steps, and the median, p20 and p80 of their times.
        """
        recorded, paths = self._recorded(), list(self._modules)
        synchronize(self._device)
        times = np.array([_times(step, len(paths)) for step in recorded]) / [1, *[1e6] * 4]  # (steps, modules + 2, 5)
        p20, middle, p80 = np.percentile(times[:, -1, -1], [20, 50, 80])
        typical = (p20 <= times[:, -1, -1]) & (times[:, -1, -1] <= p80)
        medians = median or not typical.any()  # of two steps, which have none between them, medians are means
        values = np.median(times, axis=0) if medians else times[typical].mean(axis=0)
        table = pd.DataFrame(values, columns=COLUMNS)
        table.loc[len(paths) :, "calls"] = np.nan
        table.loc[len(paths), ["forward_ms", "backward_ms"]] = np.nan  # outside of modules there is neither
        table.insert(0, "module", [*paths, "outside", "step"])
        table.insert(1, "type", [*(type(module).__name__ for module in self._modules.values()), "", ""])
        table["share"] = table["total_ms"] / table["total_ms"].iloc[-1]
        warmups = [step for step in self._steps if step.saved is not None]
        nothing = np.full((2, len(table)), np.nan)
        table["activation_mib"], table["peak_mib"] = _memory(warmups[-1]) if warmups else nothing
        table.attrs = {"steps": len(recorded), "median_ms": float(middle), "p20_ms": float(p20), "p80_ms": float(p80)}
        table.attrs["device"] = str(self._device)
        return table

    def _recorded(self) -> list[Step]:
        """The recorded steps; an error says what to do if there are none."""
        recorded = [step for step in self._steps if step.saved is None]
        if not any(step.calls for step in recorded):
            remedy = (
                "run more steps (three by the default schedule), end each by step(), and call it, not its forward()"
            )
            raise RuntimeError(f"no module of {self.name!r} was called in a recorded step of {self._number}: {remedy}")
        return recorded

    def _begin(self) -> None:
        action = self._schedule(self._number)
        if action is ProfilerAction.NONE:
            self._detach()
            return
        self._step, self._mark = Step(), clock(self._device)
        self._saving: saved_tensors_hooks | None = None
        self._seen: dict[int, Tensor | None] = {}  # storages by address, which isn't reused while a tensor is held
        if action is ProfilerAction.WARMUP:
            self._step.saved = np.zeros(len(self._modules) + 1)
        self._callers: dict[int, Call | None] = {}  # of each module's last call
        self._backwards: dict[int, Owner] = {}  # a backward's id -> whose time it was before
        # An empty tensor registers one hook on all nodes, as `Tensor.register_hook` does, through the private
        # `_register_hook_dict`. This costs a tenth of `Node.register_prehook`.
        self._carrier = torch.empty(0, requires_grad=True)
        self._carrier._backward_hooks = {0: partial(self._reached, self._step)}
        self._switch((None, False))
        for index, (path, module) in enumerate(self._modules.items() if not self._handles else ()):
            before, after = partial(self._enter, index, path), partial(self._leave, index)
            self._handles.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
            self._handles.append(module.register_forward_hook(after, always_call=True))

    def _detach(self) -> None:
        self._step = None
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _switch(self, owner: Owner) -> None:
        """Make a mark; from here on it is this owner's time."""
        if self._step.saved is not None:
            now = peak = float("nan")
            if self._device.type == "cuda":
                now, peak = torch.cuda.memory_allocated(self._device), torch.cuda.max_memory_allocated(self._device)
                torch.cuda.reset_peak_memory_stats(self._device)
            self._step.levels.append((now, peak))
        self._step.marks.append(self._mark())
        self._step.owners.append(owner)

    def _enter(self, index: int, path: str, module: nn.Module, args: tuple, kwargs: dict) -> None:
        step, in_backward = self._step, _backward_id() >= 0
        owner = step.owners[-1]
        if self._backwards and not in_backward:  # an exception ended that backward
            owner = next(iter(self._backwards.values()))
            self._backwards.clear()
        self._watch(args[0] if len(args) == 1 and not kwargs else (args, kwargs), owner[0])
        # Hooks can't be entered where torch.autograd.graph.disable_saved_tensors_hooks is in force.
        if step.saved is not None and owner[0] is None and not in_backward and _saved_tensors_hooks_is_enabled():
            self._saving = saved_tensors_hooks(self._pack, lambda tensor: tensor)
            self._saving.__enter__()
        around = self._callers.get(index, owner[0]) if in_backward else owner[0]
        self._callers[index] = around
        call = Call(index, around, owner, in_backward, len(step.marks))
        step.calls.append(call)
        self._switch((call, in_backward))
        if torch.autograd._profiler_enabled():
            call.range = record_function(path)
            call.range.__enter__()

    def _leave(self, index: int, module: nn.Module, args: tuple, output: Any) -> None:
        step = self._step
        call = left = step.owners[-1][0]
        while left is not None and left.module != index:
            left = left.owner[0]
        if left is None:  # another pre-hook raised before `_enter` ran
            return
        at = len(step.marks)
        self._switch(left.owner)
        self._watch(output, left)
        while call is not left.owner[0]:  # after an exception those inside are left, too
            call.end = at
            if call.range is not None:
                call.range.__exit__(None, None, None)
            call = call.owner[0]
        if self._saving is not None and left.owner[0] is None:
            self._saving.__exit__()
            self._saving = None
            self._seen.clear()

    def _watch(self, passed_on: Any, call: Call | None) -> None:
        """Hook the nodes of tensors that are passed on; those that aren't yet are of this call."""
        for tensor in (passed_on,) if isinstance(passed_on, Tensor) else tree_leaves(passed_on):
            node = tensor.grad_fn if isinstance(tensor, Tensor) else None
            if node is not None and (number := node._sequence_nr()) not in self._step.nodes:
                self._step.nodes[number] = call
                node._register_hook_dict(self._carrier)

    def _reached(self, step: Step, gradient: Tensor | None) -> None:
        """A node is about to run; one of an earlier step doesn't count."""
        if step is not self._step:
            return
        backward = _backward_id()
        if backward not in self._backwards:  # the engine's private callback, called at the end of this backward
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._ended, step, backward))
            self._backwards[backward] = step.owners[-1]
        call = step.nodes[_running_node()._sequence_nr()]
        self._switch((call or self._backwards[backward][0], True))

    def _ended(self, step: Step, backward: int) -> None:
        if step is self._step and backward in self._backwards:
            self._switch(self._backwards.pop(backward))

    def _pack(self, tensor: Tensor) -> Tensor:
        """Count what autograd saves, each storage once and in full; a sparse tensor has none."""
        if tensor.layout is not torch.strided:
            return tensor
        storage = tensor.untyped_storage()
        if not self._seen:
            dense = [tensor for tensor in self._tensors if tensor.layout is torch.strided]
            self._seen = {kept.untyped_storage().data_ptr(): None for kept in dense}
        if storage.data_ptr() not in self._seen:
            self._seen[storage.data_ptr()] = tensor
            self._step.saved[[*self._step.owners[-1][0].modules(), -1]] += storage.nbytes()
        return tensor


def _device(name: str, tensors: list[Tensor]) -> torch.device:
    """The device whose clock times the model: the CPU or one CUDA device, else a ValueError."""
    devices = sorted({str(tensor.device) for tensor in tensors} - {"cpu"}) or ["cpu"]
    if len(devices) > 1 or not devices[0].startswith(("cpu", "cuda")):
        where = " and ".join(devices)
        raise ValueError(f"{name!r} lies on {where}; it must lie on the CPU or on one CUDA device: profile its parts")
    return torch.device(devices[0])


def _check_not_compiled(named: dict[str, nn.Module]) -> None:
    dynamo = sys.modules.get("torch._dynamo")  # slow to import, and loaded wherever something was compiled
    for path, module in named.items():
        if (dynamo and isinstance(module, dynamo.OptimizedModule)) or module._compiled_call_impl is not None:
            raise ValueError(f"{path!r} is compiled, and runs without hooks: profile the model before torch.compile")


def _times(step: Step, modules: int) -> np.ndarray:
    """(modules + 2, COLUMNS): of each module, outside of all and of the step; in nanoseconds, which add up exactly.

    On another stream a device can pass a mark before the preceding one: it gets that one's time.
    """
    since = np.rint([1e6 * between_ms(step.marks[0], mark) for mark in step.marks[1:]]).astype(np.int64)
    took = np.diff(np.maximum.accumulate(since), prepend=0)
    table = np.zeros((modules + 2, len(COLUMNS)))
    calls, total, alone = (COLUMNS.index(name) for name in ("calls", "total_ms", "self_ms"))
    for call in step.calls:
        table[call.module, calls] += not call.in_backward
    for (call, backward), ns in zip(step.owners, took, strict=False):
        kind = COLUMNS.index("backward_ms" if backward else "forward_ms")
        table[-2 if call is None else call.module, alone] += ns
        table[np.ix_([-2] if call is None else call.modules(), [kind, total])] += ns
        table[-1, kind] += 0 if call is None else ns
    table[-1, [total, alone]] = took.sum()
    return table


def _memory(warmup: Step) -> np.ndarray:
    """MiB (2, modules + 2): saved for backward, peak of a forward call; for each module, outside and the step."""
    *saved, in_all = warmup.saved
    levels, peaks = np.array(warmup.levels, float).T  # at each mark, and the highest since the mark before
    risen = np.full(len(saved) + 2, 0.0 * peaks[0])  # NaN where peaks are not known
    for call in warmup.calls:
        if not call.in_backward:
            rise = peaks[call.begin + 1 : call.end + 1].max() - levels[call.begin]
            risen[call.module] = np.maximum(risen[call.module], rise)
    risen[-2:] = np.nan, peaks[1:].max() - levels[0]
    return np.array([[*saved, np.nan, in_all], risen]) / MIB
