# Off by one block: 301 rows are no multiple, and the rest stays zero.
# says: 301 rows agree with eager: wrong
import torch
import torch.nn.functional as F


def fused_with_norm(x, w, b, residual, rows=128):
    out = torch.zeros_like(x)
    for i in range(len(x) // rows):
        s = slice(i * rows, (i + 1) * rows)
        h = F.gelu(x[s] * w + b) + residual[s]
        out[s] = F.layer_norm(h, h.shape[-1:])
    return out
