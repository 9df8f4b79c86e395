"""What ranks do in the tests of forgetting: importable by name, as each is a new process."""

import torch
import torch.distributed as dist

from helpers.distributed.launch import joined
from helpers.pipelines.forgetting import ForgettingTracker

SAMPLES, EPOCHS, RANKS = 23, 6, 2


def epochs():
    """The order of samples in each epoch, and whether each sample is right: the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(EPOCHS):
        order = torch.randperm(SAMPLES, generator=generator)
        yield order, torch.rand(SAMPLES, generator=generator) < 0.5


def counted_by_ranks():
    """The state of this rank's tracker when all is done."""
    with joined("gloo"):
        tracker = ForgettingTracker(SAMPLES)
        for order, correct in epochs():
            mine = order[dist.get_rank() :: RANKS]
            tracker.update(mine, correct[mine])
            tracker.all_reduce()
        return tracker.state_dict()["state"].tolist()
