"""A task, and its trainer: a step and a validation in a precision, with or without deliberate inefficiencies.

    trainer = TaskTrainer(task, Precision("dynamic"))
    for batch in trainer.epoch(0):
        loss = trainer.step(batch)          # on the device; nothing waits
    trainer.validate()                      # {"loss": …, "accuracy": …}

Its profiler ranges are "forward", "loss", "backward", "optimizer" and "metrics".
"""

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from ..amp import Autocast, DynamicGradScaler, StaticGradScaler
from ..batching.attention import without_cudnn_attention
from ..lab import device, missing_because
from ..lab.precision import fp32_products
from .switches import NO_FAULTS, Faults
from .trainer import Trainer

# `fp32` excludes TF32. `fp16` is a model in pure fp16, without autocast or scaler. The others use autocast: `bf16`,
# `amp` for fp16 without a scaler, and fp16 with the named scaler.
PRECISIONS = ("fp32", "fp16", "bf16", "amp", "static", "dynamic", "torch-scaler")


@dataclass(frozen=True)
class Precision:
    """One of `PRECISIONS`, by our autocast or torch's; `growth_interval` is that of the dynamic scale."""

    name: str = "fp32"
    autocast: str = "torch"
    growth_interval: int = 2000

    @property
    def dtype(self) -> torch.dtype:
        """The type that matrix products are computed in."""
        return {"fp32": torch.float32, "bf16": torch.bfloat16}.get(self.name, torch.float16)

    def region(self) -> contextlib.AbstractContextManager:
        """A context for forward and loss: autocast, or nothing for fp32 and pure fp16."""
        if self.name in ("fp32", "fp16"):
            return contextlib.nullcontext()
        make = torch.autocast if self.autocast == "torch" else Autocast
        return make(device_type=device().type, dtype=self.dtype)

    def kernels(self) -> contextlib.AbstractContextManager:
        """A context for forward and backward: fp32 excludes TF32 in products and convolutions."""
        return fp32_products() if self.name == "fp32" else contextlib.nullcontext()

    def scaler(self, where: torch.device) -> Any:
        """The gradient scaler; None for a precision that has none."""
        if self.name == "static":
            return StaticGradScaler()
        if self.name == "dynamic":
            return DynamicGradScaler(growth_interval=self.growth_interval)
        if self.name == "torch-scaler":
            return torch.amp.GradScaler(where.type, growth_interval=self.growth_interval)
        return None


def mixed_precision() -> Precision:
    """bf16, which needs no loss scale; fp16 with a dynamic one on a GPU without bf16 units; fp32 on such a CPU."""
    emulated = "dynamic" if device().type == "cuda" else "fp32"
    return Precision(emulated if missing_because("native bf16") else "bf16")


@dataclass(frozen=True)
class Batch:
    """Inputs and targets on the device, and further arguments of the model."""

    inputs: Tensor
    targets: Tensor
    options: dict[str, Any] = field(default_factory=dict)
    real: int = 0  # targets that count (samples, or tokens that aren't padding), known to the host
    weights: Tensor | None = None  # of the classes, in the loss


@dataclass(frozen=True)
class Task:
    """A model, its data, loss and metrics.

    `batches(epoch)` are the training batches of an epoch, `steps(epoch)` is how many it has; `validation()` iterates
    over the validation split once. A metric has `reset`, `update(output, targets)` and `compute`; `metric`, if given,
    is updated in each training step.
    """

    source: str
    model: nn.Module
    loss: Callable[[Tensor, Batch], Tensor]
    validation_metric: Any
    batches: Callable[[int], Iterator[Batch]]
    steps: Callable[[int], int]
    validation: Callable[[], Iterator[Batch]]
    learning_rate: float
    decays: bool = False  # the rate, linearly to zero over the training; not in a captured step, which holds it
    weight_decay: float = 0.01
    micro_batches: int = 1  # backward takes the loss divided by it, as if so many batches made a step
    metric: Any = None
    prepare_s: float = 0.0  # spent once before the first epoch, to decode or to tokenise


@dataclass
class Counts:
    """Totals over the steps of an epoch so far, known to the host."""

    steps: int = 0
    real: int = 0  # targets that counted
    positions: int = 0  # targets with the padding


