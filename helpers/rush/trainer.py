"""`build_trainer`: the trainer of a setup, from its model, loss and optimizer."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..amp import DynamicGradScaler
from ..kernels import add_rms_norm, chunked_loss, rms_norm
from ..kernels.blocked_attention import blocked_attention
from ..lab import device as this_device
from ..lab.compiling import compiled_apart
from ..lab.precision import fp32_products
from ..models import Llama
from ..models.llama import eager_attention, eager_rms_norm
from ..swiglu import MemoryOptimizedSwigluMLP
from ..training.checkpointing import checkpoint_with
from ..training.trainer import Trainer
from . import optimizers
from .setup import AUTOCAST, FP32_PRODUCTS, Setup

BACKENDS = {
    "math": SDPBackend.MATH,  # torch's reference: products and a softmax, with all scores in memory
    "flash": SDPBackend.FLASH_ATTENTION,  # FlashAttention-2; on a CPU torch's flash kernel for CPUs
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
MEMORY_BUDGET = 0.5  # share of the activations that the compiler saves by default
# A setup's norm: x (…, C), weight (C,) and epsilon -> the RMSNorm of x. torch's needs x and the weight in one dtype.
NORMS = {
    "eager": eager_rms_norm,
    "torch": lambda x, weight, epsilon: F.rms_norm(x, weight.shape, weight.to(x.dtype), epsilon),
    "triton": rms_norm,
    "triton residual": rms_norm,
}


def build_trainer(setup: Setup, device: torch.device | None = None) -> Trainer:
    """What trains by a setup on batches of tokens (B, T + 1); a `ValueError` says why the device can't.

    Its steps take tokens, and targets (B, T) in place of the tokens that follow, with `IGNORED` where there is padding.
    """
    device = device or this_device()
    if reason := setup.missing_because(device):
        raise ValueError(reason)
    model = build_model(setup, device)
    optimizer = optimizers.build_optimizer(
        setup.optimizer,
        model.parameters(),
        lr=setup.learning_rate,
        betas=(0.9, 0.95),  # betas and decay as usual for large language models
        weight_decay=0.1,
        capturable=setup.cuda_graph,
    )
    # Runs are short: from torch's 2**16 some would skip steps to find a scale.
    scaler = DynamicGradScaler(init_scale=2.0**12) if setup.precision == "amp-fp16" else None
    loss, around = build_loss(setup, model, device), functools.partial(computing, setup)
    return Trainer(model, loss, optimizer, scaler=scaler, frees=True, captures=setup.cuda_graph, around=around)


def build_loss(setup: Setup, model: Llama, device: torch.device) -> Callable[..., tuple[Tensor]]:
    """The mean cross-entropy of predicting each token of (B, T + 1) from those before it, compiled by the setup."""
    if setup.compile.startswith("regional"):
        block_forward = compiled_apart(lambda block, *inputs: type(block).forward(block, *inputs), **options(setup))
        for block in model.layers:
            block.forward = functools.partial(block_forward, block)
    hidden = model.hidden if "regional" in setup.compile else compiled(setup, model.hidden)
    calculate, dtype = head(setup), AUTOCAST.get(setup.precision)

    def loss(tokens: Tensor, targets: Tensor | None = None) -> tuple[Tensor]:
        targets = tokens[:, 1:] if targets is None else targets
        with torch.autocast(device.type, dtype, enabled=dtype is not None):
            x = hidden(tokens[:, :-1].contiguous())  # (B, T, C); other strides would trigger a recompilation
            return (calculate(x.flatten(0, 1), model.head.weight, targets.flatten()),)

    return loss


def build_model(setup: Setup, device: torch.device) -> Llama:
    """The network of a setup, its weights drawn on the device from the setup's seed.

    Weights are drawn again after construction, so that they don't depend on the modules that a setup uses.
    """
    mlp = None  # the plain one; level N: chapter 4's layer, which on a GPU runs our Triton kernels
    if setup.mlp != "plain":
        mlp = functools.partial(MemoryOptimizedSwigluMLP, checkpoint_level=int(setup.mlp.removeprefix("level ")))
    with torch.device(device):
        network = Llama.from_name(
            setup.model,
            attend=attention(setup.attention),
            normalise=NORMS[setup.norm],
            add_normalise=add_rms_norm if setup.norm == "triton residual" else None,
            mlp=mlp,
            fused=setup.fused,
            residual=torch.bfloat16 if setup.residual == "bf16" else None,
            **({"layers": setup.layers} if setup.layers else {}),
        )
    network.reset_parameters(torch.Generator(device).manual_seed(setup.seed))
    if setup.precision == "bf16":
        for weight in network.parameters():  # unlike `Module.to`, also on fake tensors; tables stay in fp32
            weight.data = weight.data.to(torch.bfloat16)
    if setup.float8 != "none":
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        recipe = Float8LinearConfig.from_recipe_name(setup.float8)
        emulated = dataclasses.replace(recipe, emulate=device.type == "cpu")
        convert_to_float8_training(network.layers, config=emulated)
    network.checkpoint = checkpoint_with(setup.checkpointing)
    return network


def attention(name: str) -> Callable[..., Tensor]:
    """A setup's causal attention: q (B, heads, T, D), k and v (B, kv_heads, T, D), a mask for "eager" alone."""
    if name in ("eager", "blocked"):
        return eager_attention if name == "eager" else causal_blocks
    return functools.partial(fused_attention, backend=BACKENDS[name])


