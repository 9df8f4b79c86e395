"""The training loop that the pipelines share, written so that a profile of it can be read.

What a step consists of is the pipeline's; here are the order of events, the clock and the names that a trace shows:
"load" and "validation" here, "forward", "loss", "backward", "optimizer", "metrics" in the pipelines.
"""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from helpers.lab import Timing, device
from helpers.lab.arguments import check_positive
from helpers.lab.memory import GIB
from helpers.lab.timing import between_ms, moment, synchronize

SETTLING = 5  # first steps that are not timed: start of workers, choice of kernels, compilation, recording
ENOUGH = 8  # timed steps, where steps take so long that there is no time for more

OnStep = Callable[[int, Tensor, nn.Module], Any]
Profile = Callable[[nn.Module], contextlib.AbstractContextManager]


@dataclass(frozen=True)
class Excerpt:
    """The first `steps` steps of a run, to time them; the first `settling` of them are not timed.

    It ends after `within_s` seconds if `ENOUGH` are timed by then. All of a run if `steps` is None.
    """

    steps: int | None
    settling: int = SETTLING
    within_s: float = float("inf")
    validates: bool = False

    @classmethod
    def of(cls, steps: "int | Excerpt | None") -> "Excerpt":
        """What a caller asked for: a number of steps is a run that is cut short, and validated."""
        if isinstance(steps, Excerpt):
            return steps
        check_positive(steps=1 if steps is None else steps)
        return cls(steps, validates=True)

    def ends(self, done: int, seconds: float) -> bool:
        return done == self.steps or (seconds > self.within_s and done >= self.settling + ENOUGH)


def train(
    model: nn.Module,
    batches: Callable[[int], Iterable[Any]],
    step: Callable[[Any], Tensor],
    validate: Callable[[], dict[str, float]],
    *,
    epochs: int,
    steps: int | Excerpt | None = None,
    on_step: OnStep | None = None,
    profile: Profile | None = None,
) -> dict[str, Any]:
    """Train and validate, epoch by epoch; returns what it took.

    `batches(epoch)` gives the batches on the device, `step(batch)` does all of a step and returns its loss on the
    device. `steps` ends the run after so many steps, with a validation; or see `Excerpt`. `on_step(number, loss,
    model)` comes after each step, when its gradients are still there. `profile(model)` makes a context manager around
    the loop, and its `step()` is called after each step if it has one: `lambda model: torch.profiler.profile(...)`.

    `iteration_ms` is the median from the end of a step to the end of the next, loading included; `iteration_mean_ms`
    is the mean, which is larger where a loader delivers in bursts, and what the rate follows from. `epoch_s` is the
    last whole epoch with its validation, None if `steps` cut it.
    """
    marks: list[list[Any]] = []
    number, epoch_s, found = 0, None, {}
    part, start = Excerpt.of(steps), time.perf_counter()
    on_gpu = device().type == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    with contextlib.nullcontext() if profile is None else profile(model) as profiler:
        for epoch in range(epochs):
            began, cut = time.perf_counter(), False
            marks.append([moment()])
            iterator = iter(batches(epoch))
            while not cut:
                with record_function("load"):
                    batch = next(iterator, None)
                if batch is None:
                    break
                loss = step(batch)
                marks[-1].append(moment())
                if on_step is not None:
                    on_step(number, loss, model)
                if hasattr(profiler, "step"):
                    profiler.step()
                number += 1
                cut = part.ends(number, time.perf_counter() - start)
            if part.validates or not cut:
                with record_function("validation"):
                    found = validate()
            synchronize()
            if cut:
                break
            epoch_s = time.perf_counter() - began
    return {
        "steps": number,
        **_iterations(marks, part.settling),
        "epoch_s": epoch_s,
        "peak_gib": torch.cuda.max_memory_allocated() / GIB if on_gpu else None,
        **{f"validation_{name}": value for name, value in found.items()},
    }


class RecordedStep:
    """The kernels of a step, recorded once as a CUDA graph and then replayed: one launch instead of a thousand.

    The first three calls are ordinary steps, on the stream of their own that recording asks for; the fourth is
    recorded, which runs nothing, and replayed. Every call is a training step on its own batch. A batch of another shape
    than the recorded one is an ordinary step, too. The outputs are overwritten by the next call.

    `work` takes tensors and returns tensors, does the same for each call, and reads nothing back. Its optimizer must be
    `capturable`.
    """

    def __init__(self, work: Callable[..., tuple[Tensor, ...]], warmup: int = 3) -> None:
        self.work, self.warmup = work, warmup
        self.graph: torch.cuda.CUDAGraph | None = None
        self.side = torch.cuda.Stream()

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        if self.warmup:
            self.warmup -= 1
            self.side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.side):
                outputs = self.work(*inputs)
            torch.cuda.current_stream().wait_stream(self.side)
            return outputs
        if self.graph is None:
            self.inputs = [tensor.clone() for tensor in inputs]
            graph = torch.cuda.CUDAGraph()
            # Only this thread is held to what recording allows: a loader's thread may pin memory meanwhile.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self.outputs = self.work(*self.inputs)
            self.graph = graph
        elif any(ours.shape != theirs.shape for ours, theirs in zip(self.inputs, inputs, strict=True)):
            return self.work(*inputs)
        for ours, theirs in zip(self.inputs, inputs, strict=True):
            ours.copy_(theirs)
        self.graph.replay()
        return self.outputs


def _iterations(marks: list[list[Any]], settling: int) -> dict[str, Any]:
    """Median, percentiles and mean of what lies between marks of the same epoch, without the first few."""
    samples = [between_ms(*pair) for epoch in marks for pair in itertools.pairwise(epoch)]
    settled = samples[min(settling, len(samples) // 2) :]
    if not settled:
        return {name: None for name in ("iteration_ms", "iteration_p20_ms", "iteration_p80_ms", "iteration_mean_ms")}
    timing = Timing.of(settled)
    return {
        "iteration_ms": timing.median_ms,
        "iteration_p20_ms": timing.p20_ms,
        "iteration_p80_ms": timing.p80_ms,
        "iteration_mean_ms": sum(settled) / len(settled),
        "n": timing.n,
    }
