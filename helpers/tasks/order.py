"""The order of an epoch: the same whenever the run is resumed."""

import torch
from torch import Tensor


def shuffled(size: int, seed: int, epoch: int) -> Tensor:
    return torch.randperm(size, generator=torch.Generator().manual_seed(1_000_003 * seed + epoch))
