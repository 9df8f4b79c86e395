"""What ranks do in the tests: importable by name, as each is a new process."""

import os
import signal
import time

import torch
import torch.distributed as dist

from helpers.distributed import joined


def one_raises():
    with joined("gloo"):
        if dist.get_rank() == 1:
            raise RuntimeError("planted")
        dist.all_reduce(torch.zeros(1))
        time.sleep(1000)  # and if that didn't fail, be in the way


def is_killed():
    os.kill(os.getpid(), signal.SIGKILL)
