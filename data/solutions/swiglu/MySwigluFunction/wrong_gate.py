# SiLU is on the other product.
# says: level 2: the output is (SiLU(xW) ⊙ xV) U
import torch
import torch.nn.functional as F


class MySwigluFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, W, V, U, checkpoint_level):
        g, u = x @ W, x @ V
        ctx.save_for_backward(x, W, V, U, g, u)
        return (g * F.silu(u)) @ U

    @staticmethod
    def backward(ctx, l):
        x, W, V, U, g, u = ctx.saved_tensors
        sigma = torch.sigmoid(u)
        dz = l @ U.t()
        du, dg = dz * g * sigma * (1 + u * (1 - sigma)), dz * u * sigma
        rows = x.flatten(0, -2).t()
        dU = (u * sigma * g).flatten(0, -2).t() @ l.flatten(0, -2)
        return dg @ W.t() + du @ V.t(), rows @ dg.flatten(0, -2), rows @ du.flatten(0, -2), dU, None
