"""`Trainer`: a setup's model, loss and optimizer, and the training step that they make."""

import contextlib
import functools

import torch
from torch import Tensor

from helpers.lab import device as this_device

from . import checkpointing, optimizers, parts
from .setup import Setup

BEFORE_CAPTURE = 3  # steps that run as usual before one is captured: they compile, allocate, and fill the optimizer


class Trainer:
    """Trains on batches of tokens (B, T + 1), one `step` at a time.

    With `cuda_graph` the first three steps run as usual, on another stream; the fourth is captured there, and from then
    on a step is a copy of the tokens and one launch. The loss that such a step returns is overwritten by the next.
    """

    def __init__(self, setup: Setup, device: torch.device | None = None) -> None:
        self.setup, self.device = setup, device or this_device()
        if obstacle := setup.obstacle(self.device):
            raise ValueError(obstacle)
        self.model = parts.model(setup, self.device)
        self.optimizer = optimizers.build(
            setup.optimizer, self.model.parameters(), setup.learning_rate, capturable=setup.cuda_graph
        )
        self.hidden = parts.compiled(setup, self.model.hidden)
        self.head = parts.head(setup)
        self.steps = 0
        self.graph: torch.cuda.CUDAGraph | None = None

    def step(self, tokens: Tensor) -> Tensor:
        """Forward, loss, backward, clipping if asked for, optimizer, gradients freed. Returns the loss, unread."""
        expected = (self.setup.batch, self.setup.sequence + 1)
        if tuple(tokens.shape) != expected:
            raise ValueError(
                f"tokens have shape {tuple(tokens.shape)}; this setup's are (batch, sequence + 1), {expected}"
            )
        self.steps += 1
        if not self.setup.cuda_graph:
            return self._step(tokens)
        if self.graph is not None:
            self.tokens.copy_(tokens)
            self.graph.replay()
            return self.captured_loss
        return self._step_aside(tokens) if self.steps <= BEFORE_CAPTURE else self._capture(tokens)

    def loss(self, tokens: Tensor) -> Tensor:
        """The mean cross-entropy of predicting each token of (B, T + 1) from those before it."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.setup.precision == "amp-bf16"):
            x = self.hidden(tokens[:, :-1].contiguous())  # (B, T, width); other strides would be compiled anew
            return self.head(x.flatten(0, 1), self.model.head.weight, tokens[:, 1:].flatten())

    def _step(self, tokens: Tensor) -> Tensor:
        setup = self.setup
        with _products(setup.precision), checkpointing.budget(setup.checkpointing, setup.memory_budget):
            loss = self.loss(tokens)
            loss.backward()
        if setup.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), setup.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def _step_aside(self, tokens: Tensor) -> Tensor:
        """On another stream, as capturing asks of whatever runs before it."""
        stream = side_stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            loss = self._step(tokens)
        torch.cuda.current_stream(self.device).wait_stream(stream)
        return loss

    def _capture(self, tokens: Tensor) -> Tensor:
        self.tokens = tokens.clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side_stream(self.device)):  # runs nothing
            self.captured_loss = self._step(self.tokens)
        self.graph = graph
        graph.replay()
        return self.captured_loss


@functools.cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """The one stream on which steps warm up and are captured.

    The allocator keeps freed memory for the stream that it was used on, and cuBLAS a workspace for each stream that it
    has met: a new stream for every step would hold the activations of all of them.
    """
    return torch.cuda.Stream(device)


@contextlib.contextmanager
def _products(precision: str):
    """How products of fp32 numbers are computed inside; outside it is as it was."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