class TaskTrainer(Trainer):
    """Trains and validates a task, epoch by epoch.

    `faults` are those that it has on purpose. `compiles` compiles the model for training, not for validation.
    `captures` records the step as a CUDA graph, on a GPU. `clip` is the maximum norm of the gradients.
    """

    def __init__(
        self,
        task: Task,
        precision: Precision | None = None,
        *,
        faults: Faults = NO_FAULTS,
        compiles: bool = False,
        captures: bool = False,
        clip: float | None = None,
    ) -> None:
        self.task, self.faults = task, faults
        self.precision = precision = precision or Precision()
        model = task.model.half() if precision.name == "fp16" else task.model
        self.device = next(model.parameters()).device
        scaler = precision.scaler(self.device)
        # Under a loss scale only a fused optimizer skips a step without asking the host, which a graph can't do.
        asks_host = scaler is not None and faults.unfused_optimizer
        graphed = captures and self.device.type == "cuda" and not asks_host and not task.decays
        # Fused; for a model in pure fp16 foreach, which computes in fp16 as the rest of its training does.
        kernels = {"foreach": False} if faults.unfused_optimizer else {"fused": True}
        kernels = {"foreach": True} if precision.name == "fp16" else kernels
        options = {"lr": task.learning_rate, "weight_decay": task.weight_decay, "capturable": graphed, **kernels}
        self._in_training = torch.compile(model) if compiles else model  # validation stays eager
        super().__init__(
            model,
            self._loss_of,
            torch.optim.AdamW(model.parameters(), **options),
            scaler=scaler,
            clip=clip,
            divide=task.micro_batches,
            zeros=faults.gradients_zeroed,
            captures=graphed,
        )
        self._start_sums()

    def decay(self, done: float) -> None:
        """The learning rate when that share of the training is done, if the task's rate decays."""
        if self.task.decays:
            for group in self.optimizer.param_groups:
                group["lr"] = self.task.learning_rate * (1 - done)

    def epoch(self, number: int) -> Iterator[Batch]:
        """The batches of an epoch. Resets the sums of loss, metric and counts."""
        self._start_sums()
        return self.task.batches(number)

    def step(self, batch: Batch, look: Callable[[Tensor], Any] | None = None) -> Tensor:
        """A training step on a batch; returns its loss, on the device. `look(loss)` is called after backward.

        At that time the gradients are still scaled and the optimizer hasn't used them, except in a captured step, which
        is over by then.
        """
        if self.captured is None:
            loss, output = self.update(batch, look=look)
        else:
            weights = [] if batch.weights is None else [batch.weights]
            loss, output = self.update(batch.inputs, batch.targets, *weights, look=look)
            self._add_loss(loss)
        with record_function("metrics"):
            if self.task.metric is not None:
                self.task.metric.update(output, batch.targets)
                if self.faults.metrics_collected:
                    self.task.metric.compute()
            self.counts.steps += 1
            self.counts.real += batch.real
            self.counts.positions += batch.targets.numel()
        if self.faults.memory_returned and self.device.type == "cuda":
            torch.cuda.empty_cache()
        return loss

    def forward(self, batch: Batch, model: nn.Module | Callable[..., Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """Loss and output of a batch, under autocast if the precision has it."""
        if self.precision.name == "fp16":
            pair = {"inputs": batch.inputs, "targets": batch.targets}
            batch = replace(batch, **{name: x.half() for name, x in pair.items() if x.is_floating_point()})
        with self.precision.region():
            with record_function("forward"):
                output = (self.model if model is None else model)(batch.inputs, **batch.options)
            with record_function("loss"):
                return self.task.loss(output, batch), output

    def validate(self) -> dict[str, float]:
        """Loss and metric over the whole validation split, in the precision of training."""
        self.model.eval()
        self.task.validation_metric.reset()
        total, real = 0.0, 0
        with contextlib.nullcontext() if self.faults.validation_keeps_graph else torch.inference_mode():
            for batch in self.task.validation():
                total = total + self._judge(batch).float() * batch.real
                real += batch.real
        self.model.train()
        return {"loss": float(total) / max(real, 1)} | scores(self.task.validation_metric)

    def train_scores(self) -> dict[str, float]:
        """The mean loss of the epoch's steps so far, and the task's metric over them. Waits for the device."""
        loss = {"loss": float(self._loss) / max(self.counts.steps, 1)}
        return loss | (scores(self.task.metric) if self.task.metric is not None else {})

    @contextlib.contextmanager
    def settings(self) -> Iterator[None]:
        """Torch's global settings for the training; cuDNN's attention is off, as it would plan for each length."""
        cudnn = torch.backends.cudnn
        with contextlib.ExitStack() as stack:
            stack.enter_context(without_cudnn_attention())
            stack.enter_context(self.precision.kernels())
            if (fault := self.faults.cudnn_deterministic) is not None:
                flags = {"benchmark": not fault, "deterministic": fault, "allow_tf32": cudnn.allow_tf32}
                stack.enter_context(cudnn.flags(enabled=True, **flags))
            if self.faults.deterministic is not None:
                stack.enter_context(_deterministic(self.faults.deterministic))
            yield

    def _loss_of(self, batch: Batch | Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        """Loss and output of a training batch; a captured step gets the batch as inputs, targets and weights."""
        if isinstance(batch, Batch):
            loss, output = self.forward(batch, self._in_training)
            self._add_loss(loss.detach())
            return loss, output
        targets, weights = (*tensors, None)[:2]
        return self.forward(Batch(batch, targets, weights=weights), self._in_training)

    def _add_loss(self, loss: Tensor) -> None:
        """Add to the running loss, on the device; the fault `loss_read` reads it here, which waits."""
        with record_function("metrics"):
            self._loss = self._loss + (loss.item() if self.faults.loss_read else loss)

    def _judge(self, batch: Batch) -> Tensor:
        """The loss of a validation batch, detached: otherwise two graphs would be alive at once."""
        loss, output = self.forward(batch)
        self.task.validation_metric.update(output.detach(), batch.targets)
        return loss.detach()

    def _start_sums(self) -> None:
        self.counts, self._loss = Counts(), 0.0
        if self.task.metric is not None:
            self.task.metric.reset()


def scores(metric: Any) -> dict[str, float]:
    """A metric's values by name; a single number is the accuracy."""
    value = metric.compute()
    return value if isinstance(value, dict) else {"accuracy": value}


@contextlib.contextmanager
def _deterministic(wanted: bool) -> Iterator[None]:
    """Deterministic algorithms, or the fastest. cuBLAS is deterministic only with the environment variable."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    with mock.patch.dict(os.environ), warnings.catch_warnings():
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        warnings.filterwarnings("ignore", message=".*deterministic")  # about ops without such an algorithm
        torch.use_deterministic_algorithms(wanted, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
