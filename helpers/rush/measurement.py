"""A setup's speed, memory and loss, as one row: `run`; and of training that a `DataLoader` feeds: `epoch`.

What a token's training costs at least in floating-point operations, by convention: 6 for each parameter (2 forward, 4
backward; a tied embedding counts once, as it multiplies only as the head), and 6 · layers · heads · 2 · head_dim · T
for attention, without a discount for the causal half that fast kernels skip. Recomputed activations don't count: MFU is
about the model's operations, not the machine's.
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
SEQUENCES = 4  # different ones that the loss is followed on; random tokens can only be learnt by heart
LONGEST_S, LEAST = 40.0, 5  # timed steps fill no more seconds than that, though there are at least so many of them

# Dense bf16 operations a second that vendors state; the first name that a device's name contains is its own.
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
    """Train by a setup on `device()`, and return its row; what the row holds is said by `measure`."""
    return measure(lambda: Trainer(setup).step, setup, steps=steps, warmup=warmup, loss_steps=loss_steps)


def measure(
    build: Callable[[], Callable[[Tensor], Tensor]],
    setup: Setup,
    *,
    steps: int = 20,
    warmup: int = 1,
    loss_steps: int = LOSS_STEPS,
) -> dict[str, Any]:
    """A row about the step that `build` makes, which trains on a batch of tokens (B, T + 1) and returns the loss:
    speed, memory and the loss after `loss_steps` steps on fixed tokens.

    Those steps come first, and warm up too; then `steps` steps on random tokens of full length are timed, the copy of
    the tokens included. Where a step takes so long that they would fill more than 40 seconds (20 of them, if one takes
    over 2), fewer are timed, at least 5: `n` says how many. `compile_s` is what the first step took more than a timed
    one. The peak is over all steps but the first, whose compiling and tuning needs memory of its own, and counts what
    was allocated since `build` was called.
    """
    held = _held()
    step = build()
    curve, took_s = [], []
    for tokens in itertools.islice(fixed_tokens(setup), max(loss_steps, 1)):
        began = time.perf_counter()
        curve.append(float(step(tokens)))
        took_s.append(time.perf_counter() - began)
        if len(curve) == 1:
            _forget_peak()
    batches = itertools.cycle(random_tokens(setup, SEQUENCES))
    affordable = min(steps, max(int(LONGEST_S / min(took_s)), LEAST))
    timing = bench(lambda: step(next(batches)), repeat=affordable, warmup=warmup, seconds=0.0)
    tokens_per_s = setup.batch * setup.sequence / timing.median_ms * 1e3
    return {
        "tokens_per_s": tokens_per_s,
        **_spread(timing),
        "peak_gib": _peak_gib(lambda: step(next(batches)), held),
        **shares(setup.model, setup.sequence, tokens_per_s),
        "compile_s": max(took_s[0] - timing.median_ms / 1e3, 0.0),
        "loss": statistics.fmean(curve[-SEQUENCES:]),  # over the last pass through the fixed sequences
    }


def loss_curve(setup: Setup, steps: int = LOSS_STEPS) -> list[float]:
    """The loss of each step on the fixed tokens, from the setup's seed."""
    trainer = Trainer(setup)
    return [float(trainer.step(tokens)) for tokens in itertools.islice(fixed_tokens(setup), steps)]


def fixed_tokens(setup: Setup) -> Iterator[Tensor]:
    """Four sequences in turn, without end, each filling its batch: the mean loss and its gradient don't depend on the
    batch, so setups of any batch size walk the same curve."""
    sequences = draw(setup, SEQUENCES, seed=setup.seed + 1).split(1)
    for sequence in itertools.cycle(sequences):
        yield sequence.expand(setup.batch, -1)


def random_tokens(setup: Setup, batches: int) -> list[Tensor]:
    """So many different batches (B, T + 1) on the device."""
    return list(draw(setup, batches * setup.batch, seed=setup.seed + 2).split(setup.batch))


