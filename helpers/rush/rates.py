"""Operations of a training step, and the rates that they are compared with.

Model FLOPs a token, by convention: 6 for each parameter (2 forward, 4 backward; a tied embedding counts once, as the
head), and 6 · layers · heads · 2 · head_dim · T for attention, including the causal half that fast kernels skip.
Recomputed activations don't count: MFU is about the model's operations, not the hardware's.
"""

import functools
from operator import itemgetter

import torch

from ..lab.cards import likely
from ..lab.ceilings import best_matmul
from ..lab.machine import device_class, device_name
from ..lab.precision import fp32_products
from ..models import Llama
from ..models.llama import preset
from .setup import AUTOCAST, Setup


@functools.cache
def parameters(model: str) -> int:
    """Number of parameters of a preset, a tied embedding counted once. Allocates nothing."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Llama.from_name(model).parameters())


def flops_per_token(model: str, sequence: int) -> int:
    """Model FLOPs of training on one token of a sequence of this length."""
    size = preset(model)
    attended = size.get("head_dim", size["width"] // size["heads"]) * size["heads"]
    # By convention an untied embedding counts too, although a look-up has no FLOPs.
    return 6 * parameters(model) + 6 * size["layers"] * 2 * attended * sequence


@functools.cache
def matmul_rate(precision: str = "amp-bf16") -> tuple[str, float]:
    """The library whose large matrix products are the fastest in the type that a setup multiplies in, and its rate.

    The rate is in operations a second.
    """
    dtype = AUTOCAST.get(precision, torch.bfloat16 if precision == "bf16" else torch.float32)
    size = {"cpu": 2048, "gpu": 4096, "big-gpu": 8192}[device_class()]
    with fp32_products("high" if precision == "tf32" else "highest"):
        medians = [best_matmul(size, dtype) for _ in range(3)]
    library, tflops = max(medians, key=itemgetter(1))  # a limit
    return library, tflops * 1e12


def shares(setup: Setup, tokens_per_s: float) -> dict[str, float | str | None]:
    """`mfu` against the vendor's bf16 peak, and `matmul_share` against the measured product in the type computed in."""
    rate = flops_per_token(setup.model, setup.sequence) * tokens_per_s
    card = likely(device_name())
    library, product = matmul_rate(setup.precision)
    matmul = {"product_library": library, "product_tflops": product / 1e12, "matmul_share": rate / product}
    return {"mfu": rate / (1e12 * card.bf16_tflops) if card else None, **matmul}
