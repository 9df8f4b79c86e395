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

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from helpers.lab import Timing, device, each, peak_memory
from helpers.lab.ceilings import matmul
from helpers.lab.machine import device_class, device_name
from helpers.lab.memory import GIB
from helpers.lab.precision import fp32_products
from helpers.lab.timing import synchronize
from helpers.models import Llama
from helpers.models.llama import preset
from helpers.text import Vocab, corpus, local_wikitext

from .setup import Setup
from .trainer import AUTOCAST, BEFORE_CAPTURE, Trainer

LOSS_STEPS = 8
ON_CPU_LOSS_STEPS, ON_CPU_S = 5, 6.0  # on a CPU, where the steps of the loss curve are timed, too
SEQUENCES = 4  # distinct sequences for the loss curve; the model can only memorise them
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

    The first `loss_steps` steps, on fixed tokens, give the loss and warm up. Then `steps` steps on other text are
    timed, the copy of the tokens included; if they would take more than 40 s, fewer are, but at least 5 (`n`). A CPU
    computes as it is called: there steps after the second count, and more are timed for at most 6 s.
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
    batches = itertools.cycle(text_tokens(setup, SEQUENCES))
    on_cpu = device().type == "cpu"
    counted = [seconds * 1e3 for seconds in took_s[1 + warmup :]] if on_cpu else []
    longest, least = (ON_CPU_S, 3 - len(counted)) if on_cpu else (LONGEST_S, LEAST)
    affordable = min(steps - len(counted), max(int(longest / min(took_s)), least))
    timed = [next(batches) for _ in range(max(affordable, 0))]
    if not counted:
        for _ in range(warmup):
            step(next(batches))
    timing = Timing.of(counted + each(timed, step))
    tokens_per_s = setup.batch * setup.sequence / timing.median_ms * 1e3
    return {
        "tokens_per_s": tokens_per_s,
        **_spread(timing),
        "peak_gib": _peak_gib(lambda: step(next(batches)), baseline_bytes),
        **shares(setup, tokens_per_s),
        "compile_s": max(took_s[0] - timing.median_ms / 1e3, 0.0) if setup.compile != "none" else None,
        "loss": statistics.fmean(curve[-SEQUENCES:]),  # over the last pass through the fixed sequences
        "text": stream(setup.model)[1],
    }


def loss_curve(setup: Setup, steps: int = LOSS_STEPS) -> list[float]:
    """The loss of each step on the fixed tokens, from the setup's seed."""
    trainer = Trainer(setup)
    return [float(trainer.step(tokens)) for tokens in itertools.islice(fixed_tokens(setup), steps)]


def fixed_tokens(setup: Setup) -> Iterator[Tensor]:
    """Endless batches, each one of four sequences repeated: mean loss and gradient don't depend on the batch size, so
    setups of any batch size have the same loss curve."""
    for sequence in itertools.cycle(sequences(setup, SEQUENCES).split(1)):
        yield sequence.expand(setup.batch, -1)


def text_tokens(setup: Setup, batches: int) -> list[Tensor]:
    """A list of `batches` different batches (B, T + 1) on the device."""
    return list(sequences(setup, batches * setup.batch, after=SEQUENCES).split(setup.batch))


def sequences(setup: Setup, rows: int, after: int = 0) -> Tensor:
    """Sequences (rows, T + 1) of text on the device, from the one with number `after` + the setup's seed on."""
    ids = stream(setup.model)[0]
    length = setup.sequence + 1
    start = (after + setup.seed) * length
    index = torch.arange(start, start + rows * length) % len(ids)  # from its start again where the text ends
    return ids[index].view(rows, length).to(device())


@functools.cache
def stream(model: str) -> tuple[Tensor, str]:
    """The validation text as one stream of token ids (n,), and its source. Words beyond a preset's vocabulary, the
    rarest, are `<unk>`."""
    text = corpus("validation", local_wikitext(), synthetic_samples=3000)
    ids = torch.from_numpy(np.concatenate([text[i] for i in range(len(text))]).astype(np.int64))
    return ids.where(ids < preset(model)["vocab_size"], Vocab.unk_id), text.source


def epoch(setup: Setup, steps: int, workers: int, pinned: bool) -> dict[str, float]:
    """Time of `steps` training steps fed by a `DataLoader`, as a row: the step, the epoch (`epoch_s`), and the medians
    of the host's wait for a batch (`wait_ms`) and in its copy to the device (`copy_ms`), without the first quarter.

    A copy from pinned memory is queued at once. One from pageable memory blocks the host until the device has reached
    it, so its time is mostly that of the previous step.

    Compiling, tuning and graph capture happen before the loader starts: they aren't in the epoch's time, and no CUDA
    call of a pinning thread can break the capture.
    """
    trainer = Trainer(setup)
    for tokens in itertools.islice(itertools.cycle(text_tokens(setup, 1)), BEFORE_CAPTURE + 1):
        trainer.step(tokens)
    rows = TensorDataset(sequences(setup, steps * setup.batch).cpu())
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
def matmul_rate(precision: str = "amp-bf16") -> float:
    """Measured operations a second of a large matrix product, in the type that a setup of this precision multiplies."""
    dtype = AUTOCAST.get(precision, torch.bfloat16 if precision == "bf16" else torch.float32)
    size = {"cpu": 2048, "gpu": 4096, "big-gpu": 8192}[device_class()]
    with fp32_products(tf32=precision == "tf32"):
        return max(matmul(size, dtype)[1] for _ in range(3)) * 1e12  # a limit: the best of three medians


def shares(setup: Setup, tokens_per_s: float) -> dict[str, float | None]:
    """`mfu` against the vendor's bf16 peak, and `matmul_share` against the measured product in the type computed in."""
    rate = flops_per_token(setup.model, setup.sequence) * tokens_per_s
    name = device_name()
    peak = next((peak for known, peak in PEAKS.items() if known in name), None)
    product = matmul_rate(setup.precision)
    return {"mfu": rate / peak if peak else None, "product_tflops": product / 1e12, "matmul_share": rate / product}


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
