"""What chapter 5 measures: the ladder on one GPU, its parts one by one, and what many GPUs would need."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from helpers.lab import Comparison, compare, device, each, experiment, peak_memory
from helpers.lab.ceilings import copy
from helpers.lab.memory import GIB
from helpers.lab.records import STATUS, Row
from helpers.models.llama import preset

from . import adam as adam_ways
from . import norms as norm_ways
from . import peers as peer_ways
from .distributed import Job
from .distributed import measure as measure_ranks
from .flops import PEAKS, flops_per_token
from .ladder import LADDER, climb
from .run import run
from .setup import Setup
from .simulation.analytic import rank_peak
from .simulation.links import CLUSTERS
from .simulation.memory import rank_memory
from .simulation.scaling import predict
from .training import Trainer

TINY, ONE_B, EIGHT_B = "tiny", "llama-3.2-1b", "llama-3.1-8b"
BEST = "batch 8"  # the rung that the sweeps and the peers stand beside
SMALL = {"model": TINY, "sequence": 64}
FULL = {"model": ONE_B, "sequence": 2048}
FEW = {"steps": 4, "warmup": 1, "loss_steps": 4}  # of a small preset


def _run(setup: Setup) -> Row:
    """A setup's row, or why it can't run here."""
    if reason := setup.obstacle(device()):
        return {STATUS: f"not here: {reason}"}
    return run(setup, **(FEW if setup.model == TINY else {}))


def _rung(name: str, model: str, sequence: int) -> Setup:
    """A rung of the ladder; of the tiny model the nearest that runs here, not compiled, which takes longest."""
    setup = climb(Setup(model=model, sequence=sequence))[name]
    return replace(setup.possible(device()), compile="none") if model == TINY else setup


@experiment(
    small=[SMALL | {"step": step} for step in ("no optimisation", "fused AdamW", "FlashAttention", "batch 2")],
    full=[FULL | {"step": step} for step in LADDER],
)
def ladder(model: str, sequence: int, step: str) -> Row:
    """Each rung of the ladder: speed, memory, and the loss after as many steps on the same tokens."""
    return _run(climb(Setup(model=model, sequence=sequence))[step])


@experiment(
    small=[SMALL | {"batch": size} for size in (1, 2)],
    full=[FULL | {"batch": size} for size in (1, 2, 4, 8, 16, 32)],
)
def batch(model: str, sequence: int, batch: int) -> Row:
    """The best setup at each batch size."""
    return _run(replace(_rung("CUDA graph", model, sequence), batch=batch))


CHECKPOINTING = ("none", "selective", "full", "memory budget")


@experiment(
    small=[SMALL | {"checkpointing": way} for way in ("none", "full")],
    full=[
        {"model": ONE_B, "sequence": 2**power, "checkpointing": way} for way in CHECKPOINTING for power in range(11, 18)
    ],
)
def checkpointing(model: str, sequence: int, checkpointing: str) -> Row:
    """One sequence, longer and longer: which fits with what is kept for backward, and how fast it is."""
    return _run(replace(_rung("chunked cross-entropy", model, sequence), checkpointing=checkpointing))


@experiment(
    small=[SMALL | {"way": "ours"}],
    full=[FULL | {"way": way} for way in ("ours", *peer_ways.WAYS)],
)
def peers(model: str, sequence: int, way: str) -> Row:
    """The same model of the same weights as transformers trains it, at the same batch."""
    setup = _rung(BEST, model, sequence)
    if way == "ours":
        return _run(setup)
    if reason := peer_ways.obstacle(way, device()):
        return {STATUS: reason}
    return peer_ways.run(way, setup)


@experiment(
    small=[SMALL | {"workers": 0, "pinned": False}],
    full=[FULL | {"workers": workers, "pinned": pinned} for workers in (0, 2, 8) for pinned in (False, True)],
)
def loading(model: str, sequence: int, workers: int, pinned: bool) -> Row:
    """Training steps on tokens from a `DataLoader`, and how long the host waits for each batch."""
    setup = _rung(BEST, model, sequence)
    if reason := setup.obstacle(device()):
        return {STATUS: f"not here: {reason}"}
    trainer, steps = Trainer(setup), 8 if model == TINY else 40
    rows = TensorDataset(torch.randint(preset(model)["vocab_size"], (steps * setup.batch, sequence + 1)))
    loader = DataLoader(rows, setup.batch, num_workers=workers, pin_memory=pinned and device().type == "cuda")
    waited: list[float] = []
    batches = iter(loader)

    def fed() -> Iterator[Tensor]:
        while True:
            began = time.perf_counter()
            batch = next(batches, None)
            if batch is None:
                return
            there = batch[0].to(device(), non_blocking=pinned)
            waited.append((time.perf_counter() - began) * 1e3)
            yield there

    began = time.perf_counter()
    took = each(fed(), trainer.step)
    epoch_s = time.perf_counter() - began
    settled = len(took) // 4
    p20, median, p80 = np.percentile(took[settled:], [20, 50, 80])
    spread = {"step_ms": median, "p20_ms": p20, "p80_ms": p80, "n": len(took) - settled}
    return spread | {"wait_ms": float(np.median(waited[settled:])), "epoch_s": epoch_s}


@experiment(
    small=[{"kind": kind, "rows": 64, "width": 64, "dtype": "float32"} for kind in norm_ways.KINDS],
    full=[
        {"kind": kind, "rows": rows, "width": width, "dtype": "bfloat16"}
        for kind in norm_ways.KINDS
        for rows, width in ((16384, 2048), (16384, 4096), (65536, 1024))
    ],
)
def norms(kind: str, rows: int, width: int, dtype: str) -> list[Row]:
    """Forward and backward of a norm by every way, in turn in one process; the share is of the copy's bandwidth."""
    factory = {"device": device(), "dtype": getattr(torch, dtype)}
    x = torch.randn(rows, width, **factory, requires_grad=True)
    weight = torch.randn(width, **factory, requires_grad=True)
    bias = torch.randn(width, **factory, requires_grad=True) if kind == "layer" else None
    gradient = torch.randn_like(x)
    inputs = [tensor for tensor in (x, weight, bias) if tensor is not None]

    def both(compute: Callable[..., Tensor]) -> list[Tensor]:
        out = compute(x, weight, bias)
        return [out.detach(), *torch.autograd.grad(out, inputs, gradient)]

    found = {way: norm_ways.obstacle(way, device()) for way in norm_ways.WAYS}
    steps = {way: partial(both, norm_ways.norm(way, kind)) for way, reason in found.items() if not reason}
    timed = compare({norm_ways.TORCH: steps.pop(norm_ways.TORCH)} | steps)
    moved = sum(norm_ways.least_bytes(x.numel(), x.element_size()))

    def peak(way: str) -> Row:
        return {"peak_gib": peak_memory(partial(both, norm_ways.norm(way, kind))).added_bytes / GIB}

    return _kernel_rows(found, timed, ("ratio_to_torch", norm_ways.TORCH), moved, peak)


