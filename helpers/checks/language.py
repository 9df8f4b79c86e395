"""Checks of what a language model is trained with: datasets, padded and packed batches, positions, loss, accuracy."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .check import Checker, Line, at_most, close, equals

LONG, SAMPLES = 40, 60
PAD_ID = "Another vocabulary has another number for padding."
CUT = "A sample that is longer than max_length loses what is behind it."


def _samples(seed: int) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.integers(1, 50, int(length)) for length in random.integers(1, 2 * LONG, SAMPLES)]


def _floats(given: list) -> bool:
    return any(isinstance(ids, Tensor) and ids.is_floating_point() for ids in given)


def _same_ids(given: list, expected: list[Tensor]) -> tuple[bool, str]:
    return (False, "floats") if _floats(given) else close(given, expected, 0)


def _hint(given: Any, otherwise: str) -> str:
    floats = _floats(given if isinstance(given, list) else [given])
    return "Token ids are whole numbers: an embedding takes no others." if floats else otherwise


@Checker
def dataset(make: Callable[..., Any], padded: bool = False, seed: int = 0) -> Iterator[Line]:
    """A dataset `make(samples, max_length)` of samples cut to that length, and if `padded` filled up to it with 0."""
    samples = _samples(seed)

    @cache
    def all_of_it() -> list[Tensor]:
        made = make(samples, LONG)
        return [torch.as_tensor(made[at]) for at in range(len(made))]

    def right(given: list[Tensor]) -> tuple[bool, str]:
        cut = [torch.from_numpy(sample[:LONG]) for sample in samples]
        return _same_ids(given, [F.pad(ids, (0, LONG - len(ids))) for ids in cut] if padded else cut)

    yield Line("it has as many samples as it was given", lambda: len(all_of_it()), equals(SAMPLES))
    hint = "The padding follows the sample, up to max_length." if padded else CUT
    yield Line("each sample is cut" + " and padded" * padded, all_of_it, right, partial(_hint, otherwise=hint))


@Checker
def collated(collate: Callable[[list], Any], seed: int = 0) -> Iterator[Line]:
    """A function from samples of token ids to a batch (B, T) as long as the longest, padded with 0 behind.

    It takes arrays or tensors, as its author's dataset gives them. The batch may be the first of several tensors, such
    as of lengths or of targets, in a tuple or by name.
    """
    samples = _samples(seed)

    def batch_of(chosen: list[np.ndarray]) -> Any:
        try:
            given = collate(chosen)
        except (TypeError, AttributeError):
            given = collate([torch.from_numpy(sample) for sample in chosen])
        parts = list(given.values()) if isinstance(given, Mapping) else given
        return parts if isinstance(parts, (Tensor, np.ndarray)) else parts[0]

    def right(chosen: list[np.ndarray], batch: Tensor) -> tuple[bool, str]:
        longest = max(map(len, chosen))
        return _same_ids([batch], [torch.stack([F.pad(torch.from_numpy(s), (0, longest - len(s))) for s in chosen])])

    for about, chosen in (("a batch of 16", samples[:16]), ("another one", samples[16:24]), ("one", samples[:1])):
        hint = partial(_hint, otherwise="How long is the longest sample of this batch? The others are padded behind.")
        yield Line(f"{about} is padded to its longest sample", partial(batch_of, chosen), partial(right, chosen), hint)


@Checker
def sequenced(make: Callable[..., Iterable], seed: int = 0) -> Iterator[Line]:
    """An iterable `make(samples, batch_size, max_length)` of pairs, or longer tuples: tokens (T,), offsets (n + 1,).

    A pair holds whole samples one after another, at most `batch_size` of them, and at most `max_length` tokens; the
    last one may be cut or dropped.
    """
    samples, size, room = _samples(seed), 8, 4 * LONG

    @cache
    def pairs() -> list[list]:
        return [[item[0], torch.as_tensor(item[1]).tolist()] for item in make(samples, size, room)]

    def documents(given: list[list]) -> list[list[list[int]]]:
        return [[tokens[i:j].tolist() for i, j in itertools.pairwise(offsets)] for tokens, offsets in given]

    def whole(given: list[list]) -> tuple[bool, str]:
        known = [sample.tolist() for sample in samples]
        sequences = documents(given)
        cut = [sequence[-1] for sequence in sequences]  # may be: its beginning is a sample's
        wrong = sum(document not in known for sequence in sequences for document in sequence[:-1])
        wrong += sum(all(sample[: len(document)] != document for sample in known) for document in cut)
        begun = bool(given) and all(offsets[0] == 0 for _, offsets in given)
        return begun and not wrong, f"{wrong} documents are no sample" if wrong else ""

    def most(given: list[list]) -> tuple[bool, str]:
        kept = sum(map(len, documents(given)))
        return kept >= 0.8 * SAMPLES, f"{kept} of {SAMPLES} samples are in a sequence"

    def ordered(given: list[list]) -> bool:
        rest = iter([sample.tolist() for sample in samples])
        every = itertools.chain(*documents(given))
        return all(any(sample[: len(document)] == document for sample in rest) for document in every)

    def shared(given: list[list]) -> tuple[bool, str]:
        mean = sum(map(len, documents(given))) / max(len(given), 1)
        return mean >= 2, f"{mean:.1f} in each on the mean"

    hint = "Where does a sample begin, and where does the next one? The first offset is 0, the last one the end."
    yield Line("between offsets lie whole samples", pairs, whole, hint)
    yield Line("hardly a sample is lost", pairs, most, "What doesn't fit can begin the next sequence.")
    yield Line("samples share sequences", pairs, shared, "A sequence ends where the next sample doesn't fit.")
    hint = "Which sample follows in the text?"
    yield Line("they are in the order of the text", pairs, ordered, hint, conditional=True)
    about = "a sequence has at most so many tokens"
    longest = at_most(room, "tokens")
    yield Line(about, lambda: max(len(p[0]) for p in pairs()), longest, conditional=True)
    fullest = at_most(size, "samples")
    yield Line("and so many samples", lambda: max(len(p[1]) - 1 for p in pairs()), fullest, conditional=True)


def _predicted(seed: int, pad_id: int = 0, batches: int = 5) -> list[tuple[Tensor, Tensor]]:
    """Logits (B, T, V) and targets (B, T) with padding in different shares."""
    random = torch.Generator().manual_seed(seed)
    made = []
    for number in range(batches):
        targets = (torch.randint(1, 12, (3, 7 + number), generator=random) + pad_id) % 12  # any other
        targets[0, 2 + number :] = pad_id
        logits = torch.randn(*targets.shape, 12, generator=random) + F.one_hot(targets, 12)
        made.append((logits, targets))
    return made


@Checker
def token_accuracy(make: Callable[..., Any], seed: int = 0) -> Iterator[Line]:
    """`make(pad_id=0)` with `update(logits, targets)`, `compute()` and `reset()`; padding isn't counted."""

    def fed(count: int, again: bool = False, predictions: bool = False, pad_id: int = 0) -> float:
        accuracy = make(pad_id=pad_id)
        if again:
            accuracy.update(*_predicted(seed + 1)[0])
            accuracy.reset()
        for logits, targets in _predicted(seed, pad_id)[:count]:
            accuracy.update(logits.argmax(-1) if predictions else logits, targets)
        return float(accuracy.compute())

    def right(count: int, given: float, pad_id: int = 0) -> tuple[bool, str]:
        batches = _predicted(seed, pad_id)[:count]
        pairs = [(logits.argmax(-1).flatten(), targets.flatten()) for logits, targets in batches]
        guessed, actual = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        return abs(given - float((guessed == actual)[actual != pad_id].float().mean())) < 1e-6, f"{given:.4f}"

    hint = "Padding is in the targets: it counts neither as right nor at all."
    yield Line("the accuracy of one batch", partial(fed, 1), partial(right, 1), hint)
    hint = "Counts add up over batches; means don't, and batches differ in size."
    yield Line("the accuracy of five", partial(fed, 5), partial(right, 5), hint)
    yield Line("after reset it begins anew", partial(fed, 5, True), partial(right, 5), "What does an epoch begin with?")
    about = "it takes predictions (B, T), too"
    yield Line(about, partial(fed, 5, False, True), partial(right, 5), "How many dimensions have logits?")
    yield Line("padding is what pad_id says", partial(fed, 5, pad_id=7), partial(right, 5, pad_id=7), PAD_ID)


