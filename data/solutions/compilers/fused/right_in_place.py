import torch


def fused(x, w, b, residual, rows=100):
    out = torch.empty_like(x)
    for begin in range(0, len(x), rows):
        block = torch.mul(x[begin : begin + rows], w, out=out[begin : begin + rows])
        block += b
        torch.ops.aten.gelu_(block)
        block += residual[begin : begin + rows]
    return out
