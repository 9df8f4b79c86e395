"""Operations of a training step, and the rates that they are compared with.

Model FLOPs a token, by convention: 6 for each parameter (2 forward, 4 backward; a tied embedding counts once, as the
head), and 6 · layers · heads · 2 · head_dim · T for attention, including the causal half that fast kernels skip.
Recomputed activations don't count: MFU is about the model's operations, not the hardware's.
"""

import functools
from typing import TYPE_CHECKING, Any

import torch

from ..lab import device
from ..lab.cards import likely
from ..lab.ceilings import product_rate
from ..lab.machine import device_name
from ..models import Llama
from ..models.llama import preset
from .setup import AUTOCAST, Setup

if TYPE_CHECKING:
    import pandas as pd

FLOAT8 = "float8_e4m3fn"


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
def float8_share(model: str, sequence: int) -> float:
    """The share of a token's FLOPs that a float8 setup multiplies in float8: the blocks' linear layers."""
    with torch.device("meta"):
        layers = Llama.from_name(model).layers
    linear = sum(weight.numel() for weight in layers.parameters() if weight.dim() == 2)
    return 6 * linear / flops_per_token(model, sequence)


def product_type(precision: str) -> str:
    """The type that a setup of this precision multiplies in, as `swiglu/ceilings` names it."""
    if precision == "tf32":
        return precision
    dtype = AUTOCAST.get(precision, torch.bfloat16 if precision == "bf16" else torch.float32)
    return str(dtype).removeprefix("torch.")


def recorded_rates(ceilings: "pd.DataFrame") -> dict[str, float]:
    """TFLOP/s of products of each type, as recorded ceilings have them: the best of their sizes and libraries."""
    return ceilings.dropna(subset="tflops").groupby("dtype")["tflops"].max().to_dict()


def matmul_share(flops_per_s: float, tflops: float, float8_tflops: float = 0.0, float8: float = 0.0) -> float:
    """The time that a step's products take at their types' rates, as a share of the step."""
    return flops_per_s / 1e12 * ((1 - float8) / tflops + (float8 / float8_tflops if float8 else 0.0))


def shares(setup: Setup, tokens_per_s: float) -> dict[str, Any]:
    """`mfu` against the vendor's bf16 peak, and `matmul_share` against what products of its own type sustain here."""
    flops_per_s = flops_per_token(setup.model, setup.sequence) * tokens_per_s
    card, product = likely(device_name()), product_rate(product_type(setup.precision))
    in_float8 = setup.float8 != "none" and device().type == "cuda"  # a CPU emulates it
    float8 = float8_share(setup.model, setup.sequence) if in_float8 else 0.0
    float8_tflops = product_rate(FLOAT8).tflops if float8 else 0.0
    share = matmul_share(flops_per_s, product.tflops, float8_tflops, float8)
    return {"mfu": flops_per_s / (1e12 * card.bf16_tflops) if card else None, **product.row(), "matmul_share": share}
