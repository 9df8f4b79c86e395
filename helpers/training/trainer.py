"""The trainer: a model, its optimizer and loss scale, the loss of a batch, and the step that they make.

    trainer = Trainer(model, lambda x, y: (F.mse_loss(model(x), y),), optimizer, clip=1.0)
    loss = trainer.step(x, y)          # on the device; nothing waits

A task, a setup of chapter 5's ladder and a job of many ranks are each trained by one. `advance` is the end of a step,
with or without clipping and a loss scale; `CapturedStep` is the CUDA graph of a whole one.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.profiler import record_function

WARM_UP = 3  # ordinary steps before a capture: they compile, allocate, and create the optimizer's state


class Trainer:
    """Updates the weights of a model by a batch, whose tensors are what `loss` takes.

    `loss` returns the loss first; `update` returns the same, detached, and `step` the loss alone. Backward takes the
    loss divided by `divide`. Gradients stay until the next step; with `frees` they are freed at the end of each.
    `zeros` overwrites them with zeros instead. `clip` is the largest norm of the gradients, and `norm` what it was
    before. `captures` makes the step one launch, see `CapturedStep`. `around` makes a context for each step.
    """

    def __init__(
        self,
        model: Any,
        loss: Callable[..., tuple[Tensor, ...]],
        optimizer: Optimizer,
        *,
        scaler: Any = None,
        clip: float | None = None,
        divide: int = 1,
        frees: bool = False,
        zeros: bool = False,
        captures: bool = False,
        around: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
    ) -> None:
        self.model, self.loss, self.optimizer, self.scaler = model, loss, optimizer, scaler
        self.clip, self.divide, self.frees, self.zeros = clip, divide, frees, zeros
        self.norm: Tensor | None = None
        self.captured = CapturedStep(self._update) if captures else None
        self.around = around

    def step(self, *batch: Any) -> Tensor:
        """The loss of a training step, on the device; the next captured step overwrites it."""
        return self.update(*batch)[0]

    def update(self, *batch: Any, look: Callable[[Tensor], Any] | None = None) -> tuple[Tensor, ...]:
        """`look(loss)` is called after backward, when gradients are still scaled; after a captured step at its end."""
        with self.around():
            if self.captured is None:
                return self._update(*batch, look=look)
            outputs = self.captured(*batch)
        if look is not None:
            look(outputs[0])
        return outputs

    def _update(self, *batch: Any, look: Callable[[Tensor], Any] | None = None) -> tuple[Tensor, ...]:
        if not self.frees:
            self.optimizer.zero_grad(set_to_none=not self.zeros)
        outputs = self.loss(*batch)
        with record_function("backward"):
            share = outputs[0] / self.divide if self.divide > 1 else outputs[0]
            (share if self.scaler is None else self.scaler.scale(share)).backward()
        if look is not None:
            look(outputs[0].detach())
        with record_function("optimizer"):
            self.norm = advance(self.optimizer, self.scaler, self.clip)
        if self.frees:
            self.optimizer.zero_grad(set_to_none=True)
        return tuple(output.detach() for output in outputs)


def advance(optimizer: Optimizer, scaler: Any = None, clip: float | None = None) -> Tensor | None:
    """Clip the gradients and step the optimizer, by the scaler if there is one. Returns the norm before clipping."""
    norm = None
    if clip is not None and hasattr(scaler, "clip_grad_norm_"):
        norm = scaler.clip_grad_norm_(optimizer, clip)
    elif clip is not None:
        if hasattr(scaler, "unscale_"):
            scaler.unscale_(optimizer)
        elif scaler is not None:  # a course's, which unscales in its step
            clip *= float(scaler.scale(torch.ones(())))
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        norm = torch.nn.utils.clip_grad_norm_(weights, clip)
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
    return norm


class CapturedStep:
    """The kernels of a step, captured once as a CUDA graph and then replayed: one launch instead of a thousand.

    The first three calls are ordinary steps, on a side stream as capturing requires; the fourth is captured, which runs
    nothing, and replayed. Every call is a training step on its own batch. A batch of another shape than the captured
    one is an ordinary step, too. The outputs are overwritten by the next call.

    `work` takes and returns tensors, launches the same kernels in each call, and never waits for the device. Its
    optimizer must be `capturable`.
    """

    def __init__(self, work: Callable[..., tuple[Tensor, ...]]) -> None:
        self.work, self.warm_up = work, WARM_UP
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        if self.warm_up:
            self.warm_up -= 1
            with _aside(inputs[0].device):
                return self.work(*inputs)
        if self.graph is None:
            self.inputs = [tensor.clone() for tensor in inputs]
            graph = torch.cuda.CUDAGraph()
            # Capturing restricts only this thread: a loader's thread may pin memory meanwhile.
            side = _side_stream(inputs[0].device)
            with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
                self.outputs = self.work(*self.inputs)
            self.graph = graph
        elif any(ours.shape != theirs.shape for ours, theirs in zip(self.inputs, inputs, strict=True)):
            return self.work(*inputs)
        else:
            for ours, theirs in zip(self.inputs, inputs, strict=True):
                ours.copy_(theirs)
        self.graph.replay()
        return self.outputs


@contextlib.contextmanager
def _aside(device: torch.device):
    """Work on the side stream, after what is queued and before what follows."""
    stream, current = _side_stream(device), torch.cuda.current_stream(device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        yield
    current.wait_stream(stream)


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream on which steps warm up and are captured.

    It is shared because the allocator reuses freed memory only within a stream, and cuBLAS allocates a workspace for
    each: a new stream for every step would hold all steps' activations.
    """
    return torch.cuda.Stream(device)