@experiment(
    small=[{"million_parameters": 1}],
    full=[{"million_parameters": size} for size in (10, 100, 1000)],
)
def adam(million_parameters: int) -> list[Row]:
    """A step of AdamW by every way, in turn in one process, on 64 parameters of one size."""
    elements = million_parameters * 10**6 // 64
    params = [torch.randn(elements, device=device()).requires_grad_() for _ in range(64)]
    for param in params:
        param.grad = torch.randn_like(param)
    found = {way: adam_ways.obstacle(way, device()) for way in adam_ways.WAYS}
    timed = compare(adam_ways.steps(params, [way for way, reason in found.items() if not reason]), check=False)
    moved = adam_ways.LEAST_BYTES * 64 * elements
    return _kernel_rows(found, timed, ("ratio_to_fused", adam_ways.FUSED), moved)


def _kernel_rows(
    found: dict[str, str],
    timed: Comparison,
    against: tuple[str, str],
    moved: int,
    more: Callable[[str], Row] = lambda way: {},
) -> list[Row]:
    """A row for each way, or what stands in its way: its time, its ratio to another's, its share of a copy's rate."""
    (column, base), gb_per_s = against, _copy_rate()
    rows = []
    for way, reason in found.items():
        if reason:
            rows.append({"way": way, STATUS: reason if reason.startswith("not installed") else f"not here: {reason}"})
            continue
        timing = timed.timing(way)
        ratios = {column: timed.ratio(way, base)[0], "share_of_copy": moved / timing.median_ms / 1e6 / gb_per_s}
        rows.append({"way": way} | timing.row() | ratios | more(way))
    return rows


