# backward forgets what the loss is multiplied by.
# says: the gradient of the hidden states
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
        grad = (hidden @ weight.T).softmax(-1)
        grad[torch.arange(len(targets)), targets] -= 1
        grad /= len(targets)
        return grad @ weight, grad.T @ hidden, None


def my_chunked_loss(hidden, weight, targets):
    return Recomputed.apply(hidden, weight, targets)
