from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch.nn import functional


def casting(function, to):
    def cast(v):
        return v.to(to) if isinstance(v, torch.Tensor) else v
    return lambda *a, **k: function(*map(cast, a), **{n: cast(v) for n, v in k.items()})


@contextmanager
def MyAutocast(dtype=torch.float16):
    low = casting(functional.linear, dtype)
    high = casting(functional.layer_norm, torch.float32)
    with patch.object(functional, "linear", low), patch.object(functional, "layer_norm", high):
        yield
