"""What a task is: a model and what trains it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from helpers.metrics import LMAccuracy, PixelAccuracy


@dataclass(frozen=True)
class Batch:
    """Inputs and targets on the device, and what else the model is called with."""

    inputs: Tensor
    targets: Tensor
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Task:
    """A model and what trains it.

    `batches(epoch, start)` are the training batches of an epoch from number `start` on, `steps(epoch)` says how many
    there are; `validation()` goes through the validation split once.
    """

    source: str
    model: nn.Module
    loss: Callable[[Tensor, Tensor], Tensor]
    accuracy: PixelAccuracy | LMAccuracy
    batches: Callable[[int, int], Iterator[Batch]]
    steps: Callable[[int], int]
    validation: Callable[[], Iterator[Batch]]
    learning_rate: float
