# The cast of the weights is hidden from autograd.
# says: the weights' gradients are fp32: none
import torch
import torch.nn.functional as F


class MyAutocast:
    def __init__(self, dtype=torch.float16):
        self.dtype = dtype

    def __enter__(self):
        self.old = F.linear, F.layer_norm
        linear, norm = self.old
        low = lambda t: None if t is None else t.data.to(self.dtype)
        F.linear = lambda x, w, b=None: linear(x.to(self.dtype), low(w), low(b))
        F.layer_norm = lambda x, *a, **k: norm(x.float(), *a, **k)
        return self

    def __exit__(self, *_):
        F.linear, F.layer_norm = self.old
