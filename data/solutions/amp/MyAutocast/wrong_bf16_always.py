# The type that is asked for is ignored.
# says: one in another region gives float16: bfloat16
from contextlib import contextmanager
from unittest.mock import patch

import torch
import torch.nn.functional as F


@contextmanager
def MyAutocast(dtype=torch.float16):
    linear, norm = F.linear, F.layer_norm
    low = lambda x, w, b=None: linear(x.bfloat16(), w.bfloat16(), None if b is None else b.bfloat16())
    with patch.object(F, "linear", low), patch.object(F, "layer_norm", lambda x, *a: norm(x.float(), *a)):
        yield
