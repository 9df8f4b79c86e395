"""How long a small language model trains until it predicts held-out text well: by a beginner's loop, and by all pieces.

Both sides train one Llama on bytes, from the same weights, and one function judges them on the same held-out articles.

    beginner     shuffled lines padded to 640 bytes, fp32, all scores of attention, AdamW in a loop, `loss.item()`
    everything   chapter 5's trainer on full rows of a stream that lies on the device: mixed precision, one kernel for
                 attention, one for the optimizer, a CUDA graph on a GPU, a learning rate that rises; nothing waits

The clock runs from building the model to the first evaluation at or below the target, and stands still in evaluations.
Each side's learning rate is the best of three, by fast code and on a seed of its own; `compiled` is by torch.compile.
"""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count
from types import SimpleNamespace

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from ...batching import BaseDataset, collate_fn
from ...book.table import Worth, table
from ...book.values import Number, derived, lacking, mean_of, over_runs
from ...kernels.chunked_loss import IGNORED
from ...lab import Row, device, in_fresh_process
from ...lab.ceilings import rate_beside
from ...lab.memory import PeakAbove
from ...lab.timing import synchronize
from ...models import Llama
from ...rush import Setup, build_trainer
from ...rush.optimizers import FOR_LOOP, build_optimizer
from ...rush.setup import AUTOCAST
from ...rush.trainer import build_model
from ...text.articles import Articles
from ...training.stages import environment, nothing_compiled
from ...training.trainer import WARM_UP, Trainer

BEGINNER, EVERYTHING = SIDES = "beginner", "everything"
CHOICE, TRAINING, COMPILED = "choice", "training", "compiled"  # a row's part
SEEDS, CHOOSING, RISING = range(3), 3, 20  # the last: steps in which the fast side's learning rate rises
PADDING, LONGEST, EVALUATED = 0, 640, 16  # a byte that no text has; bytes of a beginner's line; samples at once

Batch = tuple[Tensor, Tensor | None, int]  # tokens (B, T + 1), targets (B, T) unless they follow, real bytes


@dataclass(frozen=True, kw_only=True)
class Size:
    """`target` in nats a byte was fixed before the fast side ran; `seconds` end a training that doesn't reach it."""

    model: str
    target: float
    seconds: float
    rates: tuple[float, float, float]  # learning rates that each side chooses from
    choosing: int  # most steps of a training that chooses
    lines: int  # of the beginner's batch
    rows: int  # of the fast side's
    length: int  # of those rows, in bytes
    every: int  # steps between evaluations
    held_out: int  # bytes that are evaluated, at most


SIZES = {
    "small": Size(
        model="tiny", target=3.3, seconds=20, rates=(2e-3, 4e-3, 8e-3), choosing=8,
        lines=4, rows=8, length=64, every=4, held_out=2_000,
    ),
    "cpu": Size(
        model="bytes-1m", target=2.1, seconds=330, rates=(1e-3, 2e-3, 4e-3), choosing=240,
        lines=4, rows=4, length=LONGEST, every=20, held_out=32_000,
    ),
    "gpu": Size(
        model="bytes-5m", target=1.8, seconds=60, rates=(1e-3, 2e-3, 4e-3), choosing=500,
        lines=16, rows=16, length=LONGEST, every=20, held_out=200_000,
    ),
    "full": Size(
        model="bytes-27m", target=1.8, seconds=60, rates=(5e-4, 1e-3, 2e-3), choosing=500,
        lines=16, rows=16, length=LONGEST, every=20, held_out=200_000,
    ),
}  # fmt: skip
# Compilation isn't part of it: it takes longer than these trainings, as the rows `compiled` show.
FAST = partial(Setup, precision="amp-bf16", norm="torch", fused=True, optimizer="fused")


