"""Training steps (forward, loss, backward, optimizer) of compiled models against eager ones.

Only the model is compiled, with its backward; loss and optimizer are torch's with every backend. torch.compile captures
the backward graph at the first call; with TorchScript autograd records the operations.
"""

import copy
import tempfile
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helpers.lab import Disagreement, compare, device
from helpers.lab.arguments import check_choice, check_positive
from helpers.lab.experiment import FAILED
from helpers.lab.records import STATUS, Row
from helpers.lab.timing import relative_error
from helpers.models.bert import Classifier

from . import models, runtimes
from .backends import (
    AUTOTUNE,
    COMPILE,
    COMPILE_MODES,
    EAGER,
    FIRST_RUNS,
    OVERHEAD,
    SCRIPT,
    TRACE,
    compile_cache,
    missing_because,
    start,
)
from .latency import rounds_for, speeds, waited
from .messages import ExportFailed, failures_named

BACKENDS = (EAGER, TRACE, SCRIPT, COMPILE, OVERHEAD, AUTOTUNE)
PRECISIONS = ("fp32", "tf32", "bf16")  # bf16: autocast, weights in fp32

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=2e-5),
}

# Relative tolerances against eager, for each step's loss and for the first step's gradient, as ‖a − b‖ / ‖b‖. Rounding
# differences are amplified by steps and by batch norms: ResNet-18's gradient over 16 pictures in eager fp32 itself
# differs by 0.3 % from fp64's, and by 1.2 % with channels last.
TOLERANCE = {"fp32": 1e-2, "tf32": 3e-2, "bf16": 1e-1}

# In bf16 the gradient needs another criterion: eager's differs by a third of its norm from fp32's, and nearly as much
# from its own with the pictures in another order. So the distance from fp32's gradient may be this many times
# eager's distance, plus a margin.
BF16_FACTOR, BF16_MARGIN = 1.25, 0.02


def measure_training(
    model: str,
    backend: str,
    batch: int,
    *,
    precision: str | None = None,
    steps: int = 5,
    seconds: float = 10.0,
    cold: bool = True,
) -> Row:
    """Time of a training step by a backend and by eager, in turn, after comparing `steps` steps of both; one row.

    By default `precision` is bf16 autocast on CUDA and fp32 on the CPU; the optimizer is SGD with momentum for
    pictures, AdamW for text. Both start from the same weights and train on one batch with random labels, without
    dropout, whose random numbers would differ. `build_s`: tracing, scripting or compiling of forward and backward, and
    the first three steps, as the second and third may still compile or record. `loss` and `eager_loss` are those of the
    last of the `steps`; gradient errors are of the first, see `same_gradient`. Times are as in
    `latency.measure_latency`. If a backend can't run here, fails, or disagrees, the row's status says so.

    Memory: a second copy of the model for the backend; in bf16, before it, temporarily one for the fp32 gradient.
    """
    precision = precision or ("bf16" if device().type == "cuda" else "fp32")
    optimizer = "sgd" if model in models.RESNET_MODELS else "adamw"
    check_choice(BACKENDS, backend=backend)
    check_choice(PRECISIONS, precision=precision)
    check_positive(steps=steps)
    settings = {"precision": precision, "optimizer": optimizer}
    if reason := missing_because(backend):
        return settings | {STATUS: reason}
    with models.products(precision), tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        data = tuple(tensor.to(device()) for tensor in models.example(model, batch))
        targets = models.labels(models.classes_of(model), batch).to(device())
        net = trainable(model).to(device())
        exact = gradient_in_fp32(net, data, targets) if precision == "bf16" else None
        twin = copy.deepcopy(net)
        eager = training_step(EAGER, net, data, targets, optimizer, precision)
        expected, gradient = [float(eager())], gradients(net)
        expected += [float(eager()) for _ in range(steps - 1)]
        try:
            start(backend)
            began = time.perf_counter()
            with compile_cache(backend, folder, cold), failures_named("compile"):
                step = training_step(backend, twin, data, targets, optimizer, precision)
                losses, twin_gradient = [float(step())], gradients(twin)
                losses += [float(step()) for _ in range(min(FIRST_RUNS, steps) - 1)]
                build_s = time.perf_counter() - began
                losses += [float(step()) for _ in range(steps - len(losses))]
            facts = same_gradient(backend, twin_gradient, gradient, exact, precision)
            facts |= same_losses(backend, losses, expected, TOLERANCE[precision])
            del twin_gradient, gradient, exact
        except (Disagreement, ExportFailed) as error:
            return settings | {STATUS: f"{FAILED}{error}"}
        both = {EAGER: waited(eager)} | ({} if backend == EAGER else {backend: waited(step)})
        rounds, warmup = rounds_for(both, seconds)
        times = compare(both, rounds=rounds, warmup=warmup, check=False)
    return settings | speeds(times, backend, batch) | facts | {"build_s": build_s, "threads": torch.get_num_threads()}


