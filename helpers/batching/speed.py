"""How fast each way of batching is: batches without backward, whole training runs, attention, packed training."""

import functools
import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor

from helpers import train as trainer
from helpers.lab import Timing, compare, device, each, experiment, peak_memory, phases
from helpers.lab.experiment import NOT_INSTALLED
from helpers.lab.memory import GIB
from helpers.lab.records import STATUS, Row
from helpers.lab.timing import synchronize
from helpers.metrics import LMCrossEntropyLoss
from helpers.models import GPT2LikeModel
from helpers.tasks import DATA, Batch
from helpers.tasks.language import balanced_batches, packed_batches, packed_way, random_batches
from helpers.text import SyntheticText
from helpers.text.synthetic import SIZE, draw_lengths

from . import collator as peer
from .attention import WAYS, causal_attention, packed_attention, ways
from .datasets import StandardDataset
from .packed_layout import PackedLayout
from .packing import pack
from .sequenced import SequencedDataset

MAX_LENGTH = 640  # the task's
SPREADS = (1, 5, 10, 20, 50, 640)  # k
FEEDS = {
    "BRAIN": partial(random_batches, whole=True),
    "BIG BRAIN": random_batches,
    **{f"k = {k}": partial(balanced_batches, k=k) for k in SPREADS},
    "packed": packed_batches,
}
SHARES = {"min_ms": 0, "p5_ms": 5, "p25_ms": 25, "median_ms": 50, "p75_ms": 75, "p95_ms": 95, "max_ms": 100}


def compute_dtype() -> torch.dtype:
    """bf16 on a GPU; on the CPU fp32, which every CPU has."""
    return torch.bfloat16 if device().type == "cuda" else torch.float32


@functools.lru_cache(maxsize=1)
def _text(samples: int, vocab_size: int) -> SyntheticText:
    return SyntheticText(samples, seed=0, vocab_size=vocab_size)


def _vocab_size(width: int) -> int:
    return SIZE if width >= 1024 else 500


def _model(text: SyntheticText, width: int, layers: int, head: bool) -> GPT2LikeModel:
    """`head=False` leaves out the product with the vocabulary, as the task does."""
    model = GPT2LikeModel(
        len(text.vocab), d_model=width, num_heads=8, num_layers=layers, max_length=MAX_LENGTH + 1, dropout=0.0
    )
    if not head:
        model.head = torch.nn.Identity()
    return model.to(device=device(), dtype=compute_dtype())


@experiment(
    small=[{"way": way, "width": 32, "batch_size": 4, "samples": 48} for way in ("BRAIN", "k = 5", "packed")],
    full=[
        {"way": way, "width": 1024, "batch_size": size, "samples": samples}
        for size, samples in ((64, 50_000), (256, 50_000))
        for way in FEEDS
    ],
)
def batch_time(way: str, width: int, batch_size: int, samples: int) -> Row:
    """An epoch of forward passes: embedding, positions, one decoder layer of 8 heads; no head, no backward.

    The decoder's memory is the embedded batch itself, under the causal mask. The time of a batch is the device's, from
    the tokens on the device to the output; the epoch's is the clock's, with loading and copying.
    """
    text = _text(samples, _vocab_size(width))
    model = _model(text, width, layers=1, head=False).eval()
    dataset = StandardDataset(text, MAX_LENGTH + 1)
    batches, steps = FEEDS[way](dataset, batch_size, device(), compute_dtype(), 0)

    def forward(batch: Batch) -> None:
        model(batch.inputs, **batch.options)

    area: list[int] = []

    def measured(epoch: int) -> Iterator[Batch]:
        for batch in batches(epoch, 0):
            area.append(batch.inputs.numel())
            yield batch

    with torch.inference_mode():
        each((batch for batch, _ in zip(measured(1), range(30), strict=False)), forward)  # warm up
        area.clear()
        synchronize()
        began = time.perf_counter()
        took = each(measured(0), forward)
        epoch_s = time.perf_counter() - began
    real = int((dataset.lengths - 1).sum())  # the last token of a sample has nothing to predict
    given = real + (len(dataset) if way == "packed" else 0)  # only packs keep it
    return {name: float(np.percentile(took, share)) for name, share in SHARES.items()} | {
        "mean_ms": float(np.mean(took)),
        "n": len(took),
        "batches": steps(0),
        "padding_share": 1 - given / sum(area),
        "device_s": sum(took) / 1e3,
        "epoch_s": epoch_s,
        "real_tokens_per_s": real / epoch_s,
        "attention": packed_way(device(), compute_dtype()) if way == "packed" else "causal",
    }