@table(
    small=[{"size": "small"}],
    cpu=[{"size": "cpu"}],
    gpu=[{"size": "gpu"}],
    big_gpu=[{"size": "full"}],
    same_work=False,
    columns="side part seed learning_rate target reached held_out_loss training_s start_s step_ms? steps real_bytes "
    "bytes_per_s peak_gib product_tflops million_parameters source curve",
    worth=Worth(100, "time to the same loss, by a beginner and by all", cpu=1000, gpu=520, big_gpu=520, on_gpu=3),
)
def time_to_loss(size: str) -> list[Row]:
    """Trainings until the held-out loss is at most the target: of each side three that choose the learning rate, then
    one for each of three seeds, where the sides take turns, and a fast one that is compiled. Each in its own process.

    `training_s` holds everything but evaluation; `curve` has pairs of seconds and held-out loss. `start_s` is building
    the model, and what the first steps take more than later ones: compiling, and the capture of a graph. A training
    that isn't `reached` has spent its seconds. `product_tflops` is the rate of a large product after the training.
    """
    apart = partial(in_fresh_process, train, environment=environment())
    run, sizes = train if size == "small" else apart, SIZES[size]
    tried = {side: [run(side, CHOICE, CHOOSING, rate, sizes) for rate in sizes.rates] for side in SIDES}
    rates = {side: chosen_rate(tried[side]) for side in SIDES}
    turns = [(side, seed) for seed in SEEDS for side in (SIDES if seed % 2 else reversed(SIDES))]
    rows = [*chain(*tried.values()), *(run(side, TRAINING, seed, rates[side], sizes) for side, seed in turns)]
    if size != "small":
        rows.append(run(EVERYTHING, COMPILED, CHOOSING, rates[EVERYTHING], sizes))
    return rows


def chosen_rate(rows: list[Row]) -> float:
    """The learning rate that reached the target in the fewest steps; else the one with the least loss."""
    best = min(rows, key=lambda row: (not row["reached"], row["steps"] if row["reached"] else row["held_out_loss"]))
    return best["learning_rate"]


def train(side: str, part: str, seed: int, rate: float, size: Size) -> Row:
    """One training, evaluated every `size.every` steps, until it reaches the target or its seconds are over."""
    text = Articles.local()
    judge = Judge(text.held_out, size)
    with PeakAbove() as peak, nothing_compiled() if part == COMPILED else contextlib.nullcontext():
        synchronize()
        began, spent, first_s, real, curve = time.perf_counter(), 0.0, 0.0, 0, []
        model, steps = begin(side, part, seed, rate, size, text)
        for number in count(1):
            real += next(steps)
            if number == WARM_UP + 1:  # compiled, captured
                synchronize()
                first_s = time.perf_counter() - began
            if number % size.every:
                continue
            synchronize()
            spent += time.perf_counter() - began
            curve.append((spent, judge(model)))
            out_of_steps = part == CHOICE and number >= size.choosing
            if curve[-1][1] <= size.target or spent >= size.seconds or out_of_steps:
                break
            began = time.perf_counter()
    step_s = (spent - first_s) / max(number - WARM_UP - 1, 1)
    row: Row = {
        "side": side,
        "part": part,
        "seed": seed,
        "learning_rate": rate,
        "target": size.target,
        "source": text.source,
    }
    return row | {
        "reached": curve[-1][1] <= size.target,
        "held_out_loss": curve[-1][1],
        "training_s": spent,
        "start_s": first_s - (WARM_UP + 1) * step_s,
        "step_ms": step_s * 1e3,
        "steps": number,
        "real_bytes": real,
        "bytes_per_s": real / spent,
        "peak_gib": peak.gib,
        "product_tflops": rate_beside(),
        "million_parameters": sum(weight.numel() for weight in model.parameters()) / 1e6,
        "curve": ";".join(f"{seconds:.4g}:{loss:.4f}" for seconds, loss in curve),
    }


def begin(side: str, part: str, seed: int, rate: float, size: Size, text: Articles) -> tuple[Llama, Iterator[int]]:
    """The model, and an iterator each of whose elements is a training step; it is the real bytes that the step saw."""
    if side == BEGINNER and part == TRAINING:
        model = build_model(Setup(model=size.model, sequence=LONGEST, seed=seed), device())
        return model, beginners_steps(model, padded_lines(text, size, seed), rate)
    trainer = build_trainer(fast_setup(size, rate, seed, compiled=part == COMPILED))
    if side == BEGINNER:
        return trainer.model, fast_steps(trainer, without_padding(padded_lines(text, size, seed)), rising=1)
    return trainer.model, fast_steps(trainer, full_rows(text, size, seed), RISING)


