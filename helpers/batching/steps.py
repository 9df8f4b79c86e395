"""What steps on many different batches take: each batch by itself, and training steps of several variants in turn."""

import functools
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from helpers.lab import compare, device, each, half_dtype
from helpers.lab.experiment import free_memory, is_out_of_memory
from helpers.lab.records import Row
from helpers.lab.timing import queue_ahead, synchronize
from helpers.models import GPT2LikeModel
from helpers.text import Samples, SyntheticText, WikiText, local_wikitext
from helpers.text.synthetic import SIZE, draw_lengths

WIKITEXT_SAMPLES = 2461  # in its validation split
QUEUED = 20  # batches that wait on the device before the first is timed: fewer kernels than CUDA queues, about 1,000
AHEAD = 40_000_000  # clock cycles, 20 to 40 ms: longer than the host takes to queue the work of so many batches


def device_ms(batches: Iterable[Any], run: Callable[[Any], Any]) -> list[float]:
    """Milliseconds of device time of `run(batch)`, for each batch: neither making it counts, nor launching its kernels,
    which takes a small batch longer than computing them.

    `QUEUED` batches are made at a time. Then the device is kept busy with nothing while the host queues all their work.
    """
    took: list[float] = []
    batches = iter(batches)
    while made := list(itertools.islice(batches, QUEUED)):
        queue_ahead(AHEAD)
        took += each(made, run)
    return took


def epoch(batches: Callable[[int, int], Iterable[Any]], run: Callable[[Any], Any]) -> tuple[float, list[float], int]:
    """Seconds of an epoch by the clock, milliseconds of each batch, and the positions in all; `batches(epoch, start)`.

    By the clock is as a loop goes: a batch is made, copied and run, and the next. On a GPU the time of each batch is
    that of the device, from a second pass.
    """
    on_cuda, area = device().type == "cuda", []

    def counted() -> Iterator[Any]:
        for batch in batches(0, 0):
            area.append(batch.inputs.numel())
            yield batch

    each(itertools.islice(batches(1, 0), 30 if on_cuda else 2), run)  # warm up
    synchronize()
    began = time.perf_counter()
    took = each(counted(), run)
    epoch_s = time.perf_counter() - began
    return epoch_s, device_ms(batches(0, 0), run) if on_cuda else took, sum(area)


def percentiles(took_ms: list[float]) -> Row:
    """What a row says of the times of all batches."""
    shares = {"min_ms": 0, "p5_ms": 5, "p25_ms": 25, "median_ms": 50, "p75_ms": 75, "p95_ms": 95, "max_ms": 100}
    told = {name: float(np.percentile(took_ms, share)) for name, share in shares.items()}
    return told | {"mean_ms": float(np.mean(took_ms))}


@dataclass
class Steps:
    """A variant's training step, to be called again and again: each call takes the next batch, round and round."""

    step: Callable[[Any], Any]
    batches: list
    real_tokens: float  # of a batch, on the mean
    number: int = 0

    @classmethod
    def of(cls, step: Callable[[Any], Any], batches: list) -> "Steps":
        """With the real tokens counted; padding is 0."""
        return cls(step, batches, float(np.mean([int((batch.targets != 0).sum()) for batch in batches])))

    def __call__(self) -> None:
        self.step(self.batches[self.number % len(self.batches)])
        self.number += 1

    def fit(self) -> bool:
        """Whether there is memory enough for a step on each batch, by trying. If not, what was taken is given back."""
        try:
            for batch in self.batches:
                self.step(batch)
            return True
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        free_memory()
        return False


def rates(steps: dict[str, Steps], rounds: int, warmup: int) -> list[Row]:
    """A row for each variant, timed interleaved: median and spread of a step, real tokens a second over all steps."""
    timed = compare(steps, check=False, rounds=rounds, warmup=warmup)
    return [
        {"variant": variant}
        | timed.timing(variant).row()
        | {"real_tokens_per_s": its.real_tokens * 1e3 / float(np.mean(timed.samples_ms[variant]))}
        for variant, its in steps.items()
    ]


def training_step(parameters: Iterable[Tensor], loss: Callable[[Any], Tensor]) -> Callable[[Any], None]:
    """A step of training on a batch whose loss is `loss(batch)`: forward, backward and AdamW."""
    optimizer = torch.optim.AdamW(parameters, lr=1e-6, fused=True)

    def step(batch: Any) -> None:
        try:
            loss(batch).backward()
            optimizer.step()
        finally:  # after a lack of memory, too
            optimizer.zero_grad()

    return step


def compute_dtype() -> torch.dtype:
    """A GPU's 16-bit type; bf16 on a CPU that multiplies it, where it is faster; else fp32."""
    if device().type == "cuda":
        return half_dtype()
    multiplies = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if multiplies else torch.float32


@functools.lru_cache(maxsize=1)
def text(samples: int, width: int) -> Samples:
    """The text that is batched, the last one kept: WikiText's validation split where that is on the machine and has so
    many samples, else text with its lengths. A small model gets a small vocabulary, 8 words for each of its width."""
    words = min(8 * width, SIZE)
    if (path := local_wikitext()) and samples <= WIKITEXT_SAMPLES:
        return WikiText("validation", path, max_size=words, max_samples=samples)
    return SyntheticText(samples, seed=0, vocab_size=words)


def language_model(text: Samples, width: int, layers: int, max_length: int, head: bool = True) -> GPT2LikeModel:
    """A model of the text on the device. `head=False` leaves out the product with the vocabulary, as the task does."""
    shape = {"d_model": width, "num_heads": 8, "num_layers": layers, "max_length": max_length}
    model = GPT2LikeModel(len(text.vocab), **shape, dropout=0.0)
    if not head:
        model.head = nn.Identity()
    return model.to(device=device(), dtype=compute_dtype())


def sampler_times(begin: Callable[[], Iterator[Any]]) -> Row:
    """What a sampler takes until an epoch's first batch, and for a batch, over 2 to 20 whole epochs in 3 s."""
    first_ms, batch_us, began = [], [], time.perf_counter()
    while len(batch_us) < 2 or (len(batch_us) < 20 and time.perf_counter() - began < 3):
        start = time.perf_counter()
        batches = begin()
        next(batches)
        first_ms.append((time.perf_counter() - start) * 1e3)
        number = 1 + sum(1 for _ in batches)
        batch_us.append((time.perf_counter() - start) / number * 1e6)
    p20, median, p80 = np.percentile(batch_us, [20, 50, 80])
    row = {"first_batch_ms": float(np.median(first_ms)), "batch_us": median}
    return row | {"batch_p20_us": p20, "batch_p80_us": p80, "n": len(batch_us)}


def wikitext_lengths(samples: int, max_length: int) -> np.ndarray:
    """Lengths as WikiText's samples have them, cut to `max_length`."""
    return np.minimum(draw_lengths(samples, seed=0), max_length)


def packed_offsets(tokens: int, max_length: int) -> np.ndarray:
    """Where documents of WikiText's lengths begin that fill `tokens`; the last one is cut."""
    ends = np.cumsum(wikitext_lengths(tokens, max_length))
    return np.concatenate([[0], ends[ends < tokens], [tokens]])