@experiment(
    small=[{"data": data, "size": "small", "epochs": 1, "seed": 0} for data in DATA],
    full=[{"data": data, "size": "full", "epochs": 3, "seed": seed} for data in DATA for seed in range(3)],
)
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


@experiment(
    small=[{"tokens": 256, "heads": 2, "head_dim": 16}],
    full=[{"tokens": tokens, "heads": 8, "head_dim": 128} for tokens in (2048, 8192, 32768)],
)
def attention(tokens: int, heads: int, head_dim: int) -> list[Row]:
    """Attention within documents by each way, forward and backward, and what is made once a batch, apart.

    The documents are samples of WikiText's lengths, packed. Beside them attention that is causal over the whole
    sequence, and so leaks from one document to the next: what packing without a mask costs.
    """
    dtype = compute_dtype()
    layout = PackedLayout(packed_offsets(tokens))
    q, k, v = (torch.randn(1, heads, tokens, head_dim, device=device(), dtype=dtype) for _ in range(3))
    grad = torch.randn_like(q)
    inputs = [part.requires_grad_() for part in (q, k, v)]
    rows, built = {}, {}
    for way, obstacle in ways(device(), dtype).items():
        rows[way] = {"way": way} | ({STATUS: f"not here: {obstacle}"} if obstacle else {})
        if not obstacle:
            built[way] = packed_attention(layout, way, device())

    def whole(attend: Callable[..., Tensor]) -> list[Tensor]:
        out = attend(q, k, v)
        return [out, *torch.autograd.grad(out, inputs, grad)]

    timed = compare({way: partial(whole, attend) for way, attend in built.items()})
    everything = dict(built) | {"causal, leaking": causal_attention}
    rows["causal, leaking"] = {"way": "causal, leaking"}
    for way, attend in everything.items():
        apart = phases(partial(_phases, attend, q, k, v, grad))
        row = {f"{name}_ms": found.median_ms for name, found in apart.items()}
        row |= {"peak_gib": peak_memory(partial(whole, attend)).added_bytes / GIB, "n": apart["forward"].n}
        if way in built:
            row |= timed.timing(way).row() | {"ratio_to_dense": timed.ratio(way, "dense")[0]}
            row["build_ms"] = Timing.of(each(range(20), lambda _, way=way: _build(layout, way))).median_ms
        rows[way] |= row
    return list(rows.values())


def _build(layout: PackedLayout, way: str) -> None:
    packed_attention(PackedLayout(layout.offsets), way, device())


