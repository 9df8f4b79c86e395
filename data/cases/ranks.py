"""What ranks do in the tests: importable by name, as each is a new process."""

import copy
import itertools
import math
import os
import signal
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from helpers.amp import DynamicGradScaler
from helpers.distributed import joined, train

CASES = list(itertools.product((False, True), (False, True), (math.inf, math.nan)))  # clipped, fused, a gradient


def one_raises():
    with joined("gloo"):
        if dist.get_rank() == 1:
            raise RuntimeError("planted")
        dist.all_reduce(torch.zeros(1))
        time.sleep(1000)  # and if that didn't fail, be in the way


def is_killed():
    os.kill(os.getpid(), signal.SIGKILL)


def work_and_scaled_steps(jobs):
    """The jobs' rows, and the number of scaled trainings that sharded layers took as whole ones do."""
    with joined("gloo") as device:
        return [*(train(job, device) for job in jobs), sum(map(scaled_steps_of_sharded_layers, CASES))]


def scaled_steps_of_sharded_layers(case):
    """Sharded layers end with the weights and scales of whole ones. With two ranks the last layer has one row, so that
    the last rank has none of it, and this rank alone meets a gradient that isn't finite."""
    (clip, fused, bad), rank, ranks = case, dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    whole = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 1))
    sharded = copy.deepcopy(whole)
    for part in (*sharded, sharded):
        fully_shard(part, mesh=init_device_mesh("cpu", (ranks,)))
    x = torch.randn(2 * ranks, 4)
    outcomes = []
    for model, own in ((whole, x), (sharded, x[2 * rank : 2 * rank + 2])):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused, foreach=not fused)
        scaler = DynamicGradScaler("cpu", 8.0)
        for step in range(3):
            optimizer.zero_grad()
            scaler.scale(model(own).square().mean()).backward()
            if step == 1 and (model is whole or rank == ranks - 1):
                grad = model[0].weight.grad
                (grad if model is whole else grad.to_local())[-1].fill_(bad)
            norm = scaler.clip_grad_norm_(optimizer, 0.1) if clip else None
            assert norm is None or torch.isfinite(norm) == (step != 1)
            scaler.step(optimizer)
            scaler.update()
        outcomes.append((scaler.state_dict(), scaler.skipped_steps()))
    for ours, theirs in zip(sharded.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours.full_tensor(), theirs)
    return outcomes[0] == outcomes[1] and outcomes[0][1] == 1
