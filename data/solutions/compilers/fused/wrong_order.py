# The residual goes into gelu.
# says: rows agree with eager
import torch
import torch.nn.functional as F


def fused(x, w, b, residual, rows=64):
    out = torch.empty_like(x)
    for part, r, o in zip(x.split(rows), residual.split(rows), out.split(rows)):
        o.copy_(F.gelu(part * w + b + r))
    return out
