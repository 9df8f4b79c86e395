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
step counts twice. What activation checkpointing recomputes within backward counts as `recompute`, not as backward.
Where torch.profiler records too, each call of a module is a range in its trace, under the module's name.

Backward is timed from one tensor that modules pass on to the next: `recorder` says whose it is. Spans of backward are
not exact for operations in place on views, and for what a module computes without passing it on.

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
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerAction, schedule

from ..lab.memory import MIB
from .meters import DeviceClock, HostClock, SavedBytes
from .recorder import BACKWARD, FORWARD, RECOMPUTE, STEP, Recorder, Span

_profiled: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()

Schedule = Callable[[int], ProfilerAction]
# The first step of most loops is slower: libraries choose their kernels, and the optimizer makes its state.
DEFAULT_SCHEDULE = schedule(wait=1, warmup=1, active=20, repeat=1)
KINDS = (FORWARD, BACKWARD, RECOMPUTE)
COLUMNS = ["calls", *(f"{kind}_ms" for kind in KINDS), "total_ms", "self_ms"]


@dataclass
class Step:
    """A profiled step."""

    saved: SavedBytes | None = None  # of a warm-up step only, as are the levels
    levels: list[tuple[float, float]] = field(default_factory=list)  # for each mark: bytes now, peak since the last
    spans: list[Span] = field(default_factory=list)  # the step's, then those inside it, parents first
    marks: list[Any] = field(default_factory=list)
    times_ns: np.ndarray | None = None  # of each mark, once they have been read


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
        named = {(f"{name}.{path}" if path else name): module for path, module in model.named_modules()}
        _check_not_compiled(named)
        if next(model.parameters(), None) is None:
            raise ValueError(f"{name!r} has no parameters, so nothing in it is trained: pass the model that holds it")
        self.name = name
        self._schedule = schedule
        self._model, self._modules = model, named
        self._recorder = Recorder(named)
        self._inside = False
        self._number = 0  # of the running step
        self._running = Step()
        self._steps: list[Step] = []

    def __enter__(self) -> "ModuleProfiler":
        if not _profiled.isdisjoint(self._modules.values()):
            raise RuntimeError(f"{self.name!r} is being profiled already: leave that with block first")
        self._device = _device(self.name, self._tensors())
        self._clock = DeviceClock(self._device) if self._device.type == "cuda" else HostClock()
        self._steps, self._number, self._inside = [], 0, True
        self._begin()
        _profiled.update(self._modules.values())
        return self

    def __exit__(self, *exception: Any) -> None:
        """Removes the hooks. The step that was not ended by `step()` is dropped."""
        self._recorder.detach()
        self._inside = False
        _profiled.difference_update(self._modules.values())

    def step(self) -> None:
        """End the step that is running and begin the next."""
        if not self._inside:
            raise RuntimeError("step() outside of the with block: call it inside, at the end of each iteration")
        if self._recorder.stop():
            self._running.spans, self._running.marks = self._recorder.spans, self._recorder.marks
            self._steps.append(self._running)
        self._number += 1
        self._begin()

    def summary(self, median: bool = False) -> pd.DataFrame:
        """One row for each module in the model's order, then "outside" (of all modules), then the whole "step".

        Milliseconds are sums over a module's calls in a step, and means over the steps between the 20th and the 80th
        percentile, or, with `median`, each a median over all steps. `forward_ms`, `backward_ms`, `recompute_ms` and
        their sum `total_ms` include the modules that a module calls; `self_ms` doesn't, and adds up to the step (means
        do). `share` is `total_ms` as a fraction of the step.
        `.attrs` has the device, the number of steps, and the median, p20 and p80 of their times.
        """
        recorded, paths = self._recorded(), list(self._modules)
        times = np.array([_times(step, len(paths)) for step in recorded]) / [1, *[1e6] * 5]  # (steps, modules + 2, 6)
        p20, middle, p80 = np.percentile(times[:, -1, -1], [20, 50, 80])
        typical = (p20 <= times[:, -1, -1]) & (times[:, -1, -1] <= p80)
        medians = median or not typical.any()  # of two steps, which have none between them, medians are means
        values = np.median(times, axis=0) if medians else times[typical].mean(axis=0)
        table = pd.DataFrame(values, columns=COLUMNS)
        table.loc[len(paths) :, "calls"] = np.nan
        table.loc[len(paths), [f"{kind}_ms" for kind in KINDS]] = np.nan  # outside of modules there is neither
        table.insert(0, "module", [*paths, "outside", "step"])
        table.insert(1, "type", [*(type(module).__name__ for module in self._modules.values()), "", ""])
        table["share"] = table["total_ms"] / table["total_ms"].iloc[-1]
        warmups = [step for step in self._steps if step.saved is not None]
        nothing = np.full((2, len(table)), np.nan)
        table["activation_mib"], table["peak_mib"] = _memory(warmups[-1], len(paths)) if warmups else nothing
        table.attrs = {"steps": len(recorded), "median_ms": float(middle), "p20_ms": float(p20), "p80_ms": float(p80)}
        table.attrs["device"] = str(self._device)
        return table

    def _begin(self) -> None:
        action = self._schedule(self._number)
        if action is ProfilerAction.NONE:
            self._recorder.detach()
            return
        self._running = step = Step()
        if action is ProfilerAction.WARMUP:
            step.saved = SavedBytes(self._tensors(), len(self._modules))
            self._recorder.start(self._memory_mark(step), step.saved)
        else:
            self._recorder.start(self._clock.mark)

    def _memory_mark(self, step: Step) -> Callable[[], Any]:
        """A function that makes a mark and notes the memory at it."""
        mark, device = self._clock.mark, self._device

        def marked() -> Any:
            now = peak = float("nan")
            if device.type == "cuda":
                now, peak = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
                torch.cuda.reset_peak_memory_stats(device)
            step.levels.append((now, peak))
            return mark()

        return marked

    def _tensors(self) -> list[Tensor]:
        return [*self._model.parameters(), *self._model.buffers()]

    def _recorded(self) -> list[Step]:
        """The recorded steps, with their times read; an error says what to do if there are none."""
        if self._number == 0:
            remedy = "run the loop inside `with ModuleProfiler(model) as profiler:`, and end each iteration by step()"
            raise RuntimeError(f"nothing was profiled: {remedy}")
        unread = [step for step in self._steps if step.times_ns is None]
        if unread:
            self._clock.wait()
            for step in unread:
                step.times_ns, step.marks = self._clock.read(step.marks), []
        recorded = [step for step in self._steps if step.saved is None]
        if not recorded:
            remedy = "run more steps (three by the default schedule), or change the schedule"
            raise RuntimeError(f"none of the {self._number} steps was recorded: {remedy}")
        if all(len(step.spans) == 1 for step in recorded):
            raise RuntimeError(f"no module of {self.name!r} was called in a recorded step: call it, not its forward()")
        return recorded