@Checker
def token_loss(make: Callable[..., Any], seed: int = 0) -> Iterator[Line]:
    """`make(pad_id=0)`, of logits (B, T, V) and targets (B, T): the mean cross-entropy of what isn't padding."""

    def loss(scale: float = 1.0, pad_id: int = 0) -> Tensor:
        logits, targets = _predicted(seed, pad_id)[0]
        return make(pad_id=pad_id)(logits * scale, targets)

    def gradient() -> Tensor:
        logits, targets = _predicted(seed)[0]
        return torch.autograd.grad(make(pad_id=0)(logits.requires_grad_(), targets), logits)[0]

    def right(scale: float, given: Tensor, pad_id: int = 0) -> tuple[bool, str]:
        logits, targets = _predicted(seed, pad_id)[0]
        expected = F.cross_entropy(logits.flatten(0, 1) * scale, targets.flatten(), ignore_index=pad_id)
        return close([given], [expected], 1e-5)

    def right_gradient(given: Tensor) -> tuple[bool, str]:
        logits, targets = _predicted(seed)[0]
        expected = F.cross_entropy(logits.requires_grad_().flatten(0, 1), targets.flatten(), ignore_index=0)
        return close([given], torch.autograd.grad(expected, logits), 1e-5)

    hint = "By how many targets is the sum divided?"
    yield Line("the mean over what isn't padding", loss, partial(right, 1.0), hint)
    yield Line("its gradient, too", gradient, right_gradient, hint)
    hint = "A softmax whose numbers are rounded to 0 has no logarithm: is there a function of both?"
    yield Line("logits 100 times as large", partial(loss, 100.0), partial(right, 100.0), hint)
    yield Line("padding is what pad_id says", partial(loss, pad_id=7), partial(right, 1.0, pad_id=7), PAD_ID)


