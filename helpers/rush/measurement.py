"""Speed, memory and loss of a setup as one row: `run`; `epoch` measures training fed by a `DataLoader`.

Model FLOPs a token, by convention: 6 for each parameter (2 forward, 4 backward; a tied embedding counts once, as the
head), and 6 · layers · heads · 2 · head_dim · T for attention, including the causal half that fast kernels skip.
Recomputed activations don't count: MFU is about the model's operations, not the hardware's.
"""

import functools
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from helpers.lab import Timing, bench, device, each, peak_memory
from helpers.lab.ceilings import matmul
from helpers.lab.machine import device_name
from helpers.lab.memory import GIB
from helpers.lab.timing import synchronize
from helpers.models import Llama
from helpers.models.llama import preset

from .setup import Setup
from .trainer import BEFORE_CAPTURE, Trainer

LOSS_STEPS = 8
SEQUENCES = 4  # distinct random sequences for the loss curve; the model can only memorise them
LONGEST_S, LEAST = 40.0, 5  # most seconds of timed steps, and least number of timed steps

# Vendors' peak bf16 operations a second, dense; the first key contained in the device's name applies.
PEAKS = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
    "RTX 4090": 165.2e12,
}


def run(setup: Setup, *, steps: int = 20, warmup: int = 1, loss_steps: int = LOSS_STEPS) -> dict[str, Any]:
    """Train by a setup on `device()` and return its row, as `measure` describes."""
    return measure(lambda: Trainer(setup).step, setup, steps=steps, warmup=warmup, loss_steps=loss_steps)


def measure(
    build: Callable[[], Callable[[Tensor], Tensor]],
    setup: Setup,
    *,
    steps: int = 20,
    warmup: int = 1,
    loss_steps: int = LOSS_STEPS,
) -> dict[str, Any]:
    """Speed, memory and loss of `build()`, a step that trains on tokens (B, T + 1) and returns the loss; one row.

    The first `loss_steps` steps, on fixed tokens, give the loss and warm up. Then `steps` steps on random tokens are
    timed, the copy of the tokens included; if they would take more than 40 s, fewer are, but at least 5 (`n`).
    `compile_s` is the excess of the first step over a timed one. The peak counts what was allocated since `build` was
    called, over all steps but the first, as compiling and tuning take memory too.
    """
    baseline_bytes = _allocated_bytes()
    step = build()
    curve, took_s = [], []
    for tokens in itertools.islice(fixed_tokens(setup), max(loss_steps, 1)):
        began = time.perf_counter()
        curve.append(float(step(tokens)))
        took_s.append(time.perf_counter() - began)
        if len(curve) == 1:
            _reset_peak()
    batches = itertools.cycle(random_tokens(setup, SEQUENCES))
    affordable = min(steps, max(int(LONGEST_S / min(took_s)), LEAST))
    timing = bench(lambda: step(next(batches)), repeat=affordable, warmup=warmup, seconds=0.0)
    tokens_per_s = setup.batch * setup.sequence / timing.median_ms * 1e3
    return {
        "tokens_per_s": tokens_per_s,
        **_spread(timing),
        "peak_gib": _peak_gib(lambda: step(next(batches)), baseline_bytes),
        **shares(setup.model, setup.sequence, tokens_per_s),
        "compile_s": max(took_s[0] - timing.median_ms / 1e3, 0.0),
        "loss": statistics.fmean(curve[-SEQUENCES:]),  # over the last pass through the fixed sequences
    }


def loss_curve(setup: Setup, steps: int = LOSS_STEPS) -> list[float]:
    """The loss of each step on the fixed tokens, from the setup's seed."""
    trainer = Trainer(setup)
    return [float(trainer.step(tokens)) for tokens in itertools.islice(fixed_tokens(setup), steps)]


def fixed_tokens(setup: Setup) -> Iterator[Tensor]:
    """Endless batches, each one of four sequences repeated: mean loss and gradient don't depend on the batch size, so
    setups of any batch size have the same loss curve."""
    sequences = draw(setup, SEQUENCES, seed=setup.seed + 1).split(1)
    for sequence in itertools.cycle(sequences):
        yield sequence.expand(setup.batch, -1)


def random_tokens(setup: Setup, batches: int) -> list[Tensor]:
    """A list of `batches` different batches (B, T + 1) on the device."""
    return list(draw(setup, batches * setup.batch, seed=setup.seed + 2).split(setup.batch))


