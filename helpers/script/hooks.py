"""The functions that are wrapped while somebody's script runs, each listed once, and the one way to wrap them.

    with hooks.wrap({hooks.BACKWARD: around}):  # around(original, *arguments, **options) -> result
        …
    hooks.wrap({hooks.BACKWARD: around})        # for the rest of the process

Of several that wrap one function the last is called first. A call takes a fraction of a microsecond more.
"""

import builtins
import contextlib
import functools
import gc
import inspect
import logging
import random
import time
import timeit
import warnings
from collections.abc import Callable, Mapping
from importlib.machinery import SourceFileLoader
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from torch.utils.data._utils import worker


class Point(NamedTuple):
    """A function, where it is looked up."""

    holder: Any
    name: str


BACKWARD = Point(torch.autograd, "backward")
SCALE = Point(torch.amp.GradScaler, "scale")
OPTIMIZER_BUILT, STEP_MADE = Point(Optimizer, "__init__"), Point(Optimizer, "profile_hook_step")
ZEROED = (Point(Optimizer, "zero_grad"), Point(nn.Module, "zero_grad"))
TRAIN_MODE, EMBEDDING = Point(nn.Module, "train"), Point(nn.Embedding, "forward")
REPLICA = Point(DistributedDataParallel, "forward")
LOADER_BUILT, LOADER_BEGUN = Point(DataLoader, "__init__"), Point(DataLoader, "__iter__")
WORKER = Point(worker, "_worker_loop")
GRADIENTS_OFF = (Point(torch.no_grad, "__enter__"), Point(torch.inference_mode, "__enter__"))
GRADIENTS_BACK = (Point(torch.no_grad, "__exit__"), Point(torch.inference_mode, "__exit__"))
AUTOCAST_BUILT, AUTOCAST = Point(torch.autocast, "__init__"), Point(torch.autocast, "__enter__")
THREADS, DETERMINISTIC = Point(torch, "set_num_threads"), Point(torch, "use_deterministic_algorithms")
ANOMALY_SET, ANOMALY_BUILT, ANOMALY_ENTERED = (
    Point(torch.autograd.set_detect_anomaly, "__init__"),
    Point(torch.autograd.detect_anomaly, "__init__"),
    Point(torch.autograd.detect_anomaly, "__enter__"),
)
DETERMINISM, ANOMALIES = Point(torch._C, "_set_deterministic_algorithms"), Point(torch, "set_anomaly_enabled")
PROFILER = Point(torch.profiler.profile, "start")
CLOCKS = (Point(time, "time"), Point(time, "perf_counter"), Point(time, "monotonic"), Point(timeit, "default_timer"))
EVENT, ELAPSED = Point(torch.cuda.Event, "record"), Point(torch.cuda.Event, "elapsed_time")
SEEDS = (
    Point(torch, "manual_seed"), Point(torch.random, "manual_seed"), Point(random, "seed"), Point(np.random, "seed"),
    Point(np.random, "default_rng"),
)  # fmt: skip
CLOCK_SEEDS = (Point(torch, "seed"), Point(torch.random, "seed"))
WARNED, LOGGED = Point(warnings, "_showwarnmsg"), Point(logging.Logger, "handle")
RENDEZVOUS = Point(torch.distributed, "init_process_group")
PRINT, SOURCE, COLLECT, SAVE = (
    Point(builtins, "print"), Point(SourceFileLoader, "get_code"), Point(gc, "collect"), Point(torch, "save"),
)  # fmt: skip


def built(kind: type) -> Point:
    """The constructor of an optimizer of torch's, by which changes give it options."""
    return Point(kind, "__init__")


def wrap(arounds: Mapping[Point, Callable[..., Any]]) -> contextlib.ExitStack:
    """Wrap these functions; leaving the result as a context puts the originals back."""
    undo = contextlib.ExitStack()
    for point, around in arounds.items():
        undo.enter_context(mock.patch.object(point.holder, point.name, _wrapper(point, around)))
    return undo


def _wrapper(point: Point, around: Callable[..., Any]) -> Any:
    original = getattr(point.holder, point.name)

    @functools.wraps(original)
    def call(*arguments: Any, **options: Any) -> Any:
        return around(original, *arguments, **options)

    is_static = isinstance(inspect.getattr_static(point.holder, point.name), staticmethod)
    return staticmethod(call) if is_static else call
