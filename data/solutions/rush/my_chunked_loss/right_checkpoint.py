import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


def summed(hidden, weight, targets):
    return F.cross_entropy((hidden @ weight.T).float(), targets, reduction="sum")


def my_chunked_loss(hidden, weight, targets):
    chunks = zip(hidden.split(64), targets.split(64))
    return sum(checkpoint(summed, h, weight, t, use_reentrant=False) for h, t in chunks) / len(targets)
