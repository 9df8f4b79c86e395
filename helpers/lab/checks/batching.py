"""Checks of batches: samplers, packers, attention within packed documents."""

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .check import Check, close, name_of


def batch_sampler(make: Callable[..., Iterable[Sequence[int]]], batch_size: int = 32, k: int = 10) -> Check:
    """A sampler `make(lengths, batch_size, k)` of batches of indices whose lengths differ by at most k."""
    check = Check(name_of(make))
    lengths = np.random.default_rng(0).integers(1, 641, 20_000)
    epoch: list[list[int]] = []

    def once() -> tuple[bool, str]:
        epoch.extend([int(i) for i in batch] for batch in make(lengths, batch_size, k))
        return _each_once(epoch, len(lengths))

    def spread() -> tuple[bool, str]:
        widest = max(int(np.ptp(lengths[batch])) for batch in epoch)
        return widest <= k, f"at most {widest}"

    def sizes() -> tuple[bool, str]:
        full = float(np.mean([len(batch) for batch in epoch])) / batch_size
        return max(map(len, epoch)) <= batch_size and full >= 0.5, f"{full:.0%} full on the mean"

    def shuffled() -> tuple[bool, str]:
        means = np.array([lengths[batch].mean() for batch in epoch])
        trend = abs(np.corrcoef(means, np.arange(len(means)))[0, 1])
        return trend < 0.2, f"correlation of length and position {trend:.2f}"

    def flat() -> tuple[bool, str]:
        few, many = (_batch_us(make, n, batch_size, k) for n in (10_000, 300_000))
        return many <= 3 * few + 5, f"{few:.0f} µs of 10,000 samples, {many:.0f} µs of 300,000"

    check.holds("every index comes once", once)
    if epoch:
        check.holds(f"lengths in a batch differ by at most k = {k}", spread)
        check.holds(f"batches have at most {batch_size} indices, and are mostly full", sizes)
        check.holds("short and long batches come in random order", shuffled)
        check.holds("a batch takes as long from many samples as from few", flat)
    return check


def _batch_us(make: Callable, samples: int, batch_size: int, k: int) -> float:
    """Microseconds a batch, without what happens before the first: the best of three."""
    lengths = np.random.default_rng(0).integers(1, 641, samples)
    best = float("inf")
    for _ in range(3):
        batches = iter(make(lengths, batch_size, k))
        next(batches)
        start = time.perf_counter()
        taken = sum(1 for _ in itertools.islice(batches, 200))
        best = min(best, (time.perf_counter() - start) / max(taken, 1) * 1e6)
    return best


def packing(pack: Callable[[np.ndarray, int], Iterable[Sequence[int]]], capacity: int = 640) -> Check:
    """A function of (lengths, capacity) that gives packs of indices, none longer together than the capacity."""
    check = Check(name_of(pack))
    lengths = np.random.default_rng(0).integers(1, capacity + 1, 2000)
    packs: list[list[int]] = []

    def once() -> tuple[bool, str]:
        packs.extend([int(i) for i in indices] for indices in pack(lengths, capacity))
        return _each_once(packs, len(lengths))

    def few() -> tuple[bool, str]:
        least, most = -(-int(lengths.sum()) // capacity), _next_fit(lengths, capacity)
        return len(packs) < most, f"{len(packs)} packs; the lower bound is {least}, next fit takes {most}"

    check.holds("every sample is packed once", once)
    if packs:
        check.holds("no pack overflows", lambda: max(int(lengths[indices].sum()) for indices in packs) <= capacity)
        check.holds("fewer packs than by next fit", few)
    return check


def packed_attention(attend: Callable[..., Tensor], device: str = "cpu") -> Check:
    """Attention `attend(q, k, v, offsets)` over documents packed in one sequence, causal within each.

    q, k and v are (1, heads, T, head_dim); document i lies at `offsets[i]` to `offsets[i + 1]`.
    """
    check = Check(name_of(attend))
    lengths = [5, 1, 30, 12]
    offsets = np.cumsum([0, *lengths])

    def inputs() -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        shape = (1, 2, int(offsets[-1]), 16)
        return [torch.randn(shape, generator=generator).to(device).requires_grad_() for _ in range(3)]

    def alone(*tensors: Tensor) -> Tensor:
        parts = zip(*(tensor.split(lengths, dim=2) for tensor in tensors), strict=True)
        return torch.cat([F.scaled_dot_product_attention(q, k, v, is_causal=True) for q, k, v in parts], dim=2)

    def output() -> tuple[bool, str]:
        return close([attend(*inputs(), offsets)], [alone(*inputs())], 1e-4)

    def gradients(attention: Callable[..., Tensor], *more: Any) -> tuple[Tensor, ...]:
        tensors = inputs()
        out = attention(*tensors, *more)
        return torch.autograd.grad(out, tensors, torch.sin(torch.arange(out.numel(), device=device)).view(out.shape))

    def changed(at: int) -> Tensor:
        """By how much each position's output changes with the token at a place, (T,)."""
        q, k, v = (part.detach() for part in inputs())
        before = attend(q, k, v, offsets)
        for part in (q, k, v):
            part[:, :, at] += 1.0
        return (attend(q, k, v, offsets) - before).abs().amax(dim=(0, 1, 3))

    def contained() -> tuple[bool, str]:
        outside = torch.cat(
            [changed(at)[np.r_[0:begin, end : offsets[-1]]] for at, begin, end in ((8, 6, 36), (5, 5, 6))]
        )
        return float(outside.max()) == 0.0, f"largest change {float(outside.max()):.1e}"

    check.holds("the output is that of each document alone", output)
    check.holds("a changed token changes no other document", contained)
    check.holds("a changed token changes no position before it", lambda: float(changed(20)[:20].max()) == 0.0)
    check.holds(
        "the gradients are those of each document alone",
        lambda: close(gradients(attend, offsets), gradients(alone), 1e-4),
    )
    return check


def _each_once(groups: list[list[int]], count: int) -> tuple[bool, str]:
    wrong = int((np.bincount(np.concatenate(groups), minlength=count) != 1).sum())
    return wrong == 0, f"{wrong:,} of {count:,} not exactly once" if wrong else ""


def _next_fit(lengths: Iterable[int], capacity: int) -> int:
    """Packs that are needed if only the last one is looked at."""
    packs, room = 0, 0
    for length in lengths:
        if length > room:
            packs, room = packs + 1, capacity
        room -= length
    return packs
