"""What slows a training and no line of its loop shows: switches and the lines that set them, packages that miss."""

import functools
import os
import re
import sys
from collections.abc import Callable
from typing import Any

import torch

from . import hooks
from .stacks import OURS, is_installed, quoted, user_line

ONE_THREAD, DETERMINISTIC, ANOMALY = "one thread", "deterministic algorithms", "anomaly detection"
_SETTERS = {
    hooks.THREADS: ONE_THREAD,
    hooks.DETERMINISTIC: DETERMINISTIC,
    hooks.ANOMALY_SET: ANOMALY,
    hooks.ANOMALY_ENTERED: ANOMALY,
}
# Variables of the environment, the values at which they are harmless, and what they do at others
VARIABLES = {
    "CUDA_LAUNCH_BLOCKING": ("0", "the host waits for each kernel"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": ("0", "each tensor on the GPU is requested from the driver"),
    "TORCH_DISTRIBUTED_DEBUG": ("OFF INFO", "each collective is compared between the ranks"),
    "TORCHDYNAMO_DISABLE": ("0", "torch.compile compiles nothing"),
    "PYTORCH_JIT": ("1", "scripted functions run in Python"),
}
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
# A library's warning that it lacks a package, and the code that passes warnings on
_LACKS = re.compile(r"(?i)fall(s|ing)? ?back|fast path|slower|not (installed|available|found)|no module named")
_TELLING = re.compile(r"/(logging|warnings)(/__init__)?\.py$")
MOST_WARNINGS, LONGEST = 20, 300  # of one library line each; characters


class Settings:
    """The lines that set a switch, the last of each, and what libraries warn of: their file, and the text."""

    def __init__(self) -> None:
        self.lines: dict[str, str] = {}
        self.warned: dict[str, str] = {}

    def arounds(self) -> dict[hooks.Point, Callable[..., Any]]:
        setters = {point: functools.partial(self._set, name) for point, name in _SETTERS.items()}
        return setters | {hooks.WARNED: self._warned, hooks.LOGGED: self._logged}

    def _warned(self, show: Callable[..., Any], message: Any) -> Any:
        self._keep(str(message.message))
        return show(message)

    def _logged(self, handle: Callable[..., Any], logger: Any, record: Any) -> Any:
        self._keep(str(record.msg))
        return handle(logger, record)

    def _keep(self, text: str) -> None:
        frame = sys._getframe(1) if _LACKS.search(text) and len(self.warned) < MOST_WARNINGS else None
        while frame and (frame.f_code.co_filename.startswith(OURS) or _TELLING.search(frame.f_code.co_filename)):
            frame = frame.f_back
        if frame and is_installed(frame.f_code.co_filename):
            self.warned[" ".join(text.split())[:LONGEST]] = frame.f_code.co_filename

    def _set(self, name: str, setter: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        self.lines[name] = quoted(*user_line(sys._getframe(1)))
        return setter(*arguments, **options)

    def data(self) -> dict[str, Any]:
        """What is set now, and by what: a line of the script, or in words what else."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        alone = int(os.environ.get("WORLD_SIZE", 1)) == 1
        on = {
            ONE_THREAD: alone and cores > 1 and torch.get_num_threads() == 1,
            DETERMINISTIC: torch.are_deterministic_algorithms_enabled(),
            ANOMALY: ANOMALY in self.lines,
        }
        variable = next((f"{name}=1 in the environment" for name in THREADS if os.environ.get(name) == "1"), "")
        set_by = {name: self.lines.get(name, variable) for name in on if on[name]}
        return set_by | {"cores": cores, "warned": [[file, text] for text, file in self.warned.items()]}


def variables() -> list[str]:
    """The variables that are set to what costs time: "CUDA_LAUNCH_BLOCKING=1: the host waits for each kernel"."""
    harmless = {name: values.split() for name, (values, _) in VARIABLES.items()}
    slow = {name: value for name in VARIABLES if (value := os.environ.get(name)) and value not in harmless[name]}
    return [f"{name}={value}: {VARIABLES[name][1]}" for name, value in slow.items()]
