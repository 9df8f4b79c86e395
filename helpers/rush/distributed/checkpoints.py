"""Checkpoints that each rank writes its part of, and that any number of ranks reads, by any strategy.

Tensors are stored under the names of the plain model, cut as they are held; reading takes from each file what falls
into a rank's own part. It costs one copy of parameters and optimizer state on disk, and no rank ever holds the whole.
"""

from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as storage
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.optim import Optimizer

# Optimizer state by parameter name, whatever groups and order the optimizer has them in.
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def save(folder: str | Path, model: nn.Module, optimizer: Optimizer, step: int) -> None:
    """Write what training needs to go on after `step` steps."""
    storage.save(_state(model, optimizer, step), checkpoint_id=str(folder))


def load(folder: str | Path, model: nn.Module, optimizer: Optimizer) -> int:
    """Put model and optimizer where they were when saved; how many steps were done then."""
    state = _state(model, optimizer, 0)
    storage.load(state, checkpoint_id=str(folder))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=FLAT)
    return state["step"]


def _state(model: nn.Module, optimizer: Optimizer, step: int) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer, options=FLAT)
    return {"model": model_state, "optimizer": optimizer_state, "step": step}
