# The derivative of SiLU as the task's text has it, without a factor.
# says: level 2: the gradient of W is autograd's: wrong
import torch
import torch.nn.functional as F


class MySwigluFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, W, V, U, checkpoint_level):
        g, u = x @ W, x @ V
        ctx.save_for_backward(x, W, V, U, g, u)
        return (F.silu(g) * u) @ U

    @staticmethod
    def backward(ctx, l):
        x, W, V, U, g, u = ctx.saved_tensors
        sigma = torch.sigmoid(g)
        dz = l @ U.t()
        dg, du = dz * u * sigma * (g + 1 - sigma), dz * g * sigma
        rows = x.flatten(0, -2).t()
        dU = (g * sigma * u).flatten(0, -2).t() @ l.flatten(0, -2)
        return dg @ W.t() + du @ V.t(), rows @ dg.flatten(0, -2), rows @ du.flatten(0, -2), dU, None