def _copy_rate() -> float:
    return copy(4096 if device().type == "cuda" else 64)[1]


# The lecture's two tables: what each row changes from the one before.
LECTURE = {
    "fp32": (None, norm_ways.TORCH, adam_ways.FOR_LOOP),
    "AMP": (torch.bfloat16, norm_ways.TORCH, adam_ways.FOR_LOOP),
    "AMP + fused norm": (torch.bfloat16, norm_ways.OURS, adam_ways.FOR_LOOP),
    "AMP + fused Adam": (torch.bfloat16, norm_ways.TORCH, adam_ways.FUSED),
    "AMP + both": (torch.bfloat16, norm_ways.OURS, adam_ways.FUSED),
}


@experiment(
    small=[{"batch": 4, "width": 32, "layers": 1}],
    full=[{"batch": size, "width": 256, "layers": 4} for size in (512, 1024)],
)
def lecture(batch: int, width: int, layers: int) -> list[Row]:
    """Training steps of `nn.TransformerDecoderLayer`s in fp32, with AMP, with their LayerNorms and Adam replaced."""
    x = torch.randn(batch, 64, width, device=device())
    steps: dict[str, Callable[[], Tensor]] = {}
    rows = {}
    for name, (dtype, norm, optimizer) in LECTURE.items():
        reason = norm_ways.obstacle(norm, device()) or adam_ways.obstacle(optimizer, device())
        rows[name] = {"way": name} | ({STATUS: f"not here: {reason}"} if reason else {})
        if not reason:
            steps[name] = _decoder_step(x, layers, dtype, norm, optimizer)
    timed = compare(steps, check=False)
    for name, step in steps.items():
        rows[name] |= timed.timing(name).row() | {"ratio_to_fp32": timed.ratio(name, "fp32")[0]}
        rows[name]["peak_gib"] = peak_memory(step).added_bytes / GIB
    return list(rows.values())