def causal_blocks(q: Tensor, k: Tensor, v: Tensor, mask: None = None) -> Tensor:
    """`blocked_attention` as an attention of `Llama`, which gives it no mask."""
    return blocked_attention(q, k, v)


def fused_attention(q: Tensor, k: Tensor, v: Tensor, mask: None = None, *, backend: SDPBackend) -> Tensor:
    """`F.scaled_dot_product_attention` restricted to one backend."""
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def head(setup: Setup) -> chunked_loss.Head:
    """The function from hidden states to the loss. Of a chunked head only the part between the products is compiled."""
    if setup.head == "full":
        return compiled(setup, chunked_loss.full)
    if setup.head == "torch":
        return chunked_loss.torch_chunked
    pieces = compiled(setup, chunked_loss.loss_and_gradient)
    return functools.partial(chunked_loss.chunked, logits_gib=setup.logits_gib, pieces=pieces)


def compiled(setup: Setup, fn: Callable) -> Callable:
    """`fn` compiled as the setup says."""
    return fn if setup.compile == "none" else compiled_apart(fn, **options(setup))


def options(setup: Setup) -> dict:
    """`torch.compile`'s options. max-autotune runs without CUDA graphs, which are a separate step of the ladder."""
    mode = "max-autotune-no-cudagraphs" if "max-autotune" in setup.compile else "default"
    return {"mode": mode, "dynamic": False}


@contextlib.contextmanager
def computing(setup: Setup) -> Iterator[None]:
    """A context in which fp32 products are computed, and what is compiled observes the memory budget, by the setup."""
    with fp32_products(FP32_PRODUCTS.get(setup.precision, "high")), compiler_budget(setup):
        yield


@contextlib.contextmanager
def compiler_budget(setup: Setup) -> Iterator[None]:
    """A context in which everything that is compiled observes the memory budget, if it is the setup's."""
    if setup.checkpointing != "memory budget":
        yield
        return
    import torch._functorch.config as compiler
    from torch.utils import flop_counter

    count = flop_counter.sdpa_flop_count

    def of_groups(query: Sequence[int], key: Sequence[int], value: Sequence[int]) -> int:
        """The compiler weighs what to keep by FLOPs, and torch 2.11 can't count those of grouped heads."""
        return count(query, (*key[:1], query[1], *key[2:]), (*value[:1], query[1], *value[2:]))

    flop_counter.sdpa_flop_count = of_groups
    try:
        with compiler.patch(activation_memory_budget=MEMORY_BUDGET):
            yield
    finally:
        flop_counter.sdpa_flop_count = count
