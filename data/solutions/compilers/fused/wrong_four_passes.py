# No temporary, but four passes over all of the output, one after the other.
# says: x isn't read or written as a whole time and again: 4 operations
import torch


def fused(x, w, b, residual):
    out = torch.mul(x, w)
    out += b
    torch.ops.aten.gelu_(out)
    return out.add_(residual)
