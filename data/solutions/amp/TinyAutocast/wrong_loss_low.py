# Norm and softmax are in fp32, but losses are not.
# says: cross_entropy of bfloat16 numbers is fp32: bfloat16
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

TYPES = {F.layer_norm: torch.float32, F.softmax: torch.float32}


class TinyAutocast(TorchFunctionMode):
    def __init__(self, dtype=torch.float16):
        super().__init__()
        self.types = {F.linear: dtype, torch.matmul: dtype, **TYPES}

    def __torch_function__(self, function, types, args=(), kwargs=None):
        to = self.types.get(function)
        args = [x.to(to) if to and isinstance(x, torch.Tensor) else x for x in args]
        return function(*args, **(kwargs or {}))
