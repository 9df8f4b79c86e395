"""Training steps (forward, loss, backward, optimizer) of compiled models against eager ones.

The model is compiled with its loss and backward; the optimizer is torch's fused one with every backend. torch.compile
captures the backward graph at the first call; with TorchScript autograd records the operations.
"""

import copy
import tempfile
import time
from collections.abc import Callable, Iterable
from types import SimpleNamespace

import pandas as pd
import torch
from torch import Tensor, nn

from ...book.table import Worth, table
from ...book.values import TIMES, derived, lacking, speedup, timed
from ...compilers import backends, runtimes
from ...compilers.backends import COMPILE, COMPILE_MODES, EAGER, FIRST_RUNS, TRACE
from ...compilers.messages import failures_named
from ...lab import Disagreement, Row, device
from ...lab.precision import fp32_products
from ...lab.timing import relative_error
from ...training import Trainer
from . import workloads
from .side_by_side import SPEEDS, Runs, modes_named, side_by_side, spread, waited
from .workloads import BERT_BASE, LLAMA, RESNET_18, TINY_BERT, each

STEPS = 5  # whose losses are compared
SAME = 1.03  # a smaller speedup counts as no difference

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9, fused=True),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=2e-5, fused=True),
}

# Relative tolerances against eager, for each step's loss; in fp32 the first step's gradient may be twice as far away,
# as ‖a − b‖ / ‖b‖. Rounding differences are amplified by steps and by batch norms: ResNet-18's gradient over 16
# pictures in eager fp32 itself differs by 0.3 % from fp64's, and by 1.2 % with channels last, which inductor chooses.
TOLERANCE = {"fp32": 1e-2, "bf16": 1e-1}

# In bf16 the gradient needs another criterion: eager's differs by up to a third of its norm from fp32's, and nearly as
# much from its own with the pictures in another order. So the distance from fp32's gradient may be this many times
# eager's distance, plus a margin.
BF16_FACTOR, BF16_MARGIN = 1.25, 0.02


@table(
    small=each((TINY_BERT,), "fp32", (2,)),
    cpu=each((RESNET_18,), "fp32", (8,)) + each((BERT_BASE,), "bf16", (4,)) + each((LLAMA,), "bf16", (8,)),
    gpu=[],
    version=3,
    columns=SPEEDS + "backend break_even_steps?",
    worth=Worth(20, "a training step by backend", cpu=49.7),
)
def training(model: str, precision: str, batch: int) -> list[Row]:
    """Training steps by each compiler and by eager, in turn, after their losses and gradients were compared.

    On a CPU alone: on a GPU the ladder of chapter 5 has the step that is compiled.
    """
    backends = {TINY_BERT: (TRACE,), RESNET_18: (TRACE, COMPILE)}.get(model, (COMPILE,))
    return measure_training(model, batch, backends, precision=precision)


def measure_training(
    model: str, batch: int, chosen: Iterable[str], *, precision: str = "fp32", seconds: float | None = None
) -> list[Row]:
    """Time of a training step by each backend, as a row each, from one comparison with one eager baseline.

    In `bf16`, by autocast, the weights remain in fp32.

    The optimizer is SGD with momentum for pictures, AdamW for text. All start from the same weights and train on one
    batch, without dropout, whose random numbers would differ. First the losses of five steps and the first gradient
    are compared with eager's; then the backends' steps run in turn. `build_s`: tracing or compiling of
    forward and backward, and the first three steps, as the second and third may still compile or record;
    `break_even_steps`: after how many steps that time is made up for, where a step is faster.

    Memory: a copy of the model with gradients and optimizer state for each backend.
    """
    optimizer = "SGD" if model in workloads.RESNET_MODELS else "AdamW"
    with fp32_products(), tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        data = (*workloads.example(model, batch), workloads.targets(model, batch))
        data = tuple(tensor.to(device()) for tensor in data)
        net = workloads.trainable(model).to(device())
        exact = gradient_in_fp32(net, data) if precision == "bf16" else None
        eager: list = []  # its gradient and its losses

        def built(backend: str, runs: Runs) -> tuple[Callable[[], Tensor], Row]:
            twin = copy.deepcopy(net)
            backends.start(backend)
            began = time.perf_counter()
            with backends.empty_cache(backend, folder), failures_named("compile"):
                step = training_step(backend, twin, data, optimizer, precision)
                losses, gradient = [float(step())], gradients(twin)
                losses += [float(step()) for _ in range(FIRST_RUNS - 1)]
                build_s = time.perf_counter() - began
                losses += [float(step()) for _ in range(STEPS - FIRST_RUNS)]
            if backend == EAGER:
                eager.extend((gradient, losses))
            check_gradient(backend, gradient, eager[0], exact, precision)
            check_losses(backend, losses, eager[1], TOLERANCE[precision])
            return waited(step), {"build_s": build_s}

        rows = side_by_side(chosen, built, seconds)
    for row in rows:
        if "median_ms" in row:
            gained = (row["baseline_ms"] - row["median_ms"]) / 1e3
            row["break_even_steps"] = row["build_s"] / gained if gained > 0 else None
    return rows


