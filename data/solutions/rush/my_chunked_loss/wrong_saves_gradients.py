# The notebook's loss: gradients are computed in forward, and saved.
# says: nothing but the inputs is saved
import torch
import torch.nn.functional as F


class ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, chunk=128):
        grad_hidden, grad_weight, total = torch.empty_like(hidden), torch.zeros_like(weight), 0.0
        for x, t, out in zip(hidden.split(chunk), targets.split(chunk), grad_hidden.split(chunk)):
            logits = (x @ weight.T).float()
            total += F.cross_entropy(logits, t, reduction="sum")
            grad = logits.softmax(-1)
            grad[torch.arange(len(t)), t] -= 1
            grad = grad.to(weight.dtype) / len(targets)
            out.copy_(grad @ weight)
            grad_weight += grad.T @ x
        ctx.save_for_backward(grad_hidden, grad_weight)
        return total / len(targets)

    @staticmethod
    def backward(ctx, upstream):
        grad_hidden, grad_weight = ctx.saved_tensors
        return upstream * grad_hidden, upstream * grad_weight, None, None


def my_chunked_loss(hidden, weight, targets):
    return ChunkedLoss.apply(hidden, weight, targets)
