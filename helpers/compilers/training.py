"""Steps of training by compiled models against eager ones: forward, loss, backward, optimizer.

What is compiled is the model; the loss and the optimizer are torch's with every backend. Backward comes with it:
torch.compile makes a graph of it at the first call, TorchScript lets autograd record what its operations do.
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

# How far from eager's the loss of each step may be, as a share of it, and the gradient of the first, as ‖a − b‖ / ‖b‖.
# Rounding differs from the first step on, and steps make more of it; batch norms do, too: ResNet-18's gradient over 16
# pictures in eager fp32 is itself 0.3 % from that in fp64, and 1.2 % with channels last.
TOLERANCE = {"fp32": 1e-2, "tf32": 3e-2, "bf16": 1e-1}

# In bf16 that would be too much to ask of the gradient: that network's by eager is a third of its norm from fp32's, and
# nearly as far from eager's own where the pictures are only in another order. So what counts there is the distance
# from fp32's, which may be this many times that of eager's, plus a margin.
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
    """One row: milliseconds of a step by a backend and by eager, in turn, once both have learned alike for `steps`.

    `precision` is bf16 autocast on CUDA and fp32 on the CPU if nothing else is said; the optimizer is SGD with momentum
    for pictures, AdamW for text. Both start from the same weights and learn one batch of random labels, without
    dropout, whose random numbers would differ. `build_s` is tracing, scripting, compiling of forward and backward, and
    the first three steps, as the second and third may still compile or record. `loss` and `eager_loss` are those of
    step number `steps`; the gradient's error is of the first, as `same_gradient` has it. Times are as in
    `latency.measure_latency`. A backend that can't run here, that fails, or that learns something else, says so in its
    row.

    A second copy of the model learns with the backend; in bf16 a third takes a step in fp32 before, and goes.
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
                losses, own_gradient = [float(step())], gradients(twin)
                losses += [float(step()) for _ in range(min(FIRST_RUNS, steps) - 1)]
                build_s = time.perf_counter() - began
                losses += [float(step()) for _ in range(steps - len(losses))]
            facts = same_gradient(backend, own_gradient, gradient, exact, precision)
            facts |= same_losses(backend, losses, expected, TOLERANCE[precision])
            del own_gradient, gradient, exact
        except (Disagreement, ExportFailed) as error:
            return settings | {STATUS: f"{FAILED}{error}"}
        both = {EAGER: waited(eager)} | ({} if backend == EAGER else {backend: waited(step)})
        rounds, warmup = rounds_for(both, seconds)
        times = compare(both, rounds=rounds, warmup=warmup, check=False)
    return settings | speeds(times, backend, batch) | facts | {"build_s": build_s, "threads": torch.get_num_threads()}


def trainable(model: str) -> nn.Module:
    """A model that ends in logits, in training mode and without dropout."""
    if model in models.RESNET_MODELS:
        return models.network(model).train()
    encoder = models.network(model, dropout=0.0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return Classifier(encoder, models.classes_of(model)).train()


def training_step(
    backend: str, net: nn.Module, data: tuple[Tensor, ...], targets: Tensor, optimizer: str, precision: str
) -> Callable[[], Tensor]:
    """A function that makes one step on the batch and returns the loss before it, unread. Its gradients stay until the
    next."""
    autocast = {"device_type": targets.device.type, "dtype": torch.bfloat16, "enabled": precision == "bf16"}
    rule = OPTIMIZERS[optimizer](net.parameters())
    with torch.autocast(**autocast, cache_enabled=False):  # a trace would keep the casts that the cache holds
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
    """The first step's gradient without autocast, by a copy of the model, which is left as it is."""
    own = copy.deepcopy(net)
    F.cross_entropy(own(*data), targets).backward()
    return gradients(own)


def same_gradient(backend: str, found: Tensor, eager: Tensor, exact: Tensor | None, precision: str) -> Row:
    """What a row says of the gradient; a `Disagreement` if it is too far off.

    `gradient_error` is its distance from eager's, or, where there is an exact one, from that, with eager's own as
    `eager_gradient_error`; `gradient_tolerance` is the bound that follows.
    """
    row = {"gradient_error": relative_error(found, eager if exact is None else exact)}
    bound, of, more = TOLERANCE[precision], "eager's", ""
    if exact is not None:
        row["eager_gradient_error"] = own = relative_error(eager, exact)
        bound, of, more = BF16_FACTOR * own + BF16_MARGIN, "fp32's", f", eager's by {own:.3g}"
    if not row["gradient_error"] <= bound:  # a NaN is never within bounds
        raise Disagreement(
            f"{backend!r} has a gradient that differs by {row['gradient_error']:.3g} of {of} norm{more}; "
            f"at most {bound:.3g} is allowed"
        )
    return row | {"gradient_tolerance": bound}


def same_losses(backend: str, losses: list[float], expected: list[float], tolerance: float) -> Row:
    """What a row says of the losses; a `Disagreement` names the first step whose loss is too far from eager's."""
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
        # A trace in training mode moves the running means of the batch norms; they are put back.
        buffers = {name: tensor.clone() for name, tensor in net.named_buffers()}
        traced = runtimes.traced(net, data)
        for name, tensor in net.named_buffers():
            tensor.copy_(buffers[name])
        return traced
    if backend == SCRIPT:
        return runtimes.scripted(net)
    return runtimes.compiled(net, COMPILE_MODES[backend]) if backend in COMPILE_MODES else net
