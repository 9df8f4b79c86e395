# The norm computes in 16 bits, too.
# says: a norm of fp32 numbers stays fp32: bfloat16
import torch
import torch.nn.functional as F


class MyAutocast:
    def __init__(self, dtype=torch.float16):
        self.dtype = dtype

    def __enter__(self):
        self.saved = {}
        for name in ("linear", "layer_norm"):
            self.saved[name] = getattr(F, name)
            setattr(F, name, self.lowered(self.saved[name]))

    def lowered(self, fn):
        return lambda *a, **k: fn(*[t.to(self.dtype) if torch.is_tensor(t) else t for t in a], **k)

    def __exit__(self, *_):
        for name, fn in self.saved.items():
            setattr(F, name, fn)
