"""Speed, memory and loss of a setup as one row: `run`."""

import functools
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..lab import Timing, compare, device, each, peak_memory
from ..lab.device_share import as_column, device_share
from ..lab.estimate import LUCK_HERE, estimate
from ..lab.memory import GIB, OUT_OF_MEMORY, is_out_of_memory
from ..lab.timing import synchronize
from ..models.llama import preset
from ..text import SyntheticText, Vocab, WikiText, local_wikitext
from ..training.trainer import WARM_UP
from .rates import shares
from .setup import Setup
from .trainer import build_trainer

LOSS_STEPS = 8
ON_CPU_LOSS_STEPS = 5  # on a CPU, where the steps of the loss curve are timed, too
SEQUENCES = 4  # distinct sequences for the loss curve; the model can only memorise them
LONGEST_S, LEAST = 6.0, 3  # most seconds of timed steps, and least number of timed steps
TURN_S, ROUNDS = 0.3, 8  # of two setups in one process
ROOM = 0.95  # of a GPU's memory: the rest is what its allocator can't use


def run(
    setup: Setup,
    *,
    steps: int = 20,
    warmup: int = 1,
    loss_steps: int = LOSS_STEPS,
    baseline: Setup | None = None,
    seconds: float = 0.0,
) -> dict[str, Any]:
    """Train by a setup on `device()`: speed, memory and loss as one row.

    The first `loss_steps` steps, on fixed tokens, give the loss and warm up. Then `steps` steps on other text are
    timed, the copy of the tokens included; if they would take more than 6 s, fewer are, but at least 3 (`n`). A CPU
    computes as it is called: there steps after the second count. With a `baseline`, so many seconds of turns with it
    follow (`in_turns`), whose steps are those that are timed on a GPU, and the ratio is in the row; or `unpaired` says
    why not. On a CPU both have this process's allocator.
    `compile_s` is the excess of the first step over a timed one. The peak counts what is allocated from the trainer's
    construction on, over all steps but the first, as compiling and tuning take memory too.
    """
    on_cpu = device().type == "cpu"
    baseline_bytes = 0 if on_cpu else _allocated_bytes()
    step = build_trainer(setup).step
    curve, took_s = [], []
    for tokens in itertools.islice(fixed_tokens(setup), max(loss_steps, 1)):
        began = time.perf_counter()
        curve.append(float(step(tokens)))
        took_s.append(time.perf_counter() - began)
        if len(curve) == 1 and not on_cpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
    batches = itertools.cycle(text_tokens(setup, SEQUENCES))
    peak_gib = None if on_cpu else _peak_gib(baseline_bytes)
    counted = [once_s * 1e3 for once_s in took_s[1 + warmup :]] if on_cpu else []
    pair: dict[str, Any] = {}
    if peak_gib is not None:
        _peaks[setup] = peak_gib
        counted, pair = _beside(baseline, setup, step, seconds) if baseline else ([], {})
    if on_cpu or "ratio" not in pair:
        affordable = min(steps - len(counted), max(int(LONGEST_S / min(took_s)), LEAST - len(counted)))
        timed = [next(batches) for _ in range(max(affordable, 0))]
        if not counted:
            for _ in range(warmup):
                step(next(batches))
        counted = counted + each(timed, step)
    timing = Timing.of(counted)
    tokens_per_s = setup.batch * setup.sequence / timing.median_ms * 1e3
    if on_cpu:
        peak_gib = peak_memory(lambda: step(next(batches))).peak_gib
        _, pair = in_turns(baseline, setup, seconds, step) if baseline else ([], {})
    return {
        "tokens_per_s": tokens_per_s,
        **spread(timing),
        "peak_gib": peak_gib,
        **shares(setup, tokens_per_s),
        "compile_s": max(took_s[0] - timing.median_ms / 1e3, 0.0) if setup.compile != "none" else None,
        "loss": statistics.fmean(curve[-SEQUENCES:]),  # over the last pass through the fixed sequences
        "text": stream(setup.model)[1],
        **pair,
        **device_share(lambda: step(next(batches)), timing.median_ms),
    }


