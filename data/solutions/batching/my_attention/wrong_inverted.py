# The mask hides what may be seen: PyTorch's True means "take part".
# says: the output is that of each document alone
import torch
import torch.nn.functional as F


def my_attention(q, k, v, offsets):
    outs = []
    for a, b in zip(offsets[:-1], offsets[1:]):
        hidden = torch.ones(b - a, b - a, dtype=torch.bool).triu(1)
        outs.append(F.scaled_dot_product_attention(q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], attn_mask=hidden))
    return torch.cat(outs, 2)