@Checker
def positional_encoding(make: Callable[..., Any], seed: int = 0) -> Iterator[Line]:
    """`make(d_model, max_length)`: x (B, T, C) + sines and cosines of positions 0 … T − 1, or of `positions` (T,)."""
    width, length = 16, 50
    x = torch.randn(3, 20, width, generator=torch.Generator().manual_seed(seed))
    chosen = torch.randint(length, (20,), generator=torch.Generator().manual_seed(seed + 1))

    def added(**options: Tensor) -> Tensor:
        return make(width, length).eval()(x, **options)

    def right(positions: Tensor, given: Tensor) -> tuple[bool, str]:
        rates = 10000 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
        angles = positions[:, None] * rates
        return close([given], [x + torch.stack([angles.sin(), angles.cos()], 2).flatten(1).float()], 1e-4)

    hint = "Channels 2i and 2i + 1 share an angle, p / 10000^(2i/C); which dimension of x are positions?"
    yield Line("sine and cosine of each position are added", added, partial(right, torch.arange(20)), hint)
    hint = "Documents of a pack begin anew at position 0: their positions are given."
    yield Line("so are those of given positions", partial(added, positions=chosen), partial(right, chosen), hint)

    def read() -> list:
        made = make(width, length, 0.25)
        return [list(made.table.shape), float(made.dropout.p)]

    hint = "Chapter 3's slow loop reads `table` (max_length, C) and `dropout`, a module."
    yield Line("it has its table and a dropout", read, equals([[length, width], 0.25]), hint)
    about = "nothing is learned"
    yield Line(about, lambda: len(list(make(width, length).parameters())), at_most(0, "parameters"), conditional=True)
