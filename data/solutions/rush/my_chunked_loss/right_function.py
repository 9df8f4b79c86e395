import torch
import torch.nn.functional as F


class Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, chunk):
        ctx.save_for_backward(hidden, weight, targets)
        ctx.chunk, total = chunk, 0.0
        for x, t in zip(hidden.split(chunk), targets.split(chunk)):
            total = total + F.cross_entropy((x @ weight.T).float(), t, reduction="sum")
        return total / len(targets)

    @staticmethod
    def backward(ctx, upstream):
        hidden, weight, targets = ctx.saved_tensors
        dh, dw = torch.empty_like(hidden), torch.zeros_like(weight)
        for x, t, out in zip(hidden.split(ctx.chunk), targets.split(ctx.chunk), dh.split(ctx.chunk)):
            grad = (x @ weight.T).float().softmax(-1)
            grad[torch.arange(len(t)), t] -= 1
            grad = (upstream * grad / len(targets)).to(weight.dtype)
            out.copy_(grad @ weight)
            dw += grad.T @ x
        return dh, dw, None, None


def my_chunked_loss(hidden, weight, targets):
    return Recomputed.apply(hidden, weight, targets, 128)
