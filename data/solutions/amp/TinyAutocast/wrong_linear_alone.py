# Of the products only linear layers run in 16 bits.
# says: conv2d gives bfloat16: float32
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

FP32 = F.layer_norm, F.softmax, F.cross_entropy


class TinyAutocast(TorchFunctionMode):
    def __init__(self, dtype=torch.float16):
        super().__init__()
        self.dtype = dtype

    def __torch_function__(self, function, types, args=(), kwargs=None):
        to = self.dtype if function is F.linear else torch.float32 if function in FP32 else None
        args = [x.to(to) if to and torch.is_tensor(x) and x.is_floating_point() else x for x in args]
        return function(*args, **(kwargs or {}))
