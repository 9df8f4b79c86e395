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

Times are the device's: from when it had done all that was queued before a module to when it had done the module. On
CUDA they are taken with events, and nothing waits inside a step; on the CPU with the host's clock. Backward is timed
as `recorder` says. A module called twice counts twice in a step. What activation checkpointing computes again within
backward is `recompute`, and in nobody's backward time.

Memory is weighed in warm-up steps, whose times don't count: asking for it takes the host longer than most modules
take. Without a warm-up step it is not known (NaN).
    activation_mib      what autograd keeps for a module's backward (and for what it calls), by saved-tensor hooks:
                        each storage once, for the module that kept it first, parameters and buffers left out.
    peak_mib            on CUDA: the most that was allocated during a forward call above what was allocated when it
                        began, the highest of its calls. The CPU's allocator keeps no total, so there it is NaN.
    backward_peak_mib   the same for its stretch of backward.
Weighing resets `torch.cuda`'s peak statistics: `max_memory_allocated()` counts from the last warm-up step on.

What it costs: 10 to 25 µs of the host's time for a module call with its backward, so under 5 % of a step of 20 ms in
which 40 modules are called; nothing of a GPU's time as long as the host stays ahead of it; nothing in steps that the
schedule leaves out.

Its limits: a compiled model runs without hooks, and is refused. Under `no_grad`, `nn.TransformerEncoderLayer` leaves
its fused path while a module has hooks. What a side stream does counts when the current stream meets it.
"""

import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerAction

from . import perfetto, table
from .clock import DeviceClock, HostClock
from .kept import Kept
from .recorder import Recorder
from .schedule import NONE, WARMUP, Schedule, action
from .spans import Step

# Steps whose marks are not read yet: when there are more, they are read between steps as the device has passed them.
UNREAD_STEPS = 32

_profiled: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()


class ModuleProfiler:
    """Watches the steps that the schedule chooses; `step()` ends one, and a step counts when it has been ended.

    `schedule` is a `Schedule`, or any function from a step's number to a `torch.profiler.ProfilerAction` such as
    `torch.profiler.schedule` makes. By default: one step left alone, one weighed, twenty recorded, the rest left alone.
    `name` is what the model is called in the table and in the trace.
    """

    def __init__(
        self,
        model: nn.Module,
        name: str = "model",
        schedule: Callable[[int], ProfilerAction] | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise ValueError(f"model is a {type(model).__name__}; it must be a torch.nn.Module")
        if schedule is not None and not callable(schedule):
            raise ValueError(f"schedule is {schedule!r}; it must be a Schedule or a function from a step to an action")
        named = {(f"{name}.{path}" if path else name): module for path, module in model.named_modules()}
        _check_not_compiled(named)
        if next(model.parameters(), None) is None:
            raise ValueError(f"{name!r} has no parameters, so nothing in it is trained: pass the model that holds it")
        self.name = name
        self._schedule = Schedule() if schedule is None else schedule
        self._model, self._modules, self._paths = model, list(named.values()), list(named)
        self._types = [type(module).__name__ for module in self._modules]
        self._recorder = Recorder(self._modules)
        self._inside = False
        self._number = -1  # of the step that is running; −1 before the first `with`
        self._running: Step | None = None
        self._steps: list[Step] = []

    def __enter__(self) -> "ModuleProfiler":
        if not _profiled.isdisjoint(self._modules):
            raise RuntimeError(f"{self.name!r} is being profiled already: leave that with block first")
        self._device = _device(self.name, self._tensors())
        self._clock = DeviceClock(self._device) if self._device.type == "cuda" else HostClock()
        self._steps, self._number, self._inside = [], 0, True
        _profiled.update(self._modules)
        try:
            self._begin()
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(self, *exception: Any) -> None:
        """Removes the hooks. The step that was not ended by `step()` is dropped."""
        self._leave()

    def step(self) -> None:
        """End the step that is running and begin the next."""
        if not self._inside:
            raise RuntimeError("step() outside of the with block: call it inside, at the end of each iteration")
        self._end()
        unread = [step for step in self._steps if step.times_ns is None]
        if len(unread) > UNREAD_STEPS and self._clock.done(unread[0].log[-1][1]):
            self._read(unread[0])
        self._number += 1
        self._begin()

    def summary(self) -> pd.DataFrame:
        """One row a module in the model's order, then what was "outside" of modules, then the whole "step".

        Milliseconds are sums over a module's calls in a step, and means over the middle steps: those not shorter than
        the 20th percentile nor longer than the 80th. `forward_ms`, `backward_ms`, `recompute_ms` and their sum
        `total_ms` count what a module calls. `self_ms` doesn't: it adds up to the step's. `share` is `total_ms` as a
        fraction of the step. `.attrs` has the device, the number of steps, and the median, p20 and p80 of their times.
        """
        recorded = self._recorded()
        weighed = [step for step in self._steps if step.kept is not None]
        found = table.summary(recorded, weighed[-1] if weighed else None, self._paths, self._types)
        found.attrs["device"] = str(self._device)
        return found

    def to_perfetto(self, path: str | Path) -> Path:
        """Write the watched steps as a trace that ui.perfetto.dev opens; gzipped if the name ends in .gz."""
        self._recorded()
        counter = "allocated" if self._device.type == "cuda" else "kept for backward"
        title = f"{self.name} on {self._device}"
        events = perfetto.events(self._steps, title, self._paths, self._types, counter)
        return perfetto.write(path, events, self._clock.unix_ns)

    def _begin(self) -> None:
        chosen = action(self._schedule, self._number)
        if chosen is NONE:
            self._recorder.detach()
            return
        self._running = step = Step(self._number)
        if chosen is WARMUP:
            step.kept = Kept(self._tensors(), len(self._modules))
            self._recorder.start(self._weighing(step), step.kept)
        else:
            self._recorder.start(self._clock.mark)

    def _end(self) -> None:
        log = self._recorder.stop()
        if log is not None:
            self._running.log = log
            self._steps.append(self._running)

    def _leave(self) -> None:
        self._recorder.detach()
        self._inside = False
        for module in self._modules:
            _profiled.discard(module)

    def _weighing(self, step: Step) -> Callable[[], Any]:
        """What makes a mark and notes the level of memory at it."""
        mark, device, kept = self._clock.mark, self._device, step.kept

        def on_host() -> Any:
            step.levels.append((kept.level_bytes, float("nan")))
            return mark()

        def on_device() -> Any:
            step.levels.append((torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)))
            torch.cuda.reset_peak_memory_stats(device)
            return mark()

        return on_device if device.type == "cuda" else on_host

    def _read(self, step: Step) -> None:
        step.read(self._clock.read([entry[1] for entry in step.log]))

    def _tensors(self) -> list[Tensor]:
        return [*self._model.parameters(), *self._model.buffers()]

    def _recorded(self) -> list[Step]:
        """The recorded steps, read. If there are none, an error says what to do."""
        if self._number < 0:
            raise RuntimeError("nothing was profiled: run the loop inside `with ModuleProfiler(model) as profiler:`")
        if self._number == 0:
            raise RuntimeError("step() was never called: call profiler.step() at the end of each iteration")
        unread = [step for step in self._steps if step.times_ns is None]
        if unread:
            self._clock.wait()
            for step in unread:
                self._read(step)
        recorded = [step for step in self._steps if step.kept is None]
        if not recorded:
            raise RuntimeError(f"none of the {self._number} steps was recorded: {_remedy(self._schedule)}")
        if all(len(step.spans) == 1 for step in recorded):
            raise RuntimeError(f"no module of {self.name!r} was called in a recorded step: call it, not its forward()")
        return recorded


def _remedy(schedule: Callable[[int], ProfilerAction]) -> str:
    if isinstance(schedule, Schedule):
        return f"{schedule} needs {schedule.steps_needed} or more; run more steps, or lower wait and warmup"
    return "the schedule returned RECORD for none; run more steps, or change it"


def _check_not_compiled(named: dict[str, nn.Module]) -> None:
    dynamo = sys.modules.get("torch._dynamo")  # imported by whoever compiles
    for path, module in named.items():
        if (dynamo and isinstance(module, dynamo.OptimizedModule)) or module._compiled_call_impl is not None:
            raise ValueError(f"{path!r} is compiled, and runs without hooks: profile the model before torch.compile")


def _device(name: str, tensors: list[Tensor]) -> torch.device:
    """The one device whose clock is right for the model."""
    devices = {tensor.device for tensor in tensors}
    accelerators = sorted(map(str, devices - {torch.device("cpu")}))
    if not accelerators:
        return torch.device("cpu")
    if len(accelerators) > 1 or not accelerators[0].startswith("cuda"):
        where = " and ".join(accelerators)
        raise ValueError(f"{name!r} lies on {where}; it must lie on the CPU or on one CUDA device: profile its parts")
    return torch.device(accelerators[0])
