import torch
import torch.nn.functional as F


def fused_with_norm(x, w, b, residual, rows=64):
    out = torch.empty_like(x)
    for h, r, o in zip(x.split(rows), residual.split(rows), out.split(rows)):
        chain = F.gelu(torch.addcmul(b, h, w)).add_(r)
        o.copy_(F.layer_norm(chain, chain.shape[-1:]))
    return out
