"""Checks of what runs beside a training: scores by class, a reader of tar shards, counts of forgotten samples."""

import contextlib
import os
import pickle
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from io import BytesIO
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from .check import Checker, Line, at_most, close


@Checker
def class_scores(make: Callable[[int], Any], classes: int = 4, seed: int = 0) -> Iterator[Line]:
    """F1 by class of all batches so far: `make(classes)` with `update(logits, labels)` and `compute()`.

    What it holds doesn't grow with the number of batches.
    """

    def batches(count: int) -> Iterator[tuple[Tensor, Tensor]]:
        random = torch.Generator().manual_seed(seed)
        for number in range(count):
            labels = torch.randint(classes - 1 if number % 2 else classes, (13 - number % 5,), generator=random)
            labels[:classes] = labels[:classes] if number else torch.arange(classes)  # all are in the first batch
            noise = torch.randn(len(labels), classes, generator=random)
            yield torch.nn.functional.one_hot(labels, classes) + noise, labels

    def fed(count: int, often: bool = False) -> Any:
        scores = make(classes)
        for logits, labels in batches(count):
            scores.update(logits, labels)
            if often:
                scores.compute()
        return scores

    def computed(count: int, often: bool = False) -> Tensor:
        return torch.stack([torch.as_tensor(score).double() for score in fed(count, often).compute()])

    def right(count: int, scores: Tensor) -> tuple[bool, str]:
        logits, actual = (torch.cat(parts) for parts in zip(*batches(count), strict=True))
        guessed = logits.argmax(1)
        hits = [int(((guessed == c) & (actual == c)).sum()) for c in range(classes)]
        totals = [int((guessed == c).sum() + (actual == c).sum()) for c in range(classes)]
        expected = [2 * hit / total for hit, total in zip(hits, totals, strict=True)]
        return close([scores], [torch.tensor(expected).double()], 1e-5)

    def growth() -> int:
        few, many = (len(pickle.dumps(vars(fed(count)))) for count in (5, 50))
        return many - few

    hint = "F1 = 2 · hits / (times guessed + times labelled)."
    yield Line("F1 of one batch", partial(computed, 1), partial(right, 1), hint)
    hint = "Counts add up over batches; means don't, and batches differ in size."
    yield Line("F1 of 20 batches", partial(computed, 20), partial(right, 20), hint)
    about = "compute after each batch changes nothing"
    yield Line(about, partial(computed, 20, True), partial(right, 20), "compute reads the counts and leaves them.")
    hint = "Which numbers by class are enough for F1, however many batches there were?"
    few = at_most(64, "bytes more")
    yield Line("50 batches take no more memory than 5", growth, few, hint, conditional=True)


@Checker
def tar_read(Shard: Callable[[str], Any], seed: int = 0) -> Iterator[Line]:
    """`Shard(path).read(positions)` of a tar with its index (N, 2), offsets and sizes, beside it in `path`.npy."""
    random = np.random.default_rng(seed)
    contents = [random.bytes(int(size)) for size in random.integers(1, 3000, 60)]
    whole = _tar(contents)
    with tarfile.open(fileobj=BytesIO(whole)) as tar:
        index = np.array([(member.offset_data, member.size) for member in tar])

    def read(positions: Sequence[int]) -> list:
        with tempfile.TemporaryDirectory() as folder:
            with open(f"{folder}/tar", "wb") as file:
                file.write(whole)
            np.save(f"{folder}/tar.npy", index)
            shard = Shard(f"{folder}/tar")
            return _counted(lambda: [bytes(data) for data in shard.read(positions)])

    def right(positions: Sequence[int], given: list) -> tuple[bool, str]:
        expected = [contents[position].decode("latin-1") for position in positions]
        if len(given[0]) != len(expected):
            return False, f"{len(given[0])} samples for {len(expected)} positions"
        for position, ours, theirs in zip(positions, given[0], expected, strict=True):
            if ours != theirs:
                begin = "" if ours[:9] == theirs[:9] else ", and begins elsewhere"
                longer = "as many" if len(ours) == len(theirs) else "too many" if len(ours) > len(theirs) else "too few"
                return False, f"sample {position} has {longer} bytes{begin}"
        return True, f"{len(expected)} samples"

    def few(positions: Sequence[int], given: list) -> tuple[bool, str]:
        by_pread = at_most(len(_runs(positions)), "calls of pread")(len(given[1]))
        return at_most(20, "calls that read")(given[2]) if by_pread[0] and given[2] > 20 else by_pread

    def near(positions: Sequence[int], given: list) -> tuple[bool, str]:
        needed = sum(int(index[last].sum() - index[first, 0]) for first, last in _runs(positions))
        return sum(given[1]) <= needed, f"{sum(given[1]):,} bytes, and these samples have {needed:,}"

    scattered = [17, 3, 4, 59, 3, 58, 0]
    row, mixed, nothing = (cache(partial(read, positions)) for positions in (range(60), scattered, []))
    hint = "A sample begins at its own offset, and ends before the padding and the next header."
    yield Line("read(range(60)) gives each sample", row, partial(right, range(60)), hint)
    spans = "A call can span several samples and headers."
    yield Line("60 neighbours share calls", row, partial(few, range(60)), spans, conditional=True)
    hint = "The answer has the order of the positions, and a position as often as it is asked for."
    yield Line(f"read({scattered}) gives each sample in this order", mixed, partial(right, scattered), hint)
    hint = "Which positions follow one another once they are sorted, and which are the same?"
    yield Line("there, neighbours share calls", mixed, partial(few, scattered), hint, conditional=True)
    hint = "What lies between samples that are no neighbours needn't be read."
    about = "there, nothing between far samples is read"
    yield Line(about, mixed, partial(near, scattered), hint, conditional=True)
    hint = "What is the first of no positions?"
    yield Line("read([]) gives none", nothing, partial(right, []), hint, conditional=True)


