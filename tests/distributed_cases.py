"""What ranks do in the tests: importable by name, as each is a new process."""

import os
import signal
import time

import torch
import torch.distributed as dist

from helpers.rush.distributed import joined


def one_raises():
    with joined("gloo"):
        if dist.get_rank() == 1:
            raise RuntimeError("planted")
        _wait_for_the_other()


def one_is_killed():
    with joined("gloo"):
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        _wait_for_the_other()


def _wait_for_the_other():
    dist.all_reduce(torch.zeros(1))
    time.sleep(120)  # and if that didn't fail, be in the way
