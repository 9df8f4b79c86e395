# The inputs are cast, the weights are not.
# says: a linear layer gives bfloat16: RuntimeError
import torch
import torch.nn.functional as F


class MyAutocast:
    def __init__(self, dtype=torch.float16):
        self.dtype = dtype

    def __enter__(self):
        self.old = F.linear, F.layer_norm
        linear, norm = self.old
        F.linear = lambda x, w, b=None: linear(x.to(self.dtype), w, b)
        F.layer_norm = lambda x, *a, **k: norm(x.float(), *a, **k)
        return self

    def __exit__(self, *_):
        F.linear, F.layer_norm = self.old