def _check_not_compiled(named: dict[str, nn.Module]) -> None:
    dynamo = sys.modules.get("torch._dynamo")  # slow to import, and loaded wherever something was compiled
    for path, module in named.items():
        if (dynamo and isinstance(module, dynamo.OptimizedModule)) or module._compiled_call_impl is not None:
            raise ValueError(f"{path!r} is compiled, and runs without hooks: profile the model before torch.compile")


def _device(name: str, tensors: list[Tensor]) -> torch.device:
    """The device whose clock times the model: the CPU or one CUDA device, else a ValueError."""
    devices = sorted({str(tensor.device) for tensor in tensors} - {"cpu"}) or ["cpu"]
    if len(devices) > 1 or not devices[0].startswith(("cpu", "cuda")):
        where = " and ".join(devices)
        raise ValueError(f"{name!r} lies on {where}; it must lie on the CPU or on one CUDA device: profile its parts")
    return torch.device(devices[0])


def _times(step: Step, modules: int) -> np.ndarray:
    """(modules + 2, COLUMNS): of each module, outside of all and of the step; in nanoseconds, which add up exactly.

    A span's own time is its duration without the spans inside it.
    """
    took = {span: int(step.times_ns[span.end] - step.times_ns[span.begin]) for span in step.spans}
    own = dict(took)
    for span in step.spans[1:]:
        own[span.parent] -= took[span]
    table = np.zeros((modules + 2, len(COLUMNS)))
    calls, total, alone = COLUMNS.index("calls"), COLUMNS.index("total_ms"), COLUMNS.index("self_ms")
    whole, *inside = step.spans
    table[-2, [total, alone]], table[-1, [total, alone]] = own[whole], took[whole]
    for span in inside:
        kind = 1 + KINDS.index(span.kind)
        table[span.module, calls] += span.kind == FORWARD
        table[span.module, alone] += own[span]
        table[-1, kind] += own[span]
        enclosing, around = set(), span
        while around.parent is not None:
            if around.kind == span.kind:
                enclosing.add(around.module)  # once, even if a module calls itself
            around = around.parent
        table[np.ix_(list(enclosing), [kind, total])] += own[span]
    return table


def _memory(warmup: Step, modules: int) -> np.ndarray:
    """MiB (2, modules + 2): saved for backward, peak of a forward call; for each module, outside and the step."""
    levels, peaks = np.array(warmup.levels, float).T  # at each mark, and the highest since the mark before
    risen = np.full(modules + 2, 0.0 * peaks[0])  # NaN where peaks are not known
    for span in warmup.spans:
        if span.kind in (FORWARD, STEP):
            rise = peaks[span.begin + 1 : span.end + 1].max() - levels[span.begin]
            risen[span.module] = np.maximum(risen[span.module], rise)  # the step's module is −1
    risen[-2] = np.nan
    return np.array([[*warmup.saved.module_bytes, np.nan, warmup.saved.total_bytes], risen]) / MIB
