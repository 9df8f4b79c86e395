"""Checkpoints of training on many ranks.

Each rank writes its shard of a checkpoint; any number of ranks can read it, by any strategy. Tensors are stored under
the plain model's names, sharded as on the ranks; a rank reads from each file the part that falls into its own shard. It
costs one copy of parameters and optimizer state on disk, and no rank ever assembles the full state.

Torch unpickles a checkpoint's `.metadata` and its numbers, which would run what a hostile file says. Here both are
read first by unpicklers that know nothing but what such a checkpoint holds.
"""

import io
import pathlib
import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as storage
from torch import nn
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.optim import Optimizer

# Optimizer state by parameter name, independent of the optimizer's groups and order.
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)

SAFE = {("torch", "Size"), ("torch.serialization", "_get_layout"), ("builtins", "set")}
SAFE |= {("torch.distributed.checkpoint.filesystem", "_StorageInfo")}
SAFE |= {(module, name) for module in ("pathlib", "pathlib._local") for name in pathlib.__all__ if "Path" in name}
SAFE |= {(metadata.__name__, name) for name, value in vars(metadata).items() if isinstance(value, type)}
SAFE |= {("torch", name) for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


def save(folder: str | Path, model: nn.Module, optimizer: Optimizer, step: int) -> None:
    """Write a checkpoint of training after `step` steps."""
    storage.save(_state(model, optimizer, step), checkpoint_id=str(folder))


def load(folder: str | Path, model: nn.Module, optimizer: Optimizer) -> int:
    """Restore model and optimizer from a checkpoint; returns the number of steps done."""
    check(folder)
    state = _state(model, optimizer, 0)
    storage.load(state, checkpoint_id=str(folder), planner=_Planner())
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=FLAT)
    return state["step"]


def check(folder: str | Path) -> None:
    """A ValueError unless there is a checkpoint in the folder that holds data alone."""
    file = Path(folder) / ".metadata"
    if not file.is_file():
        raise ValueError(f"there is no checkpoint in {folder}")
    try:
        with open(file, "rb") as stream:
            _Unpickler(stream).load()
    except Exception as error:  # damaged bytes fail in many ways
        raise ValueError(f"{file}: not a checkpoint's metadata ({error}); nothing of it is loaded") from error


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in SAFE:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)


class _Planner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        torch.load(value, weights_only=True)  # an error, if it is more than numbers and text
        value.seek(0)
        super().load_bytes(read_item, value)


def _state(model: nn.Module, optimizer: Optimizer, step: int) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer, options=FLAT)
    return {"model": model_state, "optimizer": optimizer_state, "step": step}
