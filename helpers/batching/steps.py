"""How fast training is with each way of batching: steps in turn, beside a peer, and whole training runs."""

import itertools
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor

from helpers import train as trainer
from helpers.lab import compare, device, experiment, peak_memory
from helpers.lab.experiment import OUT_OF_MEMORY, free_memory, is_out_of_memory
from helpers.lab.machine import NOT_INSTALLED
from helpers.lab.records import STATUS, Row
from helpers.metrics import LMCrossEntropyLoss
from helpers.tasks import DATA, Batch
from helpers.tasks.language import balanced_batches, packed_batches, random_batches
from helpers.text import SyntheticText

from . import collator as peer
from .attention import WAYS, causal_attention, forget_compiled, ways, without_cudnn_attention
from .datasets import StandardDataset
from .sequenced import SequencedDataset
from .speed import MAX_LENGTH, build, compute_dtype, synthetic, words

NO_PADDING = "equally long, no padding"
PADDED, BALANCED = "BIG BRAIN", "k = 10"
TURNS = 20  # batches of each way that are gone through, round and round
MASKED = 5  # of them in the dense way, whose masks are T² numbers each, and whose steps take equally long


@experiment(
    small=[{"width": 32, "layers": 1, "batch_size": 4, "samples": 96, "rounds": 20}],
    big_gpu=[{"width": 1024, "layers": 8, "batch_size": size, "samples": 50_000, "rounds": 60} for size in (64, 256)],
    version=2,
)
@without_cudnn_attention()
def throughput(width: int, layers: int, batch_size: int, samples: int, rounds: int) -> list[Row]:
    """Real tokens a second of training steps, forward, backward and AdamW, from one interleaved run.

    The limit is a batch of samples all as long as the mean one: the same model with nothing to pad. The others take
    batches of WikiText's lengths; each step of theirs is another batch, so the rate is over all of them. Batches, and
    the masks or tables that attention needs, are made before: `attention` has what those cost. First each way goes
    through its batches, to warm up; one that runs out of memory is a row that says so, and the others go on without it.
    """
    forget_compiled()
    dtype = compute_dtype()
    text = synthetic(samples, words(width))
    dataset = StandardDataset(text, MAX_LENGTH + 1)
    model = build(text, width, layers, head=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    criterion = LMCrossEntropyLoss(text.vocab.pad_id)

    def train_step(batch: Batch) -> None:
        loss = criterion(model(batch.inputs, **batch.options), batch.targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    feeds = {PADDED: random_batches, BALANCED: partial(balanced_batches, k=10)}
    held = {NO_PADDING: [_full_batch(text, batch_size, round(float(dataset.lengths.mean())))]}
    held |= {name: _some(feed(dataset, batch_size, device(), dtype, 0)[0]) for name, feed in feeds.items()}
    for way in WAYS:
        if not ways(device(), dtype)[way]:
            feed, _ = packed_batches(dataset, batch_size, device(), dtype, 0, way=way)
            held[f"packed, {way}"] = _some(feed)
    real = {name: _real_tokens(batches) for name, batches in held.items()}
    held |= {name: batches[:MASKED] for name, batches in held.items() if name == "packed, dense"}
    names = list(held)
    for name in reversed(names):  # the largest last, when all masks are there
        if not _fits(held[name], train_step, optimizer):
            del held[name]
    turns = {name: _Turn(batches, train_step, real[name]) for name, batches in held.items()}
    timed = compare(turns, check=False, rounds=rounds, warmup=1)
    rates = {name: turn.real * 1e3 / float(np.mean(timed.samples_ms[name])) for name, turn in turns.items()}
    limit = rates.get(NO_PADDING)
    rows: list[Row] = []
    for name in names:
        if name not in rates:
            rows.append({"way": name, STATUS: OUT_OF_MEMORY})
            continue
        found = {"real_tokens_per_s": rates[name], "ratio_to_no_padding": rates[name] / limit if limit else None}
        rows.append({"way": name} | timed.timing(name).row() | found)
    return rows


class _Turn:
    """A step on the next of some batches, round and round; `real` is their mean number of real tokens."""

    def __init__(self, batches: list, step: Callable, real: float) -> None:
        self.batches, self.step, self.real, self.number = batches, step, real, 0

    def __call__(self) -> None:
        self.step(self.batches[self.number % len(self.batches)])
        self.number += 1


def _fits(batches: list[Batch], step: Callable[[Batch], None], optimizer: torch.optim.Optimizer) -> bool:
    """Take the steps on these batches, if there is memory enough; what they leave behind if not is given back."""
    try:
        for batch in batches:
            step(batch)
        return True
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    optimizer.zero_grad()
    free_memory()
    return False


def _real_tokens(batches: list[Batch]) -> float:
    return float(np.mean([int((batch.targets != 0).sum()) for batch in batches]))


def _some(batches: Callable[[int, int], Iterator[Batch]], number: int = TURNS) -> list[Batch]:
    return list(itertools.islice(batches(0, 0), number))


def _full_batch(text: SyntheticText, batch_size: int, length: int) -> Batch:
    tokens = torch.from_numpy(text.ids[: batch_size * (length + 1)].astype(np.int64)).view(batch_size, -1)
    tokens = tokens.to(device())
    return Batch(tokens[:, :-1], tokens[:, 1:], {"attend": causal_attention})


COLLATOR, PACKED = "flattening collator", "packs of one length"


@experiment(
    small=[{"width": 32, "layers": 1, "batch_size": 4, "rounds": 20}],
    big_gpu=[{"width": 1024, "layers": 8, "batch_size": size, "rounds": 60} for size in (64, 256)],
)
def collator(width: int, layers: int, batch_size: int, rounds: int) -> list[Row]:
    """Training steps of transformers' Llama, fed by its padding-free collator and by packs, in one interleaved run.

    The same model, attention kernel and optimizer, each eager and compiled: the collator's batches all have another
    length, so theirs for any, and packs have one. Batches are made before.
    """
    text = synthetic(24 * batch_size, words(width))
    dataset = StandardDataset(text, MAX_LENGTH)
    try:
        model = peer.llama(len(text.vocab), width, layers, heads=8).to(device=device(), dtype=compute_dtype())
        joined = [inputs for inputs, _ in zip(peer.flattened(dataset, batch_size, 0), range(TURNS), strict=False)]
    except ImportError:
        return [{"way": way, STATUS: f"{NOT_INSTALLED}transformers"} for way in (COLLATOR, PACKED)]
    capacity = max(round(batch_size * float(dataset.lengths.mean())), MAX_LENGTH)
    sequences = SequencedDataset(dataset, None, capacity, strategy="best-fit", fixed=True)
    packs = [peer.as_inputs(packed, MAX_LENGTH) for packed, _ in zip(sequences, range(TURNS), strict=False)]
    held = {COLLATOR: joined, PACKED: packs}
    models = {COLLATOR: model, PACKED: model}
    if device().type == "cuda":  # on the CPU a compiled model would say nothing, and need a C++ compiler
        for name, dynamic in ((COLLATOR, True), (PACKED, None)):
            held[f"{name}, compiled"] = held[name]
            models[f"{name}, compiled"] = torch.compile(model, dynamic=dynamic)
    turns = {}
    for name, fed in models.items():
        batches = [{key: _there(value) for key, value in inputs.items()} for inputs in held[name]]
        real = float(np.mean([int((inputs["labels"] != peer.IGNORED).sum()) for inputs in held[name]]))
        turns[name] = _Turn(batches, peer.trainer(fed), real)
    timed = compare(turns, check=False, rounds=rounds, warmup=TURNS)
    rates = {name: turn.real * 1e3 / float(np.mean(timed.samples_ms[name])) for name, turn in turns.items()}
    rows = [
        {"way": name}
        | timed.timing(name).row()
        | {"real_tokens_per_s": rate, "ratio_to_collator": rate / rates[COLLATOR]}
        for name, rate in rates.items()
    ]
    return rows


def _there(value: Tensor | int) -> Tensor | int:
    return value.to(device()) if isinstance(value, Tensor) else value


@experiment(
    small=[{"data": data, "size": "small", "epochs": 1, "seed": 0} for data in DATA],
    big_gpu=[{"data": data, "size": "full", "epochs": 1, "seed": seed} for data in DATA for seed in range(3)],
    version=2,
)
@without_cudnn_attention()
def training(data: str, size: str, epochs: int, seed: int) -> Row:
    """A whole training run of the language model on each kind of batches: time, memory, and what it learned.

    All see the same samples; so at the end of an epoch all have seen as many real tokens.
    """
    precision = "bf16" if device().type == "cuda" else "fp32"
    setup = trainer.Setup(data=data, preset=size, epochs=epochs, seed=seed, precision=precision, autocast="torch")
    found: list[Row] = []
    memory = peak_memory(lambda: found.append(trainer.train(setup, progress=False)))
    names = ("validation_loss", "validation_accuracy", "train_loss", "steps", "source")
    return {name: found[0][name] for name in names} | {"train_s": found[0]["seconds"], "peak_gib": memory.peak_gib}