def draw(setup: Setup, rows: int, seed: int) -> Tensor:
    """Uniformly random tokens (rows, T + 1), the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, setup.sequence + 1)
    return torch.randint(preset(setup.model)["vocab_size"], shape, generator=generator).to(device())


def epoch(setup: Setup, steps: int, workers: int, pinned: bool) -> dict[str, float]:
    """A row about so many training steps: their time, that of the epoch, and for each batch how long the host waits
    for the loader (`wait_ms`), and in the copy to the device (`copy_ms`). The first quarter of the steps isn't told of.

    A copy from pinned memory is queued at once. One from pageable memory waits its turn on the device, so its time is
    mostly that of the step before, which the host would have waited for anyway, only later.

    What is compiled, tuned and captured is so before the loader exists: no worker's or pinning thread's calls fall into
    the capture of a graph, and the epoch has none of it.
    """
    trainer = Trainer(setup)
    for tokens in itertools.islice(itertools.cycle(random_tokens(setup, 1)), BEFORE_CAPTURE + 1):
        trainer.step(tokens)
    rows = TensorDataset(torch.randint(preset(setup.model)["vocab_size"], (steps * setup.batch, setup.sequence + 1)))
    loader = DataLoader(rows, setup.batch, num_workers=workers, pin_memory=pinned and device().type == "cuda")
    waited_ms: list[float] = []
    copied_ms: list[float] = []
    batches = iter(loader)

    def fed() -> Iterator[Tensor]:
        while True:
            began = time.perf_counter()
            batch = next(batches, None)
            if batch is None:
                return
            came = time.perf_counter()
            there = batch[0].to(device(), non_blocking=pinned)
            waited_ms.append((came - began) * 1e3)
            copied_ms.append((time.perf_counter() - came) * 1e3)
            yield there

    synchronize()
    began = time.perf_counter()
    took_ms = each(fed(), trainer.step)
    epoch_s = time.perf_counter() - began
    settled = len(took_ms) // 4
    host = {"wait_ms": statistics.median(waited_ms[settled:]), "copy_ms": statistics.median(copied_ms[settled:])}
    return _spread(Timing.of(took_ms[settled:])) | host | {"epoch_s": epoch_s}


@functools.cache
def parameters(model: str) -> int:
    """The parameters of a preset, a tied embedding once. Nothing is allocated."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Llama.from_name(model).parameters())


def flops_per_token(model: str, sequence: int) -> int:
    """Operations of training on one token of a sequence of this length."""
    size = preset(model)
    attended = size.get("head_dim", size["width"] // size["heads"]) * size["heads"]
    # An embedding that isn't tied is looked up and multiplies nothing, yet it is among the parameters: as is usual.
    return 6 * parameters(model) + 6 * size["layers"] * 2 * attended * sequence


@functools.cache
def matmul_rate() -> float:
    """Operations a second of a large bf16 product, measured here (on a CPU a small one in fp32)."""
    size, dtype = (8192, torch.bfloat16) if device().type == "cuda" else (512, torch.float32)
    return matmul(size, dtype)[1] * 1e12


def shares(model: str, sequence: int, tokens_per_s: float) -> dict[str, float | None]:
    """`mfu` against the vendor's peak, and `matmul_share` against the product measured here; both are fractions."""
    rate = flops_per_token(model, sequence) * tokens_per_s
    name = device_name()
    limit = next((peak for known, peak in PEAKS.items() if known in name), None)
    return {"mfu": rate / limit if limit else None, "matmul_share": rate / matmul_rate()}


def _spread(timing: Timing) -> dict[str, float]:
    return {"step_ms": timing.median_ms, "p20_ms": timing.p20_ms, "p80_ms": timing.p80_ms, "n": timing.n}


def _held() -> int:
    """Bytes in use on the device now; 0 on a CPU, where `_peak_gib` counts from its call on."""
    if device().type != "cuda":
        return 0
    gc.collect()  # what nobody can reach would be counted here, and be gone by the time of the peak
    return torch.cuda.memory_allocated()


def _forget_peak() -> None:
    if device().type == "cuda":
        synchronize()
        torch.cuda.reset_peak_memory_stats()


def _peak_gib(step: Callable[[], Tensor], held: int) -> float:
    """On CUDA of all steps since `_forget_peak`, the capture of a graph included, less what was held before; on a CPU
    of one more step, without what lasts between steps."""
    if device().type == "cuda":
        synchronize()
        return (torch.cuda.max_memory_allocated() - held) / GIB
    return peak_memory(step).peak_gib