def beginners_steps(model: Llama, loader: Iterator[Tensor], rate: float) -> Iterator[int]:
    """Training steps as a beginner writes them."""
    optimizer = build_optimizer(FOR_LOOP, model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.1)
    losses = []
    for batch in loader:
        real = int((batch[:, 1:] != PADDING).sum())
        batch = batch.to(device())
        inputs, targets = batch[:, :-1], batch[:, 1:]  # (B, T)
        logits = model(inputs)  # (B, T, V)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=PADDING)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        yield real


def fast_steps(trainer: Trainer, batches: Iterator[Batch], rising: int) -> Iterator[int]:
    """The trainer's steps, with a learning rate that rises in the first ones. It is a tensor, for a captured step."""
    highest = trainer.optimizer.param_groups[0]["lr"]
    rate = torch.tensor(highest, device=device())
    for group in trainer.optimizer.param_groups:
        group["lr"] = rate
    for number, (tokens, targets, real) in enumerate(batches, start=1):
        if number <= rising:
            rate.fill_(highest * number / rising)
        trainer.step(tokens, targets)
        yield real


def fast_setup(size: Size, rate: float, seed: int, compiled: bool = False) -> Setup:
    """The fast side's setup, or the nearest that this machine can run."""
    setup = FAST(model=size.model, cuda_graph=True, learning_rate=rate, seed=seed)
    attention = "flash" if device().type == "cuda" else "blocked"
    return replace(setup, attention=attention, compile="regional" if compiled else "none").possible(device())


# Batches


def padded_lines(text: Articles, size: Size, seed: int) -> Iterator[Tensor]:
    """The beginner's batches (B, 641): lines in random order, cut or padded."""
    lines, generator = BaseDataset(text.trained, LONGEST + 1, pad_id=PADDING), torch.Generator().manual_seed(seed)
    loader = DataLoader(lines, size.lines, shuffle=True, drop_last=True, generator=generator)
    while True:
        yield from loader


def without_padding(loader: Iterator[Tensor]) -> Iterator[Batch]:
    """The same batches on the device, with targets that leave the padding out."""
    for tokens in loader:
        targets = tokens[:, 1:].masked_fill(tokens[:, 1:] == PADDING, IGNORED)
        yield tokens.to(device()), targets.to(device()), int((targets != IGNORED).sum())


def full_rows(text: Articles, size: Size, seed: int) -> Iterator[Batch]:
    """Batches (B, T + 1) from random places of one stream of all lines, which lies on the device."""
    stream = torch.from_numpy(np.concatenate([line[1:] for line in text.trained])).to(device(), torch.int64)
    generator = torch.Generator(device()).manual_seed(seed)
    within = torch.arange(size.length + 1, device=device())
    while True:
        starts = torch.randint(len(stream) - size.length, (size.rows, 1), generator=generator, device=device())
        yield stream[starts + within], None, size.rows * size.length


class Judge:
    """The mean loss of held-out bytes in nats, each from those before it in its 640 bytes of a line, for both sides."""

    def __init__(self, lines: list[np.ndarray], size: Size):
        setup = replace(fast_setup(size, 1e-3, 0), fused=False, cuda_graph=False)
        self.model, self.dtype = build_model(setup, device()), AUTOCAST.get(setup.precision)
        cut = [line[begin : begin + LONGEST + 1] for line in lines for begin in range(0, len(line) - 1, LONGEST)]
        within = np.cumsum([len(piece) - 1 for piece in cut]) <= size.held_out
        pieces = sorted((piece for piece, fits in zip(cut, within, strict=True) if fits), key=len)
        self.bytes = sum(len(piece) - 1 for piece in pieces)
        groups = [pieces[begin : begin + EVALUATED] for begin in range(0, len(pieces), EVALUATED)]
        self.batches = [collate_fn(group, pad_id=PADDING).to(device()) for group in groups]  # (B, T + 1) each

    @torch.no_grad()
    def __call__(self, trained: Llama) -> float:
        weights, total = trained.weights(), torch.zeros((), device=device())
        for name, weight in self.model.weights().items():
            weight.copy_(weights[name])
        for tokens in self.batches:
            with torch.autocast(tokens.device.type, self.dtype, enabled=self.dtype is not None):
                logits = self.model(tokens[:, :-1])  # (B, T, V)
            targets = tokens[:, 1:].flatten()
            total += F.cross_entropy(logits.float().flatten(0, 1), targets, ignore_index=PADDING, reduction="sum")
        return float(total) / self.bytes


