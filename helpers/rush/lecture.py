"""The lecture's example: a stack of decoder layers, trained with AMP, with fused norms and with a fused Adam."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from helpers.lab import device

from . import adam, norms

# The lecture's two tables: a row's autocast type, norms and Adam.
LECTURE = {
    "fp32": (None, norms.TORCH, adam.FOR_LOOP),
    "AMP": (torch.bfloat16, norms.TORCH, adam.FOR_LOOP),
    "AMP + fused norm": (torch.bfloat16, norms.OURS, adam.FOR_LOOP),
    "AMP + fused Adam": (torch.bfloat16, norms.TORCH, adam.FUSED),
    "AMP + both": (torch.bfloat16, norms.OURS, adam.FUSED),
}


def decoder_step(x: Tensor, layers: int, dtype: torch.dtype | None, norm: str, optimizer: str) -> Callable[[], Tensor]:
    """A training step on x (B, T, width), which every layer also attends to, with the mean square as the loss."""
    torch.manual_seed(0)
    width = x.shape[-1]
    blocks = [nn.TransformerDecoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True) for _ in range(layers)]
    model = nn.ModuleList(blocks).to(device())
    norms.swap_norms(model, norm)
    adamw = adam.adamw(optimizer, list(model.parameters()))

    def step() -> Tensor:
        with torch.autocast(device().type, dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            hidden = x
            for block in model:
                hidden = block(hidden, x)
        loss = hidden.float().square().mean()
        loss.backward()
        adamw.step()
        adamw.zero_grad()
        return loss.detach()

    return step
