# Where the region raises, the functions stay replaced.
# says: outside, also after an error inside, all is as before
from contextlib import contextmanager

import torch
import torch.nn.functional as F


@contextmanager
def MyAutocast(dtype=torch.float16):
    old_linear, old_norm = F.linear, F.layer_norm
    F.linear = lambda x, w, b=None: old_linear(x.to(dtype), w.to(dtype), None if b is None else b.to(dtype))
    F.layer_norm = lambda x, *a, **k: old_norm(x.float(), *a, **k)
    yield
    F.linear, F.layer_norm = old_linear, old_norm
