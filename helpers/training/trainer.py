"""The trainer: a model, its optimizer and loss scale, the loss of a batch, and the step that they make.

    trainer = Trainer(model, lambda x, y: (F.mse_loss(model(x), y),), optimizer, clip=1.0)
    loss = trainer.step(x, y)          # on the device; nothing waits

A task, a setup of chapter 5's ladder and a job of many ranks are each trained by one.
"""

import contextlib
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.profiler import record_function

from .step import CapturedStep, advance


class Trainer:
    """Updates the weights of a model by a batch, whose tensors are what `loss` takes.

    `loss` returns the loss first; `update` returns the same, detached, and `step` the loss alone. Backward takes the
    loss divided by `divide`. Gradients stay until the next step; with `frees` they are freed at the end of each.
    `zeros` overwrites them with zeros instead. `clip` is the largest norm of the gradients, and `norm` what it was
    before. `captures` makes the step one launch, see `CapturedStep`. `around` makes a context for each step.
    """

    def __init__(
        self,
        model: Any,
        loss: Callable[..., tuple[Tensor, ...]],
        optimizer: Optimizer,
        *,
        scaler: Any = None,
        clip: float | None = None,
        divide: int = 1,
        frees: bool = False,
        zeros: bool = False,
        captures: bool = False,
        around: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
    ) -> None:
        self.model, self.loss, self.optimizer, self.scaler = model, loss, optimizer, scaler
        self.clip, self.divide, self.frees, self.zeros = clip, divide, frees, zeros
        self.norm: Tensor | None = None
        self.captured = CapturedStep(self._update) if captures else None
        self.around = around

    def step(self, *batch: Any) -> Tensor:
        """The loss of a training step, on the device; the next captured step overwrites it."""
        return self.update(*batch)[0]

    def update(self, *batch: Any, look: Callable[[Tensor], Any] | None = None) -> tuple[Tensor, ...]:
        """`look(loss)` is called after backward, when gradients are still scaled; after a captured step at its end."""
        with self.around():
            if self.captured is None:
                return self._update(*batch, look=look)
            outputs = self.captured(*batch)
        if look is not None:
            look(outputs[0])
        return outputs

    def _update(self, *batch: Any, look: Callable[[Tensor], Any] | None = None) -> tuple[Tensor, ...]:
        if not self.frees:
            self.optimizer.zero_grad(set_to_none=not self.zeros)
        outputs = self.loss(*batch)
        with record_function("backward"):
            share = outputs[0] / self.divide if self.divide > 1 else outputs[0]
            (share if self.scaler is None else self.scaler.scale(share)).backward()
        if look is not None:
            look(outputs[0].detach())
        with record_function("optimizer"):
            self.norm = advance(self.optimizer, self.scaler, self.clip)
        if self.frees:
            self.optimizer.zero_grad(set_to_none=True)
        return tuple(output.detach() for output in outputs)
