"""`Trainer`: a setup's model, loss and optimizer, and the training step that they make.

Activation checkpointing (`checkpointing` of a setup): what the blocks save for backward, and what they compute again.

none            all that autograd saves
full            a block's input; backward runs the whole block again (a third more products)
selective       what products and attention return; only the cheap things between them run again
memory budget   the compiler saves the given share of what it would save, and chooses what
"""

import contextlib
import functools
import types
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from helpers.lab import device as this_device
from helpers.lab.precision import fp32_products
from helpers.models import Llama
from helpers.models.llama import eager_attention, eager_rms_norm, eager_rotate
from helpers.swiglu import MemoryOptimizedSwigluMLP

from . import chunked_loss, float8, optimizers
from .setup import Setup

BEFORE_CAPTURE = 3  # steps that run as usual before one is captured: they compile, allocate, and fill the optimizer

BACKENDS = {
    "math": SDPBackend.MATH,  # torch's reference: products and a softmax, all scores in memory
    "flash": SDPBackend.FLASH_ATTENTION,  # FlashAttention-2; on a CPU torch's own of the same idea
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}

# The operators whose results selective checkpointing saves: matrix products and attention, by torch's internal names.
SAVED_OPERATORS = {
    getattr(torch.ops.aten, name).default
    for name in (
        "mm",
        "bmm",
        "addmm",
        "_scaled_mm",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_efficient_attention",
    )
}


class Trainer:
    """Trains on batches of tokens (B, T + 1), one `step` at a time.

    With `cuda_graph` the first three steps run as usual, on another stream; the fourth is captured there, and from then
    on a step is a copy of the tokens and one launch. The loss that such a step returns is overwritten by the next.
    """

    def __init__(self, setup: Setup, device: torch.device | None = None) -> None:
        self.setup, self.device = setup, device or this_device()
        if reason := setup.missing_because(self.device):
            raise ValueError(reason)
        self.model = build_model(setup, self.device)
        self.optimizer = optimizers.build(
            setup.optimizer,
            self.model.parameters(),
            lr=setup.learning_rate,
            betas=(0.9, 0.95),  # this and the decay are those that large models are trained with
            weight_decay=0.1,
            capturable=setup.cuda_graph,
        )
        self.hidden = compiled(setup, self.model.hidden)
        self.head = head(setup)
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
            x = self.hidden(tokens[:, :-1].contiguous())  # (B, T, C); other strides would be compiled anew
            return self.head(x.flatten(0, 1), self.model.head.weight, tokens[:, 1:].flatten())

    def _step(self, tokens: Tensor) -> Tensor:
        setup = self.setup
        with fp32_products(tf32=setup.precision != "fp32"), compiler_budget(setup):
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


def build_model(setup: Setup, device: torch.device) -> Llama:
    """The network of a setup, with weights drawn on the device from the setup's seed: the same however its parts are
    held. They are drawn twice, for what making the parts draws depends on how many they are."""
    # Level N is chapter 4's layer, which on a GPU runs its own Triton kernels; None is the plain one.
    level = None if setup.mlp == "plain" else int(setup.mlp.removeprefix("level "))
    with torch.device(device):
        network = Llama.from_name(
            setup.model,
            attend=attention(setup.attention),
            normalise=norm(setup.norm),
            rotate=rope(setup.rope),
            mlp=None if level is None else functools.partial(MemoryOptimizedSwigluMLP, checkpoint_level=level),
            fused=setup.fused,
            residual=torch.bfloat16 if setup.residual == "bf16" else None,
        )
    network.reset_parameters(torch.Generator(device).manual_seed(setup.seed))
    if setup.precision == "bf16":
        network = network.to(torch.bfloat16)
    if setup.float8 == "tensorwise":
        float8.convert(network.layers)
    elif setup.float8 == "torchao":
        from torchao.float8 import convert_to_float8_training

        convert_to_float8_training(network.layers)
    network.checkpoint = checkpoint_with(setup.checkpointing)
    return network


def attention(name: str) -> Callable[..., Tensor]:
    """Of a setup's `attention`: q (B, heads, T, D), k, v (B, kv_heads, T, D) and perhaps a mask -> (B, heads, T, D)."""
    return eager_attention if name == "eager" else functools.partial(fused_attention, backend=BACKENDS[name])


def fused_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, backend: SDPBackend) -> Tensor:
    """`F.scaled_dot_product_attention` by one backend and no other; causal unless a mask is given."""
    if mask is not None:
        mask = mask.to(q.dtype)
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)


def norm(name: str) -> Callable[[Tensor, Tensor, float], Tensor]:
    """Of a setup's `norm`: x (…, C), weight (C,) and epsilon -> the RMSNorm of x."""
    if name == "triton":
        from .kernels import rms_norm

        return rms_norm
    return {"eager": eager_rms_norm, "torch": torch_rms_norm}[name]


def torch_rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """torch's fused kernel, which wants x and the weight in one type."""
    return F.rms_norm(x, weight.shape, weight.to(x.dtype), epsilon)


def rope(name: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """Of a setup's `rope`: q and k (B, T, heads, D), cosines and sines (T, D/2) -> q and k, turned by their angles."""
    if name == "triton":
        from .kernels import rotate

        return rotate
    return eager_rotate


def head(setup: Setup) -> chunked_loss.Head:
    """The function from hidden states to the loss. Of a chunked one the compiler gets the part between the products."""
    if setup.head == "full":
        return compiled(setup, chunked_loss.full)
    if setup.head == "torch":
        return chunked_loss.torch_chunked
    if setup.head == "triton":
        from .kernels import loss_and_gradient

        return functools.partial(chunked_loss.chunked, pieces=loss_and_gradient)
    return functools.partial(chunked_loss.chunked, pieces=compiled(setup, chunked_loss.loss_and_gradient))


def compiled(setup: Setup, fn: Callable) -> Callable:
    """`fn` as the setup compiles it. CUDA graphs are left out of max-autotune, for they are a step of their own.

    torch keeps what it compiled with a function's code object, at most eight variants of it; so it gets a copy.
    """
    if setup.compile == "none":
        return fn

    def call(*arguments):
        return fn(*arguments)

    own = types.FunctionType(call.__code__.replace(), call.__globals__, "call", None, call.__closure__)
    mode = "max-autotune-no-cudagraphs" if setup.compile == "max-autotune" else "default"
    return torch.compile(own, mode=mode, dynamic=False)


def checkpoint_with(checkpointing: str) -> Callable | None:
    """What `Llama.checkpoint` is set to: runs a block with its arguments. None where blocks are simply called."""
    # The state of random numbers isn't kept: there is no dropout, and it can't be read while a graph is captured.
    plain = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    if checkpointing == "full":
        return plain
    if checkpointing == "selective":
        contexts = functools.partial(create_selective_checkpoint_contexts, _save_products)
        return functools.partial(plain, context_fn=contexts)
    return None


def _save_products(context, operator, *args, **kwargs) -> CheckpointPolicy:
    """Save what a product or an attention kernel returns; compute everything else again."""
    return CheckpointPolicy.MUST_SAVE if operator in SAVED_OPERATORS else CheckpointPolicy.PREFER_RECOMPUTE


def compiler_budget(setup: Setup) -> contextlib.AbstractContextManager:
    """Within it, the compiler is held to the setup's share of the memory, wherever it may compile."""
    if setup.checkpointing != "memory budget":
        return contextlib.nullcontext()
    import torch._functorch.config as compiler

    return compiler.patch(activation_memory_budget=setup.memory_budget)