def _decoder_step(x: Tensor, layers: int, dtype: torch.dtype | None, norm: str, optimizer: str) -> Callable[[], Tensor]:
    torch.manual_seed(0)
    width = x.shape[-1]
    blocks = [nn.TransformerDecoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True) for _ in range(layers)]
    model = nn.ModuleList(blocks).to(device())
    norm_ways.swap_norms(model, norm)
    adamw = adam_ways.adamw(optimizer, list(model.parameters()))

    def step() -> Tensor:
        with torch.autocast(device().type, dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            hidden = x
            for block in model:
                hidden = block(hidden, x)
        loss = hidden.float().square().mean()
        loss.backward()
        adamw.step()
        adamw.zero_grad()
        return loss.detach()

    return step


STRATEGIES = ("ddp", "zero2", "zero3", "tp")


@experiment(
    small=[{"ranks": 2}],
    full=[{"ranks": ranks} for ranks in (1, 2, 4)],
    host=True,
)
def distributed(ranks: int) -> list[Row]:
    """The tiny model on real CPU processes, by each strategy: what a rank holds, and the loss after 20 steps.

    Processes on one CPU share its cores, so the time says nothing of many GPUs; the losses and the bytes do.
    """
    rows, jobs = [], []
    for strategy in ("single",) if ranks == 1 else STRATEGIES:
        job = Job(strategy=strategy, steps=20, timeout_s=300)
        try:
            job.check(ranks)
            jobs.append(job)
        except ValueError as error:
            rows.append({"strategy": strategy, STATUS: f"not here: {error}"})
    kept = ("strategy", "step_ms", "parameter_bytes", "gradient_bytes", "optimizer_bytes")
    measured = [
        {name: row[name] for name in kept} | {"last_loss": row["losses"][-1]} for row in measure_ranks(jobs, ranks)
    ]
    return measured + rows


@experiment(
    small=[{"model": TINY, "strategy": "zero3", "ranks": 2}],
    full=[
        {"model": EIGHT_B, "strategy": strategy, "ranks": ranks}
        for strategy in ("ddp", "zero2", "zero3")
        for ranks in (2, 8, 64, 512)
    ],
    host=True,
)
def memory_plan(model: str, strategy: str, ranks: int) -> Row:
    """SIMULATED: what one rank of so many would hold, one sequence each; the other ranks do not exist."""
    sequence = 64 if model == TINY else 4096
    job = Job(
        strategy=strategy, model=model, batch=ranks, sequence=sequence, precision="amp-bf16", checkpointing="full"
    )
    found = rank_memory(job, ranks)
    derived = rank_peak(job, ranks).bytes / GIB
    kept = {name: value for name, value in found.items() if name not in ("strategy", "ranks", "model", "peak_bytes")}
    return kept | {"derived_gib": derived, "derived_ratio": derived / found["peak_gib"]}


@experiment(
    small=[{"model": TINY, "strategy": "zero3"}],
    full=[{"model": ONE_B, "strategy": strategy} for strategy in ("ddp", "zero2", "zero3")],
)
def memory_alone(model: str, strategy: str) -> Row:
    """One rank, which a GPU can be: its memory as simulated without any, as derived, and as the allocator has it."""
    sequence = 64 if model == TINY else 2048
    job = Job(strategy=strategy, model=model, batch=1, sequence=sequence, precision="amp-bf16", checkpointing="full")
    counted, derived = rank_memory(job, 1, count=True)["peak_gib"], rank_peak(job, 1).bytes / GIB
    row = {"counted_gib": counted, "derived_gib": derived}
    if device().type != "cuda":
        return row | {STATUS: "needs CUDA"}
    measured = rank_memory(job, 1)["peak_gib"]
    return row | {"measured_gib": measured, "ratio": counted / measured}


ASSUMED_MFU = 0.5  # of the computation on its own, where there is no GPU to measure it on


@experiment(
    small=[{"model": TINY, "sequence": 64, "cluster": CLUSTERS[0].name}],
    full=[{"model": EIGHT_B, "sequence": 4096, "cluster": cluster.name} for cluster in CLUSTERS],
    host=True,
)
def scaling(model: str, sequence: int, cluster: str) -> list[Row]:
    """PREDICTED: the time of a step on many GPUs, one sequence each, from the bytes that they exchange.

    The time of the computation is that of half the peak of an H100 or H200: an assumption, as everything here is.
    """
    chosen = next(one for one in CLUSTERS if one.name == cluster)
    compute_ms = flops_per_token(model, sequence) * sequence / (ASSUMED_MFU * PEAKS["H200"]) * 1e3
    rows = []
    for strategy in ("ddp", "zero2", "zero3"):
        for ranks in (2, 4, 8, 16, 64, 256, 512):
            job = Job(
                strategy=strategy,
                model=model,
                precision="amp-bf16",
                checkpointing="full",
                batch=ranks,
                sequence=sequence,
            )
            rows.append(predict(job, ranks, chosen, compute_ms))
    return [{name: value for name, value in row.items() if name not in ("model", "cluster")} for row in rows]