def _phases(attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Iterator[str]:
    out = attend(q, k, v)
    yield "forward"
    torch.autograd.grad(out, (q, k, v), grad)
    yield "backward"


def packed_offsets(tokens: int) -> np.ndarray:
    """Where documents of WikiText's lengths begin that fill `tokens`: the fullest of some packs, and padding."""
    lengths = np.minimum(draw_lengths(20 * max(tokens // 64, 8), seed=0), min(MAX_LENGTH, tokens))
    packs = pack(lengths, tokens, "best-fit")
    chosen = np.random.default_rng(0).permutation(lengths[packs[int(packs.loads.argmax())]])
    offsets = np.concatenate([[0], np.cumsum(chosen)])
    return offsets if offsets[-1] == tokens else np.append(offsets, tokens)


NO_PADDING = "equally long, no padding"
PADDED, BALANCED = "BIG BRAIN", "k = 10"


@experiment(
    small=[{"width": 32, "layers": 1, "batch_size": 4, "rounds": 20}],
    full=[{"width": 1024, "layers": 8, "batch_size": size, "rounds": 60} for size in (64, 256)],
)
def throughput(width: int, layers: int, batch_size: int, rounds: int) -> list[Row]:
    """Real tokens a second of training steps, forward, backward and AdamW, from one interleaved run.

    The limit is a batch of samples all as long as the mean one: the same model with nothing to pad. The others take
    batches of WikiText's lengths; each step of theirs is another batch, so the rate is over all of them. Batches, and
    the masks or tables that attention needs, are made before: `attention` has what those cost.
    """
    dtype = compute_dtype()
    text = _text(24 * batch_size, _vocab_size(width))
    dataset = StandardDataset(text, MAX_LENGTH + 1)
    model = _model(text, width, layers, head=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    criterion = LMCrossEntropyLoss(text.vocab.pad_id)

    def train_step(batch: Batch) -> None:
        loss = criterion(model(batch.inputs, **batch.options), batch.targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    feeds = {PADDED: random_batches, BALANCED: partial(balanced_batches, k=10)}
    held = {name: _some(feed(dataset, batch_size, device(), dtype, 0)[0]) for name, feed in feeds.items()}
    held = {NO_PADDING: [_full_batch(text, batch_size, round(float(dataset.lengths.mean())))]} | held
    for way in WAYS:
        if not ways(device(), dtype)[way]:
            feed, _ = packed_batches(dataset, batch_size, device(), dtype, 0, way=way)
            held[f"packed, {way}"] = _some(feed)
    turns = {name: _Turn(batches, train_step, _real_tokens(batches)) for name, batches in held.items()}
    timed = compare(turns, check=False, rounds=rounds, warmup=20)
    rates = {name: turn.real * 1e3 / float(np.mean(timed.samples_ms[name])) for name, turn in turns.items()}
    return [
        {"way": name}
        | timed.timing(name).row()
        | {"real_tokens_per_s": rates[name], "ratio_to_no_padding": rates[name] / rates[NO_PADDING]}
        for name in turns
    ]


class _Turn:
    """A step on the next of some batches, round and round; `real` is their mean number of real tokens."""

    def __init__(self, batches: list, step: Callable, real: float) -> None:
        self.batches, self.step, self.real, self.number = batches, step, real, 0

    def __call__(self) -> None:
        self.step(self.batches[self.number % len(self.batches)])
        self.number += 1


def _real_tokens(batches: list[Batch]) -> float:
    return float(np.mean([int((batch.targets != 0).sum()) for batch in batches]))


def _some(batches: Callable[[int, int], Iterator[Batch]], number: int = 20) -> list[Batch]:
    return [batch for batch, _ in zip(batches(0, 0), range(number), strict=False)]


def _full_batch(text: SyntheticText, batch_size: int, length: int) -> Batch:
    tokens = torch.from_numpy(text.ids[: batch_size * (length + 1)].astype(np.int64)).view(batch_size, -1)
    tokens = tokens.to(device())
    return Batch(tokens[:, :-1], tokens[:, 1:], {"attend": causal_attention})


COLLATOR, PACKED = "flattening collator", "packs of one length"


@experiment(
    small=[{"width": 32, "layers": 1, "batch_size": 4, "rounds": 20}],
    full=[{"width": 1024, "layers": 8, "batch_size": size, "rounds": 60} for size in (64, 256)],
)
def collator(width: int, layers: int, batch_size: int, rounds: int) -> list[Row]:
    """Training steps of transformers' Llama, fed by its padding-free collator and by packs, in one interleaved run.

    The same model, attention kernel and optimizer, each eager and compiled: the collator's batches all have another
    length, so theirs for any, and packs have one. Batches are made before.
    """
    text = _text(24 * batch_size, _vocab_size(width))
    dataset = StandardDataset(text, MAX_LENGTH)
    try:
        model = peer.llama(len(text.vocab), width, layers, heads=8).to(device=device(), dtype=compute_dtype())
        joined = [inputs for inputs, _ in zip(peer.flattened(dataset, batch_size, 0), range(20), strict=False)]
    except ImportError:
        return [{"way": way, STATUS: f"{NOT_INSTALLED}transformers"} for way in (COLLATOR, PACKED)]
    capacity = max(round(batch_size * float(dataset.lengths.mean())), MAX_LENGTH)
    sequences = SequencedDataset(dataset, None, capacity, strategy="best-fit", fixed=True)
    packs = [peer.as_inputs(packed, MAX_LENGTH) for packed, _ in zip(sequences, range(20), strict=False)]
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
    timed = compare(turns, check=False, rounds=rounds, warmup=20)
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