def trainable(model: str) -> nn.Module:
    """A model with a classifier's logits as outputs, in training mode and without dropout."""
    if model in models.RESNET_MODELS:
        return models.network(model).train()
    encoder = models.network(model, dropout=0.0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return Classifier(encoder, models.classes_of(model)).train()


def training_step(
    backend: str, net: nn.Module, data: tuple[Tensor, ...], targets: Tensor, optimizer: str, precision: str
) -> Callable[[], Tensor]:
    """A function that makes one step on the batch and returns the loss before it, without a sync. Gradients remain
    until its next call."""
    autocast = {"device_type": targets.device.type, "dtype": torch.bfloat16, "enabled": precision == "bf16"}
    rule = OPTIMIZERS[optimizer](net.parameters())
    with torch.autocast(**autocast, cache_enabled=False):  # else a trace would contain cached casts as constants
        forward = _forward(backend, net, data)

    def step() -> Tensor:
        with torch.autocast(**autocast):
            logits = forward(*data)
        loss = F.cross_entropy(logits.float(), targets)
        rule.zero_grad(set_to_none=True)
        loss.backward()
        rule.step()
        return loss.detach()

    return step


def gradients(net: nn.Module) -> Tensor:
    """All of a model's gradients in one vector."""
    return torch.cat([p.grad.detach().flatten() for p in net.parameters() if p.grad is not None])


def gradient_in_fp32(net: nn.Module, data: tuple[Tensor, ...], targets: Tensor) -> Tensor:
    """The first step's gradient without autocast, computed on a copy of the model."""
    copied = copy.deepcopy(net)
    F.cross_entropy(copied(*data), targets).backward()
    return gradients(copied)


def same_gradient(backend: str, gradient: Tensor, eager: Tensor, exact: Tensor | None, precision: str) -> Row:
    """The row's columns about the gradient; raises a `Disagreement` if it is outside the tolerance.

    `gradient_error` is the distance from `exact` if given, with eager's distance as `eager_gradient_error`, else from
    eager's; `gradient_tolerance` is the bound.
    """
    row = {"gradient_error": relative_error(gradient, eager if exact is None else exact)}
    bound, of, more = TOLERANCE[precision], "eager's", ""
    if exact is not None:
        row["eager_gradient_error"] = eager_error = relative_error(eager, exact)
        bound, of, more = BF16_FACTOR * eager_error + BF16_MARGIN, "fp32's", f", eager's by {eager_error:.3g}"
    if not row["gradient_error"] <= bound:  # a NaN is never within bounds
        raise Disagreement(
            f"{backend!r} has a gradient that differs by {row['gradient_error']:.3g} of {of} norm{more}; "
            f"at most {bound:.3g} is allowed"
        )
    return row | {"gradient_tolerance": bound}


def same_losses(backend: str, losses: list[float], expected: list[float], tolerance: float) -> Row:
    """The row's columns about the losses; raises a `Disagreement` that names the first step outside the tolerance."""
    shares = [abs(ours - theirs) / abs(theirs) for ours, theirs in zip(losses, expected, strict=True)]
    for number, (share, ours, theirs) in enumerate(zip(shares, losses, expected, strict=True), 1):
        if not share <= tolerance:
            raise Disagreement(
                f"{backend!r} has loss {ours:.6g} at step {number}, eager {theirs:.6g}: {share:.2g} of it apart, "
                f"at most {tolerance:g} is allowed"
            )
    return {
        "loss": losses[-1],
        "eager_loss": expected[-1],
        "loss_difference": max(shares),
        "tolerance": tolerance,
        "steps": len(losses),
    }


def _forward(backend: str, net: nn.Module, data: tuple[Tensor, ...]) -> Callable[..., Tensor]:
    if backend == TRACE:
        # Tracing in training mode updates the batch norms' running statistics; they are restored.
        buffers = {name: tensor.clone() for name, tensor in net.named_buffers()}
        traced = runtimes.traced(net, data)
        for name, tensor in net.named_buffers():
            tensor.copy_(buffers[name])
        return traced
    if backend == SCRIPT:
        return runtimes.scripted(net)
    return runtimes.compiled(net, COMPILE_MODES[backend]) if backend in COMPILE_MODES else net
