import torch
import torch.nn.functional as F


class ChunkedCE(torch.autograd.Function):
    """forward without a graph, backward runs autograd chunk by chunk"""

    @staticmethod
    def forward(ctx, h, w, y):
        ctx.save_for_backward(h, w, y)
        n = h.shape[0]
        return sum(F.cross_entropy((h[i:i + 100] @ w.t()).float(), y[i:i + 100], reduction='sum') for i in range(0, n, 100)) / n

    @staticmethod
    def backward(ctx, g):
        h, w, y = ctx.saved_tensors
        dhs, dw = [], torch.zeros_like(w)
        for i in range(0, h.shape[0], 100):
            with torch.enable_grad():
                hi, wi = h[i:i + 100].detach().requires_grad_(), w.detach().requires_grad_()
                part = F.cross_entropy((hi @ wi.t()).float(), y[i:i + 100], reduction='sum') / h.shape[0]
            a, b = torch.autograd.grad(part, (hi, wi), g)
            dhs.append(a)
            dw += b
        return torch.cat(dhs), dw, None


my_chunked_loss = ChunkedCE.apply
