"""The end of a training step, with or without clipping and a loss scale; and the CUDA graph of a whole step."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

WARM_UP = 3  # ordinary steps before a capture: they compile, allocate, and create the optimizer's state


def advance(optimizer: Optimizer, scaler: Any = None, clip: float | None = None) -> Tensor | None:
    """Clip the gradients and step the optimizer, by the scaler if there is one. Returns the norm before clipping."""
    norm = None
    if clip is not None and hasattr(scaler, "clip_grad_norm_"):
        norm = scaler.clip_grad_norm_(optimizer, clip)
    elif clip is not None:
        if scaler is not None:
            scaler.unscale_(optimizer)
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