def first_loss(setup: Setup, seed: int) -> float:
    """The loss that `run` gives of a setup from the weights of another seed, on the same tokens and without timing: of
    one sequence a step, and uncompiled."""
    steps = ON_CPU_LOSS_STEPS if device().type == "cpu" else LOSS_STEPS
    plain = replace(setup, batch=1, compile="none", cuda_graph=False)
    step = build_trainer(replace(plain, seed=seed)).step
    return statistics.fmean(
        [float(step(tokens)) for tokens in itertools.islice(fixed_tokens(plain), steps)][-SEQUENCES:]
    )


_peaks: dict[Setup, float] = {}  # GiB, of what this process has measured on a GPU


def _beside(
    baseline: Setup, setup: Setup, step: Callable[[Tensor], Tensor], seconds: float
) -> tuple[list[float], dict[str, Any]]:
    """`in_turns` with a baseline that is built now, where memory is enough for both; else why it isn't: `unpaired`.

    It must hold what this setup keeps between steps, a captured one all, and the peak of the larger of the two. The
    baseline's is what this process has measured, else taken to be the setup's.
    """
    gc.collect()
    torch.cuda.empty_cache()
    kept, total = torch.cuda.memory_reserved() / GIB, torch.cuda.mem_get_info()[1] / GIB
    peak = max(_peaks.get(baseline, _peaks[setup]), 0.0 if setup.cuda_graph else _peaks[setup])
    if kept + peak > ROOM * total:
        return [], {"unpaired": f"both would take {kept + peak:.0f} of {total:.0f} GiB"}
    try:
        return in_turns(baseline, setup, seconds, step)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    gc.collect()
    torch.cuda.empty_cache()
    return [], {"unpaired": OUT_OF_MEMORY}


def in_turns(
    baseline: Setup, setup: Setup, seconds: float, step: Callable[[Tensor], Tensor] | None = None, rounds: int = ROUNDS
) -> tuple[list[float], dict[str, Any]]:
    """Training by two setups in this process, in turns of 0.3 s, A B B A, for at most so many seconds or rounds.

    Returns the milliseconds of the setup's steps, and the ratio of the times for a token with its interval.
    `baseline_ms` is the baseline's time for as many tokens as a step of the setup has. `step` is the setup's, if there
    is a trainer of it.
    """
    names = {"baseline": baseline, "setup": setup}
    steps = {"baseline": _warm_step(baseline), "setup": _warm_step(setup, step)}
    timed = compare(steps, check=False, rounds=rounds, warmup=1, turn_s=TURN_S, seconds=seconds)
    per = {name: np.array(timed.samples_ms[name]) / of.batch / of.sequence for name, of in names.items()}
    paired = estimate([np.log(per["setup"] / per["baseline"])], LUCK_HERE)
    baseline_ms = float(np.median(per["baseline"])) * setup.batch * setup.sequence
    share = as_column(timed.device_shares["setup"])
    return timed.calls_ms["setup"], {"baseline_ms": baseline_ms} | share | (paired.row() if paired else {})


def _warm_step(setup: Setup, step: Callable[[Tensor], Tensor] | None = None) -> Callable[[], Tensor]:
    """A step on the text's batches in turn, compiled and captured."""
    step, batches = step or build_trainer(setup).step, itertools.cycle(text_tokens(setup, SEQUENCES))
    for tokens in itertools.islice(batches, WARM_UP + 1):
        step(tokens)
    return lambda: step(next(batches))


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
    text = WikiText("validation", path) if (path := local_wikitext()) else SyntheticText(3000, seed=1)
    ids = torch.from_numpy(np.concatenate([text[i] for i in range(len(text))]).astype(np.int64))
    return ids.where(ids < preset(model)["vocab_size"], Vocab.unk_id), text.source


def spread(timing: Timing) -> dict[str, float]:
    return {"step_ms": timing.median_ms, "p20_ms": timing.p20_ms, "p80_ms": timing.p80_ms, "n": timing.n}


def _allocated_bytes() -> int:
    gc.collect()  # else unreachable tensors would be in the baseline but not in the peak
    return torch.cuda.memory_allocated()


def _peak_gib(baseline_bytes: int) -> float:
    """On CUDA: the peak since its reset, graph capture included, less `baseline_bytes`."""
    synchronize()
    return (torch.cuda.max_memory_allocated() - baseline_bytes) / GIB
