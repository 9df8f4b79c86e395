# The last document is left out of the loop.
# says: the output is that of each document alone: shape (1, 2, 36, 16) instead of (1, 2, 48, 16)
import torch
import torch.nn.functional as F


def my_attention(q, k, v, offsets):
    outs = []
    for i in range(len(offsets) - 2):
        a, b = offsets[i], offsets[i + 1]
        outs.append(F.scaled_dot_product_attention(q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], is_causal=True))
    return torch.cat(outs, 2)
