"""From the words of a `Setup` to the functions and modules that they stand for."""

import functools
import types
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from helpers.models import Llama
from helpers.models.llama import eager_attention, eager_rms_norm
from helpers.models.rotary import eager_rotate
from helpers.swiglu import MemoryOptimizedSwigluMLP

from . import checkpointing, float8, heads
from .setup import Setup

BACKENDS = {
    "math": SDPBackend.MATH,  # torch's reference: products and a softmax, all scores in memory
    "flash": SDPBackend.FLASH_ATTENTION,  # FlashAttention-2; on a CPU torch's own of the same idea
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}


def fused_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, backend: SDPBackend) -> Tensor:
    """`F.scaled_dot_product_attention` by one backend and no other; causal unless a mask is given."""
    if mask is not None:
        mask = mask.to(q.dtype)
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)


def torch_rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """torch's fused kernel, which wants x and the weight in one type."""
    return F.rms_norm(x, weight.shape, weight.to(x.dtype), epsilon)


def attention(name: str) -> Callable[..., Tensor]:
    return eager_attention if name == "eager" else functools.partial(fused_attention, backend=BACKENDS[name])


def norm(name: str) -> Callable[..., Tensor]:
    if name == "triton":
        from .kernels import rms_norm

        return rms_norm
    return {"eager": eager_rms_norm, "torch": torch_rms_norm}[name]


def rope(name: str) -> Callable[..., tuple[Tensor, Tensor]]:
    if name == "triton":
        from .kernels import rotate

        return rotate
    return eager_rotate


def mlp(name: str) -> Callable[[int, int], nn.Module] | None:
    """None is the plain layer; `level N` is chapter 4's, which on a GPU runs its own Triton kernels."""
    if name == "plain":
        return None
    return functools.partial(MemoryOptimizedSwigluMLP, checkpoint_level=int(name.removeprefix("level ")))


def head(setup: Setup) -> heads.Head:
    """The function from hidden states to the loss. Of a chunked one the compiler gets the part between the products."""
    if setup.head == "full":
        return compiled(setup, heads.full)
    if setup.head == "torch":
        return heads.torch_chunked
    if setup.head == "triton":
        from .kernels import loss_and_gradient

        return functools.partial(heads.chunked, pieces=loss_and_gradient)
    return functools.partial(heads.chunked, pieces=compiled(setup, heads.loss_and_gradient))


def model(setup: Setup, device: torch.device) -> Llama:
    """The network of a setup, with weights drawn on the device from the setup's seed: the same however its parts are
    held. They are drawn twice, for what making the parts draws depends on how many they are."""
    with torch.device(device):
        network = Llama.from_name(
            setup.model,
            attend=attention(setup.attention),
            normalise=norm(setup.norm),
            rotate=rope(setup.rope),
            mlp=mlp(setup.mlp),
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
    return checkpointing.apply(network, setup.checkpointing)


def compiled(setup: Setup, fn: Callable) -> Callable:
    """`fn` as the setup compiles it. CUDA graphs are left out of max-autotune, for they are a step of their own.

    What was compiled is kept with a function's code, and no more than eight variants of it; so it gets code of its own.
    """
    if setup.compile == "none":
        return fn

    def call(*arguments):
        return fn(*arguments)

    own = types.FunctionType(call.__code__.replace(), call.__globals__, "call", None, call.__closure__)
    mode = "max-autotune-no-cudagraphs" if setup.compile == "max-autotune" else "default"
    return torch.compile(own, mode=mode, dynamic=False)
