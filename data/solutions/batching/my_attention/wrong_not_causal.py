# Within a document every token sees all others.
# says: a changed token changes no position before it: token 20 changes [
import torch
import torch.nn.functional as F


def my_attention(q, k, v, offsets):
    out = torch.empty_like(q)
    for i in range(len(offsets) - 1):
        s = slice(int(offsets[i]), int(offsets[i + 1]))
        out[:, :, s] = F.scaled_dot_product_attention(q[:, :, s], k[:, :, s], v[:, :, s])
    return out