def training_step(
    backend: str, net: nn.Module, data: tuple[Tensor, Tensor], optimizer: str, precision: str
) -> Callable[[], Tensor]:
    """A function that makes one step on the batch and returns the loss before it, without a sync. Gradients remain
    until its next call. `net` returns the loss of inputs and targets."""
    autocast = {"device_type": data[0].device.type, "dtype": torch.bfloat16, "enabled": precision == "bf16"}
    rule = OPTIMIZERS[optimizer](net.parameters())
    with torch.autocast(**autocast, cache_enabled=False):  # else a trace would contain cached casts as constants
        forward = _forward(backend, net, data)

    def loss(*data: Tensor) -> tuple[Tensor]:
        with torch.autocast(**autocast):
            return (forward(*data),)

    trainer = Trainer(net, loss, rule)
    return lambda: trainer.step(*data)


def gradients(net: nn.Module) -> Tensor:
    """All of a model's gradients in one vector."""
    return torch.cat([p.grad.detach().flatten() for p in net.parameters() if p.grad is not None])


def gradient_in_fp32(net: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
    """The first step's gradient without autocast, computed on a copy of the model."""
    copied = copy.deepcopy(net)
    copied(*data).backward()
    return gradients(copied)


def check_gradient(backend: str, gradient: Tensor, eager: Tensor, exact: Tensor | None, precision: str) -> None:
    """Raise a `Disagreement` if a gradient's distance from `exact` if given, else from eager's, is too large."""
    error = relative_error(gradient, eager if exact is None else exact)
    bound, of = 2 * TOLERANCE[precision], "eager's"
    if exact is not None:
        bound, of = BF16_FACTOR * relative_error(eager, exact) + BF16_MARGIN, "fp32's"
    if not error <= bound:  # a NaN is never within bounds
        raise Disagreement(
            f"{backend!r} has a gradient that differs by {error:.3g} of {of} norm; at most {bound:.3g} is allowed"
        )


def check_losses(backend: str, losses: list[float], expected: list[float], tolerance: float) -> None:
    """Raise a `Disagreement` that names the first step outside the tolerance."""
    for number, (ours, theirs) in enumerate(zip(losses, expected, strict=True), 1):
        if not (share := abs(ours - theirs) / abs(theirs)) <= tolerance:
            raise Disagreement(
                f"{backend!r} has loss {ours:.6g} at step {number}, eager {theirs:.6g}: {share:.2g} of it apart, "
                f"at most {tolerance:g} is allowed"
            )


def _forward(backend: str, net: nn.Module, data: tuple[Tensor, Tensor]) -> Callable[..., Tensor]:
    if backend == TRACE:
        # Tracing in training mode updates the batch norms' running statistics; they are restored.
        state = copy.deepcopy(net.state_dict())
        traced = runtimes.traced(net, data)
        net.load_state_dict(state)
        return traced
    return runtimes.compiled(net, COMPILE_MODES[backend]) if backend in COMPILE_MODES else net


# Numbers


@training.numbers()
def _(rows: pd.DataFrame) -> SimpleNamespace:
    """Training steps against eager ones; a speedup below `SAME` has no break-even."""
    others = modes_named(rows[rows["backend"] != "eager"])
    others = others.assign(
        spread=spread(others, "p20_ms", "p80_ms", ".0f"),
        break_even_steps=others["break_even_steps"].where(others["speedup"] > SAME),
    )
    columns = ["model", "batch", "precision", "backend", "median_ms", "spread", "baseline_ms", "speedup", "build_s"]
    heads = {"median_ms": "median, ms", "spread": "p20–p80", "baseline_ms": "eager, ms", "build_s": "build, s"}
    heads |= {"break_even_steps": "break-even steps"}
    compiled = others[others["backend"].str.startswith("torch.compile")].sort_values("speedup")
    absent = lacking("training by torch.compile", TIMES)
    speedups = [speedup(row, 2) for _, row in compiled.iterrows()] or [absent]
    steps = compiled["break_even_steps"].iloc[-1] if len(compiled) else float("nan")
    return SimpleNamespace(
        steps=timed(others, [*columns, "break_even_steps"]).rename(columns=heads),
        least=speedups[0],
        most=speedups[-1],
        most_model=compiled["model"].iloc[-1].partition(",")[0] if len(compiled) else "",
        most_break_even=derived(steps, "build time over time gained", "", 0) if steps == steps else absent,
        no_difference=derived(SAME, "a setting"),
    )
