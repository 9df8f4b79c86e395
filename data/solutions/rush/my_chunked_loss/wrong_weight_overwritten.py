# The weight's gradient is that of the last chunk.
# says: the gradient of the weight
import torch
import torch.nn.functional as F


class Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets):
        ctx.save_for_backward(hidden, weight, targets)
        return F.cross_entropy((hidden @ weight.T).float(), targets)

    @staticmethod
    def backward(ctx, upstream):
        hidden, weight, targets = ctx.saved_tensors
        dh = []
        for x, t in zip(hidden.split(128), targets.split(128)):
            grad = (x @ weight.T).softmax(-1)
            grad[torch.arange(len(t)), t] -= 1
            grad *= upstream / len(targets)
            dh.append(grad @ weight)
            dw = grad.T @ x
        return torch.cat(dh), dw, None


def my_chunked_loss(hidden, weight, targets):
    return Recomputed.apply(hidden, weight, targets)