def _counted(read: Callable[[], list]) -> list:
    """What is read, the sizes of the calls of `pread`, and how many calls there were of any kind that reads."""
    sizes: list[int] = []
    pread = os.pread

    def counted(file: int, size: int, offset: int) -> bytes:
        sizes.append(int(size))
        return pread(file, size, offset)

    counts = [_reads(), _reads()]
    with mock.patch("os.pread", counted):
        samples = read()
    return [samples, sizes, _reads() - 2 * counts[1] + counts[0]]


def _reads() -> int:
    """How often this process has asked the system for data; 0 where that isn't known."""
    with contextlib.suppress(OSError):
        return int(Path("/proc/self/io").read_text().partition("syscr: ")[2].split()[0])
    return 0


def _tar(contents: Sequence[bytes]) -> bytes:
    file = BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for number, data in enumerate(contents):
            member = tarfile.TarInfo(f"{number:08d}.bin")
            member.size = len(data)
            tar.addfile(member, BytesIO(data))
    return file.getvalue()


def _runs(positions: Sequence[int]) -> list[tuple[int, int]]:
    """The first and last of each row of neighbours among the positions."""
    runs: list[tuple[int, int]] = []
    for position in sorted(set(positions)):
        if runs and position == runs[-1][1] + 1:
            runs[-1] = runs[-1][0], position
        else:
            runs.append((position, position))
    return runs


@Checker
def forgetting(make: Callable[[int], Any], samples: int = 200, seed: int = 0) -> Iterator[Line]:
    """A counter `make(samples)` with `update(indices, correct)`, `forgotten` (samples,) and `unforgettable()`.

    An index that comes twice in a batch is presented twice, in the batch's order.
    """

    def batches(repeats: bool) -> Iterator[tuple[Tensor, Tensor]]:
        random = torch.Generator().manual_seed(seed)
        for _ in range(15):
            permuted = torch.randperm(samples, generator=random)
            order = torch.randint(samples, (samples,), generator=random) if repeats else permuted
            for indices in order.split(32):
                yield indices, torch.rand(len(indices), generator=random) < 0.7

    @cache
    def counted(repeats: bool) -> list:
        counter = make(samples)
        for indices, correct in batches(repeats):
            counter.update(indices.clone(), correct.clone())
        return [list(map(int, counter.forgotten)), sorted(map(int, counter.unforgettable()))]

    def expected(repeats: bool) -> tuple[list[int], list[int]]:
        right, learned, forgotten = [False] * samples, [False] * samples, [0] * samples
        for indices, correct in batches(repeats):
            for index, now in zip(indices.tolist(), correct.tolist(), strict=True):
                forgotten[index] += right[index] and not now
                right[index], learned[index] = now, learned[index] or now
        return forgotten, [i for i in range(samples) if learned[i] and not forgotten[i]]

    def same_counts(repeats: bool, given: list) -> tuple[bool, str]:
        theirs = expected(repeats)[0]
        wrong = [i for i in range(samples) if given[0][i] != theirs[i]]
        if not wrong:
            return True, ""
        return False, f"sample {wrong[0]} forgotten {given[0][wrong[0]]} times is wrong, and {len(wrong)} in all are"

    def same_samples(repeats: bool, given: list) -> tuple[bool, str]:
        apart = sorted(set(given[1]) ^ set(expected(repeats)[1]))
        return not apart, f"sample {apart[0]} is {'' if apart[0] in given[1] else 'not '}among them" if apart else ""

    hints = [
        "A sample is forgotten where it was right at its last presentation and is wrong now.",
        "`x[indices] += 1` counts an index once, however often it comes; which order do repeats have?",
    ]
    for about, repeats in (("indices that come once a batch", False), ("indices that repeat in a batch", True)):
        once = cache(partial(counted, repeats))
        given = not repeats  # a counter that is right of these alone is what there was before
        yield Line(about, once, partial(same_counts, repeats), hints[repeats], conditional=given)
        hint = "Unforgettable is what was right once and never forgotten."
        about += ": the unforgettable ones"
        yield Line(about, once, partial(same_samples, repeats), hint, conditional=given)
