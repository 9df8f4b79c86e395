# The norm's mean is over a whole block.
# says: 4096 rows agree with eager: wrong
import torch
import torch.nn.functional as F


def fused_with_norm(x, w, b, residual, rows=128):
    out = torch.empty_like(x)
    for h, r, o in zip(x.split(rows), residual.split(rows), out.split(rows)):
        t = F.gelu(h * w + b).add_(r)
        o.copy_((t - t.mean()) / (t.var(unbiased=False) + 1e-5).sqrt())
    return out
