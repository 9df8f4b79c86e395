"""What a token's training costs at least in floating-point operations, and how far a measured rate is from the limits.

The convention: 6 operations for each parameter (2 forward, 4 backward; a tied embedding counts once, as it multiplies
only as the head), and 6 · layers · heads · 2 · head_dim · T for attention, without a discount for the causal half that
fast kernels skip. Recomputed activations don't count: MFU is about the model's operations, not the machine's.
"""

import functools

import torch

from helpers.lab import device
from helpers.lab.ceilings import matmul
from helpers.lab.machine import device_name
from helpers.models import Llama
from helpers.models.llama import preset

# Dense bf16 operations a second that vendors state; the first name that a device's name contains is its own.
PEAKS = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
    "RTX 4090": 165.2e12,
}


@functools.cache
def parameters(model: str) -> int:
    """The parameters of a preset, a tied embedding once. Nothing is allocated."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Llama.from_name(model).parameters())


def flops_per_token(model: str, sequence: int) -> int:
    """Operations of training on one token of a sequence of this length."""
    size = preset(model)
    attended = size.get("head_dim", size["width"] // size["heads"]) * size["heads"]
    # An embedding that isn't tied is looked up and multiplies nothing, yet it is among the parameters: as is usual.
    return 6 * parameters(model) + 6 * size["layers"] * 2 * attended * sequence


def peak() -> float | None:
    """The vendor's dense bf16 rate of this device, in operations a second; None where it isn't known."""
    name = device_name()
    return next((rate for known, rate in PEAKS.items() if known in name), None)


@functools.cache
def matmul_rate() -> float:
    """Operations a second of a large bf16 product, measured here (on a CPU a small one in fp32)."""
    size, dtype = (8192, torch.bfloat16) if device().type == "cuda" else (512, torch.float32)
    return matmul(size, dtype)[1] * 1e12


def shares(model: str, sequence: int, tokens_per_s: float) -> dict[str, float | None]:
    """`mfu` against the vendor's peak, and `matmul_share` against the product measured here; both are fractions."""
    rate = flops_per_token(model, sequence) * tokens_per_s
    limit = peak()
    return {"mfu": rate / limit if limit else None, "matmul_share": rate / matmul_rate()}