def draw(setup: Setup, rows: int, seed: int) -> Tensor:
    """Uniformly random tokens (rows, T + 1), the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, setup.sequence + 1)
    return torch.randint(preset(setup.model)["vocab_size"], shape, generator=generator).to(device())


def epoch(setup: Setup, steps: int, workers: int, pinned: bool) -> dict[str, float]:
    """Time of `steps` training steps fed by a `DataLoader`, as a row: the step, the epoch (`epoch_s`), and the medians
    of the host's wait for a batch (`wait_ms`) and in its copy to the device (`copy_ms`), without the first quarter.

    A copy from pinned memory is queued at once. One from pageable memory blocks the host until the device has reached
    it, so its time is mostly that of the previous step.

    Compiling, tuning and graph capture happen before the loader starts: they aren't in the epoch's time, and no CUDA
    call of a pinning thread can break the capture.
    """
    trainer = Trainer(setup)
    for tokens in itertools.islice(itertools.cycle(random_tokens(setup, 1)), BEFORE_CAPTURE + 1):
        trainer.step(tokens)
    rows = TensorDataset(torch.randint(preset(setup.model)["vocab_size"], (steps * setup.batch, setup.sequence + 1)))
    loader = DataLoader(rows, setup.batch, num_workers=workers, pin_memory=pinned and device().type == "cuda")
    waited_ms: list[float] = []
    copied_ms: list[float] = []
    batches = iter(loader)

    def device_batches() -> Iterator[Tensor]:
        while True:
            began = time.perf_counter()
            batch = next(batches, None)
            if batch is None:
                return
            fetched = time.perf_counter()
            tokens = batch[0].to(device(), non_blocking=pinned)
            waited_ms.append((fetched - began) * 1e3)
            copied_ms.append((time.perf_counter() - fetched) * 1e3)
            yield tokens

    synchronize()
    began = time.perf_counter()
    step_ms = each(device_batches(), trainer.step)
    epoch_s = time.perf_counter() - began
    first = len(step_ms) // 4
    host = {"wait_ms": statistics.median(waited_ms[first:]), "copy_ms": statistics.median(copied_ms[first:])}
    return _spread(Timing.of(step_ms[first:])) | host | {"epoch_s": epoch_s}


@functools.cache
def parameters(model: str) -> int:
    """Number of parameters of a preset, a tied embedding counted once. Allocates nothing."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Llama.from_name(model).parameters())


def flops_per_token(model: str, sequence: int) -> int:
    """Model FLOPs of training on one token of a sequence of this length."""
    size = preset(model)
    attended = size.get("head_dim", size["width"] // size["heads"]) * size["heads"]
    # By convention an untied embedding counts too, although a look-up has no FLOPs.
    return 6 * parameters(model) + 6 * size["layers"] * 2 * attended * sequence


@functools.cache
def matmul_rate() -> float:
    """Measured operations a second of a large bf16 matrix product (on a CPU: a small fp32 one)."""
    size, dtype = (8192, torch.bfloat16) if device().type == "cuda" else (512, torch.float32)
    return matmul(size, dtype)[1] * 1e12


def shares(model: str, sequence: int, tokens_per_s: float) -> dict[str, float | None]:
    """`mfu` against the vendor's peak and `matmul_share` against the measured matrix product, as fractions."""
    rate = flops_per_token(model, sequence) * tokens_per_s
    name = device_name()
    peak = next((peak for known, peak in PEAKS.items() if known in name), None)
    return {"mfu": rate / peak if peak else None, "matmul_share": rate / matmul_rate()}


def _spread(timing: Timing) -> dict[str, float]:
    return {"step_ms": timing.median_ms, "p20_ms": timing.p20_ms, "p80_ms": timing.p80_ms, "n": timing.n}


def _allocated_bytes() -> int:
    """Bytes allocated on the GPU; 0 on a CPU, where `_peak_gib` counts from its own call on."""
    if device().type != "cuda":
        return 0
    gc.collect()  # else unreachable tensors would be in the baseline but not in the peak
    return torch.cuda.memory_allocated()


def _reset_peak() -> None:
    if device().type == "cuda":
        synchronize()
        torch.cuda.reset_peak_memory_stats()


def _peak_gib(step: Callable[[], Tensor], baseline_bytes: int) -> float:
    """On CUDA: the peak since `_reset_peak`, graph capture included, less `baseline_bytes`. On a CPU: what one more
    step allocates on top of what stays allocated between steps."""
    if device().type == "cuda":
        synchronize()
        return (torch.cuda.max_memory_allocated() - baseline_bytes) / GIB
    return peak_memory(step).peak_gib
