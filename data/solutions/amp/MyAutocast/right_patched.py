import torch
import torch.nn.functional as F


class MyAutocast:
    def __init__(self, dtype=torch.float16):
        self.dtype = dtype

    def __enter__(self):
        self.linear, self.layer_norm = F.linear, F.layer_norm

        def linear(x, weight, bias=None):
            bias = None if bias is None else bias.to(self.dtype)
            return self.linear(x.to(self.dtype), weight.to(self.dtype), bias)

        def layer_norm(x, shape, weight=None, bias=None, eps=1e-5):
            weight, bias = (None if t is None else t.float() for t in (weight, bias))
            return self.layer_norm(x.float(), shape, weight, bias, eps)

        F.linear, F.layer_norm = linear, layer_norm

    def __exit__(self, *error):
        F.linear, F.layer_norm = self.linear, self.layer_norm
