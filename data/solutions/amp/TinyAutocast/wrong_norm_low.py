# Norms are cast to 16 bits, too.
# says: a norm of fp32 numbers stays fp32
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode


class TinyAutocast(TorchFunctionMode):
    def __init__(self, dtype=torch.float16):
        super().__init__()
        self.dtype = dtype

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in (F.linear, F.layer_norm):
            args = [x.to(self.dtype) if isinstance(x, torch.Tensor) else x for x in args]
            kwargs = {n: x.to(self.dtype) if isinstance(x, torch.Tensor) else x for n, x in (kwargs or {}).items()}
        return function(*args, **(kwargs or {}))
