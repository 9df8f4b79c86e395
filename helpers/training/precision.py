"""A training's precision: the type of its matrix products, autocast, loss scaling."""

import contextlib
from dataclasses import dataclass
from typing import Any

import torch

from helpers.amp import Autocast, DynamicGradScaler, StaticGradScaler
from helpers.lab import device
from helpers.lab.precision import fp32_products

# `fp32` excludes TF32. `fp16` is a model in pure fp16, without autocast or scaler. The others use autocast: `bf16`,
# `amp` for fp16 without a scaler, and fp16 with the named scaler.
PRECISIONS = ("fp32", "fp16", "bf16", "amp", "static", "dynamic", "torch-scaler")
AUTOCASTS = ("ours", "torch")


@dataclass(frozen=True)
class Precision:
    """One of `PRECISIONS`, by one of `AUTOCASTS`; `growth_interval` is that of the dynamic scale."""

    name: str = "fp32"
    autocast: str = "torch"
    growth_interval: int = 2000

    @property
    def dtype(self) -> torch.dtype:
        """The type that matrix products are computed in."""
        if self.name == "fp32":
            return torch.float32
        return torch.bfloat16 if self.name == "bf16" else torch.float16

    def region(self) -> contextlib.AbstractContextManager:
        """A context for forward and loss: autocast, or nothing for fp32 and pure fp16."""
        if self.name in ("fp32", "fp16"):
            return contextlib.nullcontext()
        make = torch.autocast if self.autocast == "torch" else Autocast
        return make(device_type=device().type, dtype=self.dtype)

    def kernels(self) -> contextlib.AbstractContextManager:
        """A context for forward and backward: fp32 excludes TF32 in products and convolutions."""
        return fp32_products() if self.name == "fp32" else contextlib.nullcontext()

    def scaler(self, where: torch.device) -> Any:
        """The gradient scaler; None for a precision that has none."""
        if self.name == "static":
            return StaticGradScaler()
        if self.name == "dynamic":
            return DynamicGradScaler(growth_interval=self.growth_interval)
        if self.name == "torch-scaler":
            return torch.amp.GradScaler(where.type, growth_interval=self.growth_interval)
        return None
