"""Checks of batches: samplers, packers, attention within packed documents."""

import itertools
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .check import Checker, Line, close, equals

# Documents of which first fit, worst fit and the order in which they come make other packs than best fit, for any
# multiple of these lengths, too.
SMALL, SMALL_CAPACITY = (2, 14, 9, 8, 12, 8, 2, 9), 20


@Checker
def batch_sampler(
    make: Callable[..., Iterable[Sequence[int]]], batch_size: int = 32, k: int = 10, full: float = 0.5, seed: int = 0
) -> Iterator[Line]:
    """A sampler `make(lengths, batch_size, k)` of batches of indices whose lengths differ by at most k.

    On the mean, its batches must be `full` to that share.
    """
    lengths = np.random.default_rng(seed).integers(1, 641, 20_000)

    @cache
    def epochs() -> list[list[list[int]]]:
        sampler, passes = make(lengths, batch_size, k), []
        for number in range(2):
            getattr(sampler, "set_epoch", int)(number)  # as those that draw by epoch are told
            passes.append([[int(i) for i in batch] for batch in sampler])
        return passes

    def spread(epochs: list) -> tuple[bool, str]:
        widest = max(int(np.ptp(lengths[batch])) for batch in epochs[0])
        return widest <= k, f"at most {widest}"

    def sizes(epochs: list) -> tuple[bool, str]:
        counts = [len(batch) for batch in epochs[0]]
        largest, mean = max(counts), float(np.mean(counts)) / batch_size
        return largest <= batch_size and mean >= full, f"at most {largest}; {mean:.1%} full on the mean"

    def shuffled(epochs: list) -> tuple[bool, str]:
        means = np.array([lengths[batch].mean() for batch in epochs[0]])
        trend = abs(np.corrcoef(means, np.arange(len(means)))[0, 1])
        return trend < 0.2, f"correlation of length and position {trend:.2f}"

    def again(epochs: list) -> tuple[bool, str]:
        same = epochs[0] == epochs[1]
        return (False, "the same batches in the same order") if same else _each_once(epochs[1], len(lengths))

    @cache
    def times() -> list[list[float]]:
        few, many = (_us(partial(lambda n: make(_lengths(n), batch_size, k), n)) for n in (10_000, 300_000))
        return [few, many, _us(lambda: _shuffled(300_000 // batch_size))]

    hint = "Which samples are left when a window or an epoch ends?"
    yield Line("every index comes once", epochs, lambda epochs: _each_once(epochs[0], len(lengths)), hint)
    hint = "What has an epoch used up that the next one needs, and what does it draw anew?"
    yield Line("and once in a second epoch, in another order", epochs, again, hint)
    hint = "A window of width k holds the lengths from l to l + k."
    yield Line(f"lengths in a batch differ by at most k = {k}", epochs, spread, hint, conditional=True)
    about = f"batches have at most {batch_size} indices, and are mostly full"
    hint = "A window that is fixed for the epoch is left with one small batch."
    yield Line(about if full <= 0.5 else f"{about}: to {full:.1%}", epochs, sizes, hint)
    hint = "The order in which windows come must not be that of their lengths."
    yield Line("short and long batches come in random order", epochs, shuffled, hint, conditional=True)
    hint = (
        "__init__ may look at all samples; __iter__ must not sort, search or copy them, before its first batch neither."
    )
    yield Line("a batch takes as long from many samples as from few", times, _flat, hint, conditional=True)
    hint = "A table from a length to its samples takes one look at each; a list that is searched takes n."
    yield Line("making it takes as long a sample, of many as of few", times, _linear, hint, conditional=True)


def _flat(times: list[list[float]]) -> tuple[bool, str]:
    (_, few_begin, few), (_, many_begin, many), (_, shuffling, _) = times  # the memory of few may be in caches
    passed = many_begin <= 3 * few_begin + 6 * shuffling + 5000 and many <= 5 * few + 50
    begins = f"an epoch begins after {few_begin:,.0f} µs of 10,000 samples, {many_begin:,.0f} µs of 300,000"
    return passed, f"{begins}; then a batch takes {few:.0f} and {many:.0f} µs"


def _linear(times: list[list[float]]) -> tuple[bool, str]:
    few, many = times[0][0] / 10_000, times[1][0] / 300_000
    return many <= 4 * few + 1, f"{few:.2f} µs a sample of 10,000, {many:.2f} µs of 300,000"


def _shuffled(batches: int) -> Iterator[int]:
    """What a sampler may do when an epoch begins."""
    yield from random.sample(range(batches), batches)


def _lengths(samples: int) -> np.ndarray:
    return np.random.default_rng(0).integers(1, 641, samples)


def _us(make: Callable[[], Iterable]) -> list[float]:
    """Microseconds of the CPU to make a sampler, to its first batch and for one of the next 200: the best of three.

    The clock is the thread's: with a limit of CPU time that of the process ticks in milliseconds.
    """
    best = [float("inf")] * 3
    for _ in range(3):
        start = time.thread_time()
        sampler = make()
        moments = [start, time.thread_time()]
        moments += [time.thread_time() for _ in itertools.islice(sampler, 201)]
        us = np.diff(moments) * 1e6
        best = np.minimum(best, [us[0], *us[1:2], np.median(us[2:] if len(us) > 2 else 0)]).tolist()
        if us[0] > 2e6:
            break
    return best


@Checker
def packing(
    pack: Callable[[np.ndarray, int], Iterable[Sequence[int]]],
    capacity: int = 640,
    best_fit: bool = False,
    seed: int = 0,
) -> Iterator[Line]:
    """A function of (lengths, capacity) that gives packs of indices, none longer together than the capacity.

    It takes the longest document first. Best fit puts each into the pack with the least room that is enough.
    """
    lengths = np.random.default_rng(seed).integers(1, capacity + 1, 2000)

    def packed(lengths: np.ndarray, capacity: int) -> list[list[int]]:
        return [[int(i) for i in indices] for indices in pack(lengths, capacity)]

    packs = cache(partial(packed, lengths, capacity))

    def fits(packs: list[list[int]]) -> tuple[bool, str]:
        fullest = max(int(lengths[indices].sum()) for indices in packs)
        return fullest <= capacity, f"{fullest} in {capacity}"

    def few(packs: list[list[int]]) -> tuple[bool, str]:
        least, most = -(-int(lengths.sum()) // capacity), _next_fit(lengths, capacity)
        return len(packs) < most, f"{len(packs)} packs; the lower bound is {least}, next fit takes {most}"

    def counts_by_order() -> list[int]:
        rising = np.sort(lengths[:500])
        return [len(packed(ordered, capacity)) for ordered in (rising, rising[::-1])]

    def longest_first(counts: list[int]) -> tuple[bool, str]:
        return counts[0] == counts[1], f"{counts[0]} packs of rising lengths, {counts[1]} of falling ones"

    hint = "Does every path through the loop put the document somewhere, and once?"
    yield Line("every sample is packed once", packs, lambda packs: _each_once(packs, len(lengths)), hint)
    hint = "A document fits where the room is at least its length."
    yield Line("no pack overflows", packs, fits, hint, conditional=True)
    about = "6, 4, 7 and 3 fill two packs of 10"
    yield Line(about, lambda: len(packed(np.array([6, 4, 7, 3]), 10)), equals(2), hint)
    yield Line("fewer packs than by next fit", packs, few, "Look at all packs that have room, not at the last alone.")
    about, hint = "the longest come first, in whatever order they are given", "What comes last should be short."
    yield Line(about, counts_by_order, longest_first, hint, conditional=True)
    if best_fit:
        factor = 1 + seed % 9
        small, room = factor * np.random.default_rng(seed).permutation(SMALL), factor * SMALL_CAPACITY
        about = f"{small.tolist()} in packs of {room} as best fit packs them"
        hint = "Longest first; of the packs with room enough, which one has the least left?"
        yield Line(about, partial(packed, small, room), partial(_as_best_fit, small, room), hint)


def _as_best_fit(lengths: np.ndarray, capacity: int, packs: list[list[int]]) -> tuple[bool, str]:
    expected: list[list[int]] = []
    for length in sorted(map(int, lengths), reverse=True):
        fitting = [pack for pack in expected if sum(pack) + length <= capacity]
        if not fitting:
            expected.append([])
        max(fitting, key=sum, default=expected[-1]).append(length)
    given = sorted(sorted((int(lengths[i]) for i in pack), reverse=True) for pack in packs)
    return Counter(map(tuple, given)) == Counter(map(tuple, expected)), f"{given}"


@Checker
def packed_attention(
    attend: Callable[..., Tensor], device: str = "cpu", apart: bool = False, seed: int = 0
) -> Iterator[Line]:
    """Attention `attend(q, k, v, offsets)` over documents packed in one sequence, causal within each.

    q, k and v are (1, heads, T, head_dim); document i lies at `offsets[i]` to `offsets[i + 1]`. Documents that are
    computed `apart` don't even get a NaN from one another, which a masked score multiplies by zero.
    """
    lengths = [5, 1, 30, 12]
    offsets = np.cumsum([0, *lengths])

    def inputs() -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        shape = (1, 2, int(offsets[-1]), 16)
        return [torch.randn(shape, generator=generator).to(device).requires_grad_() for _ in range(3)]

    alone = partial(_alone, lengths)

    def gradients(attention: Callable[..., Tensor], *more: Any) -> tuple[Tensor, ...]:
        tensors = inputs()
        out = attention(*tensors, *more)
        return torch.autograd.grad(out, tensors, torch.sin(torch.arange(out.numel(), device=device)).view(out.shape))

    def changed(at: int, by: float = 1.0) -> Tensor:
        """By how much each position's output changes with the token at a place, (T,)."""
        q, k, v = (part.detach() for part in inputs())
        before = attend(q, k, v, offsets)
        for part in (q, k, v):
            part[:, :, at] += by
        return (attend(q, k, v, offsets) - before).abs().amax(dim=(0, 1, 3))

    def contained(changes: list[Tensor]) -> tuple[bool, str]:
        largest = max(
            float(change[np.r_[0:begin, end : offsets[-1]]].max())
            for change, (begin, end) in zip(changes, ((6, 36), (5, 6)), strict=False)
        )
        return largest == 0.0, f"largest change {largest:.1e}"

    def right(output: Tensor) -> tuple[bool, str]:
        return close([output], [alone(*(tensor.cpu() for tensor in inputs()))], 1e-4)

    hint = "Compare with one document alone: which keys does its first token see, and which its last?"
    about = "the output is that of each document alone"
    yield Line(about, lambda: attend(*inputs(), offsets), right, hint)
    hint = "Who may see a token: what do its offsets say of the next document's?"
    about = "a changed token changes no other document"
    yield Line(about, lambda: [changed(8), changed(5)], contained, hint, conditional=True)
    hint = "Causal within each document, too: a query sees keys up to itself."
    yield Line("a changed token changes no position before it", lambda: changed(20), _earlier, hint, conditional=True)
    yield Line(
        "the gradients are those of each document alone",
        lambda: gradients(attend, offsets),
        lambda given: close(given, [grad.cpu() for grad in gradients(alone)], 1e-4),
        "Does autograd see all that happens between q, k, v and the output?",
    )
    if apart:
        hint = "A mask still computes the scores between documents: split first."
        about = "a NaN in one document reaches no other"
        yield Line(about, lambda: [changed(8, float("nan"))], contained, hint, conditional=True)


def _earlier(change: Tensor) -> tuple[bool, str]:
    wrong = torch.nonzero(change[:20])[:, 0].tolist()
    return not wrong, f"token 20 changes {wrong}" if wrong else ""


def _alone(lengths: list[int], *tensors: Tensor) -> Tensor:
    """Causal attention of q, k and v (1, heads, T, head_dim), of each document by itself."""
    parts = zip(*(tensor.split(lengths, dim=2) for tensor in tensors), strict=True)
    return torch.cat([F.scaled_dot_product_attention(q, k, v, is_causal=True) for q, k, v in parts], dim=2)


def _each_once(groups: list[list[int]], count: int) -> tuple[bool, str]:
    times = np.bincount([index for group in groups for index in group], minlength=count)
    wrong = np.flatnonzero(times != 1)
    if not len(wrong):
        return True, ""
    return False, f"{len(wrong):,} of {count:,} not exactly once, index {wrong[0]} {times[wrong[0]]} times"


def _next_fit(lengths: Iterable[int], capacity: int) -> int:
    """Packs that are needed if only the last one is looked at."""
    packs, room = 0, 0
    for length in lengths:
        if length > room:
            packs, room = packs + 1, capacity
        room -= length
    return packs
