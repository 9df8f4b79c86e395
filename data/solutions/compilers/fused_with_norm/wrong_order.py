# The residual is added after the norm.
# says: 4096 rows agree with eager: wrong
import torch
import torch.nn.functional as F


def fused_with_norm(x, w, b, residual, rows=128):
    out = torch.empty_like(x)
    for h, r, o in zip(x.split(rows), residual.split(rows), out.split(rows)):
        o.copy_(F.layer_norm(F.gelu(h * w + b), h.shape[-1:]) + r)
    return out
