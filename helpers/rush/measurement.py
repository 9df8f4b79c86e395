"""Speed, memory and loss of a setup as one row: `run`."""

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

from ..lab import Timing, device, each, peak_memory
from ..lab.memory import GIB
from ..lab.timing import synchronize
from ..models.llama import preset
from ..text import Vocab, corpus, local_wikitext
from .rates import shares
from .setup import Setup
from .trainer import Trainer

LOSS_STEPS = 8
ON_CPU_LOSS_STEPS, ON_CPU_S = 5, 6.0  # on a CPU, where the steps of the loss curve are timed, too
SEQUENCES = 4  # distinct sequences for the loss curve; the model can only memorise them
LONGEST_S, LEAST = 40.0, 5  # most seconds of timed steps, and least number of timed steps


def run(setup: Setup, *, steps: int = 20, warmup: int = 1, loss_steps: int = LOSS_STEPS) -> dict[str, Any]:
    """Train by a setup on `device()`: speed, memory and loss as one row.

    The first `loss_steps` steps, on fixed tokens, give the loss and warm up. Then `steps` steps on other text are
    timed, the copy of the tokens included; if they would take more than 40 s, fewer are, but at least 5 (`n`). A CPU
    computes as it is called: there steps after the second count, and more are timed for at most 6 s.
    `compile_s` is the excess of the first step over a timed one. The peak counts what is allocated from the trainer's
    construction on, over all steps but the first, as compiling and tuning take memory too.
    """
    on_cpu = device().type == "cpu"
    baseline_bytes = 0 if on_cpu else _allocated_bytes()
    step = Trainer(setup).step
    curve, took_s = [], []
    for tokens in itertools.islice(fixed_tokens(setup), max(loss_steps, 1)):
        began = time.perf_counter()
        curve.append(float(step(tokens)))
        took_s.append(time.perf_counter() - began)
        if len(curve) == 1 and not on_cpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
    batches = itertools.cycle(text_tokens(setup, SEQUENCES))
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
        **spread(timing),
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
    return (each.expand(setup.batch, -1) for each in itertools.cycle(sequences(setup, SEQUENCES).split(1)))


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


def spread(timing: Timing) -> dict[str, float]:
    return {"step_ms": timing.median_ms, "p20_ms": timing.p20_ms, "p80_ms": timing.p80_ms, "n": timing.n}


def _allocated_bytes() -> int:
    gc.collect()  # else unreachable tensors would be in the baseline but not in the peak
    return torch.cuda.memory_allocated()


def _peak_gib(step: Callable[[], Tensor], baseline_bytes: int) -> float:
    """On CUDA: the peak since its reset, graph capture included, less `baseline_bytes`. On a CPU: what one more
    step allocates on top of what stays allocated between steps."""
    if device().type == "cuda":
        synchronize()
        return (torch.cuda.max_memory_allocated() - baseline_bytes) / GIB
    return peak_memory(step).peak_gib