# Numbers

SAME_MACHINE = 0.1  # the rates of a large product beside both sides differ by less
COLUMNS = {
    "training_s": "time to the loss, s",
    "steps": "steps",
    "step_ms": "step, ms",
    "bytes_per_s": "real bytes/s",
    "held_out_loss": "loss, nats a byte",
    "learning_rate": "learning rate",
    "peak_gib": "peak, GiB",
}


@time_to_loss.numbers()
def _(rows: pd.DataFrame) -> SimpleNamespace:
    """`ratio` is of the sides' times, seed by seed: a lower bound where not all trainings reached the target.

    Of the fast side over the beginner's, `fuller` is the real bytes of a step, `longer` those of all steps and
    `machine` the rate of a product after each training; `shorter` is the beginner's time of a step over the fast one.
    """
    rows = rows.assign(reached=rows["reached"].astype(str) == "True")  # a bool, or its text in a record
    trainings = rows[rows["part"] == TRAINING]
    slow, fast = (trainings[trainings["side"] == side].set_index("seed") for side in SIDES)
    ratio = over_runs(slow["training_s"], fast["training_s"])
    if not fast["reached"].all():
        ratio = lacking("a training of the fast side that reached the target")
    elif not slow["reached"].all():
        ratio = derived(ratio.value, "at least: the beginner was stopped before the target")
    compiled = rows[rows["part"] == COMPILED]
    eager = rows[(rows["part"] == CHOICE) & (rows["side"] == EVERYTHING)]  # of the compiled training's seed
    eager_s = eager.loc[eager["learning_rate"].isin(compiled["learning_rate"]), "start_s"].mean()
    sides = [side.get("product_tflops", pd.Series(dtype=float)).astype(float) for side in (slow, fast)]
    machine = sides[1].mean() / sides[0].mean()
    ratio = replace(ratio, noisy=abs(machine - 1) > SAME_MACHINE)
    read = [(side["bytes_per_s"] * side["training_s"]).mean() for side in (slow, fast)]
    return SimpleNamespace(
        target=Number(rows["target"].iloc[0], "nats a byte"),
        ratio=ratio,
        million_parameters=derived(
            rows.get("million_parameters", pd.Series(dtype=float)).mean(), "counted", "million", 2
        ),
        fuller=derived(read[1] / read[0] * slow["steps"].mean() / fast["steps"].mean(), "bytes counted"),
        shorter=derived(slow["step_ms"].mean() / fast["step_ms"].mean(), "means of three seeds"),
        longer=derived(read[1] / read[0], "bytes counted"),
        beginner=mean_of(slow["training_s"], "s", BEGINNER, decimals=1),
        everything=mean_of(fast["training_s"], "s", EVERYTHING, decimals=1),
        compile=Number(compiled["start_s"].mean() - eager_s, "s", missing="the compiled training", decimals=1),
        machine=derived(machine, "a large product beside each training"),
        table=_table(rows),
        curves=curves_of(trainings),
    )


def _table(rows: pd.DataFrame) -> pd.DataFrame:
    """A line for each side, of means over its seeds, and one for compiled training."""
    groups = rows[rows["part"] != CHOICE].sort_values("side", kind="stable").groupby(["side", "part"], sort=False)
    means = groups[list(COLUMNS)].mean().rename(columns=COLUMNS)
    means["reached"] = groups["reached"].agg(lambda reached: f"{sum(reached)} of {len(reached)}")
    names = [side if part == TRAINING else f"{side}, {part}" for side, part in means.index]
    return means.assign(side=names)[["side", "reached", *COLUMNS.values()]].reset_index(drop=True)


def curves_of(rows: pd.DataFrame) -> pd.DataFrame:
    """The curves as points: side, seed, seconds, loss."""
    points = [
        (side, seed, *map(float, point.split(":")))
        for side, seed, curve in rows[["side", "seed", "curve"]].itertuples(index=False)
        for point in curve.split(";")
    ]
    return pd.DataFrame(points, columns=["side", "seed", "seconds", "loss"])
