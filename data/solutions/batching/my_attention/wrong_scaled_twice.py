# Queries are scaled, and scaled_dot_product_attention scales again.
# says: the output is that of each document alone: wrong
import numpy as np
import torch
import torch.nn.functional as F


def my_attention(q, k, v, offsets):
    sizes = np.diff(offsets).tolist()
    q = q * q.shape[-1] ** -0.5
    parts = zip(q.split(sizes, 2), k.split(sizes, 2), v.split(sizes, 2))
    return torch.cat([F.scaled_dot_product_attention(*part, is_causal=True) for part in parts], 2)
