"""A process of somebody's script that disturbs nobody: files, seeds, and a port to rendezvous at of its own."""

import os
import random
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from . import hooks, run_facts, scratch


def enter(root: str, folders: Sequence[str], seed: int) -> scratch.Scratch:
    """Let this process write to the scratch `root` in place of the user's `folders`, and draw other numbers by `seed`.

    It goes on in the scratch's copy of the current folder.
    """
    folder = scratch.Scratch(root, folders)
    os.chdir(folder.mirror_working_folder(os.getcwd()))
    scratch.install(folder)
    run_facts.user_path = folder.user_path
    fix_seeds(seed)
    hooks.wrap({hooks.RENDEZVOUS: _at_a_free_port})
    return folder


def fix_seeds(seed: int) -> None:
    """Let every seed that the script sets be another one for another `seed`, and none come from the clock."""
    manual_seed = torch.manual_seed

    def reseeded(set_seed: Callable[..., Any], *given: Any, **named: Any) -> Any:
        value, *others = (*given, *named.values()) or (None,)
        known = value is None or isinstance(value, (int, np.integer))
        return set_seed((value or 0) + seed if known else value, *others)

    def fixed(_seed: Callable[[], int]) -> int:
        manual_seed(seed)
        return seed

    hooks.wrap(dict.fromkeys(hooks.SEEDS, reseeded) | dict.fromkeys(hooks.CLOCK_SEEDS, fixed))


def begin_seeds() -> None:
    """Set the seeds with which a script begins; `fix_seeds` adds its own."""
    for set_seed in (random.seed, np.random.seed, torch.manual_seed):
        set_seed(0)


def _at_a_free_port(start: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """A process group of one at a free port: processes that live side by side can't listen on one."""
    if int(os.environ.get("WORLD_SIZE", options.get("world_size", 1))) <= 1:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            os.environ["MASTER_PORT"] = str(free.getsockname()[1])
    return start(*arguments, **options)


def end(reason: str) -> None:
    """End this process at once; the reason is the last that it prints."""
    print(f"\n{reason}", flush=True)
    sys.stderr.flush()
    os._exit(1)
