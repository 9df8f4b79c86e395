"""Forward and backward time and memory of every module of a model, in a training loop, by hooks.

    with ModuleProfiler(model) as profiler:
        for batch in loader:
            loss = model(batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()
    profiler.summary()
    profiler.to_perfetto("trace.json.gz")

Times are device times: from the end of the work queued before a module to the end of the module's work. On CUDA they
are taken with events, and nothing waits inside a step; on the CPU with the host's clock. `recorder` explains how
backward is timed. A module called twice in a step counts twice. What activation checkpointing recomputes within
backward counts as `recompute`, not as backward.

Memory is measured in warm-up steps, whose times don't count: a query takes the host longer than most modules take.
Without a warm-up step it is not known (NaN).
    activation_mib      what autograd saves for the backward of a module and of those it calls, by saved-tensor hooks:
                        each storage once, for the module that saved it first, without parameters and buffers.
    peak_mib            on CUDA: the peak of allocated memory during a forward call, above what was allocated when it
                        began; the maximum over its calls. The CPU's allocator keeps no total, so there it is NaN.
    backward_peak_mib   the same during its backward.
A warm-up step resets `torch.cuda`'s peak statistics: `max_memory_allocated()` counts from the last one on.

Cost: 10 to 25 µs of the host's time for a module call with its backward, so under 5 % of a step of 20 ms in which 40
modules are called; no GPU time as long as the host stays ahead of it; nothing in steps that the schedule leaves out.

Limits: a compiled model runs without hooks, and is refused. Under `no_grad`, `nn.TransformerEncoderLayer` leaves its
fused path while a module has hooks. Work on a side stream counts once the current stream waits for it.
"""

import gzip
import json
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerAction, schedule

from ..lab import files
from ..lab.memory import MIB
from .meters import DeviceClock, HostClock, SavedBytes
from .recorder import Recorder
from .spans import BACKWARD, FORWARD, RECOMPUTE, STEP, Step, summary

_profiled: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()

Schedule = Callable[[int], ProfilerAction]
# The first step of most loops is slower: libraries choose their kernels, and the optimizer makes its state.
DEFAULT_SCHEDULE = schedule(wait=1, warmup=1, active=20, repeat=1)

# The trace of `to_perfetto`: one process, three tracks.
PROCESS = 1
TRACKS = {STEP: 1, FORWARD: 2, BACKWARD: 3, RECOMPUTE: 3}


class ModuleProfiler:
    """Profiles the steps that the schedule chooses. `step()` ends a step; one that was not ended doesn't count.

    `schedule` is a function from a step's number to a `torch.profiler.ProfilerAction`, as `torch.profiler.schedule`
    makes it. By default: one step left out, one for memory, twenty recorded, the rest left out. A recorded step of 100
    module calls takes some 100 kB of the host's memory.
    `name` is what the model is called in the table and in the trace.
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
        self._model, self._modules, self._paths = model, list(named.values()), list(named)
        self._types = [type(module).__name__ for module in self._modules]
        self._recorder = Recorder(self._modules)
        self._inside = False
        self._number = 0  # of the running step
        self._running: Step | None = None
        self._steps: list[Step] = []

    def __enter__(self) -> "ModuleProfiler":
        if not _profiled.isdisjoint(self._modules):
            raise RuntimeError(f"{self.name!r} is being profiled already: leave that with block first")
        self._device = _device(self.name, self._tensors())
        self._clock = DeviceClock(self._device) if self._device.type == "cuda" else HostClock()
        self._steps, self._number, self._inside = [], 0, True
        self._begin()
        _profiled.update(self._modules)
        return self

    def __exit__(self, *exception: Any) -> None:
        """Removes the hooks. The step that was not ended by `step()` is dropped."""
        self._recorder.detach()
        self._inside = False
        _profiled.difference_update(self._modules)

    def step(self) -> None:
        """End the step that is running and begin the next."""
        if not self._inside:
            raise RuntimeError("step() outside of the with block: call it inside, at the end of each iteration")
        log = self._recorder.stop()
        if log is not None:
            self._running.log = log
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
        recorded = self._recorded()
        warmups = [step for step in self._steps if step.saved is not None]
        table = summary(recorded, warmups[-1] if warmups else None, self._paths, self._types, median)
        table.attrs["device"] = str(self._device)
        return table

    def to_perfetto(self, path: str | Path) -> Path:
        """Write the profiled steps as a trace for ui.perfetto.dev and chrome://tracing; gzipped if `path` ends in .gz.

        Chrome's trace-event format: three tracks (steps, forward, backward) of properly nested spans, and on CUDA the
        memory of warm-up steps as a counter. Recomputation by checkpointing is shown in the backward track. The file is
        written completely or not at all.
        """
        path = Path(path)
        self._recorded()
        events = []
        for step in self._steps:
            events += _span_events(step, self._paths, self._types)
            if self._device.type == "cuda":
                events += _level_events(step)
        events.sort(key=lambda event: (event["ts"], -event.get("dur", 0)))  # enclosing spans before those inside
        events = _track_names(f"{self.name} on {self._device}") + events
        trace = {"displayTimeUnit": "ms", "baseTimeNanoseconds": self._clock.unix_ns, "traceEvents": events}
        data = json.dumps(trace, separators=(",", ":"), allow_nan=False).encode()
        return files.write(path, gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)

    def _begin(self) -> None:
        action = self._schedule(self._number)
        if action is ProfilerAction.NONE:
            self._recorder.detach()
            return
        self._running = step = Step(self._number)
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
                step.read(self._clock.read([entry[1] for entry in step.log]))
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


def _track_names(title: str) -> list[dict[str, Any]]:
    events = [{"ph": "M", "name": "process_name", "pid": PROCESS, "tid": 0, "args": {"name": title}}]
    for kind in (STEP, FORWARD, BACKWARD):
        events.append({"ph": "M", "name": "thread_name", "pid": PROCESS, "tid": TRACKS[kind], "args": {"name": kind}})
    return events


def _span_events(step: Step, paths: list[str], types: list[str]) -> list[dict[str, Any]]:
    events = []
    about: dict[str, Any]
    for span in step.spans:
        if span.kind == STEP:
            name, about = f"step {step.number}", {"recorded": step.saved is None}
        else:
            name, about = paths[span.module], {"type": types[span.module]}
        begin, end = step.times_ns[span.begin] / 1000, step.times_ns[span.end] / 1000  # µs, the unit of the format
        event = {"ph": "X", "name": name, "cat": span.kind, "pid": PROCESS, "tid": TRACKS[span.kind]}
        events.append(event | {"ts": begin, "dur": end - begin, "args": {"step": step.number, **about}})
    return events


def _level_events(step: Step) -> list[dict[str, Any]]:
    """Events of the memory counter; of several levels at one time, the last."""
    levels = {int(time): level for time, (level, _) in zip(step.times_ns, step.levels, strict=False)}
    common = {"ph": "C", "name": "allocated (MiB)", "pid": PROCESS, "tid": 0}
    return [common | {"ts": time / 1000, "args": {"mib": level / MIB}} for time, level in levels.items()]
