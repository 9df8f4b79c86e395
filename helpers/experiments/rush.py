"""Chapter 5's experiments: the ladder's parts one by one, the ladder on one GPU, and predictions for many GPUs.

Tables are measured in the order of this file, the cheap ones first: a step of the large model's ladder takes minutes,
mostly compilation.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from helpers.lab import Comparison, compare, device, experiment, half_dtype, in_fresh_process, peak_memory
from helpers.lab.ceilings import copy, large_copy
from helpers.lab.machine import missing_because
from helpers.lab.memory import GIB
from helpers.lab.records import STATUS, Row
from helpers.lab.timing import queue_ahead
from helpers.rush import CPU_LADDER, LADDER, Setup, fused_norms, optimizers, run, rung
from helpers.rush import peers as others
from helpers.rush.distributed import Job
from helpers.rush.distributed import measure as measure_ranks
from helpers.rush.measurement import ON_CPU_LOSS_STEPS, PEAKS, epoch, flops_per_token
from helpers.rush.simulation import CLUSTERS, predict, rank_memory, rank_peak
from helpers.rush.trainer import BEFORE_CAPTURE

TINY, SIXTY_M, ONE_B, EIGHT_B = "tiny", "llama-60m", "llama-3.2-1b", "llama-3.1-8b"
# Steps of the ladder by device type: of `peers` and `loading`, of `batch`, of `checkpointing`
BEST = {"cuda": "batch 8", "cpu": "SwiGLU level 2"}
BEFORE_BATCHES = {"cuda": "CUDA graph", "cpu": "SwiGLU level 2"}
BEFORE_LENGTHS = {"cuda": "chunked cross-entropy", "cpu": "chunked cross-entropy"}
SMALL = {"model": TINY, "sequence": 64}
MEDIUM = {"model": SIXTY_M, "sequence": 2048}
FULL = {"model": ONE_B, "sequence": 2048}
FEW = {"steps": 4, "warmup": 1, "loss_steps": 4}  # for the tiny preset
PLANNED = {"precision": "amp-bf16", "checkpointing": "full"}  # of many ranks
WARM = BEFORE_CAPTURE + 1  # `loss_steps` where only speed matters: enough to compile and to capture a graph


@experiment(
    small=[{"kind": kind, "rows": 64, "width": 64, "dtype": "float32"} for kind in fused_norms.KINDS],
    # in fp32: a CPU adds up the gradient of torch's weights in their own type, and bf16 loses a tenth of it
    cpu=[{"kind": kind, "rows": 2048, "width": 2048, "dtype": "float32"} for kind in fused_norms.KINDS],
    gpu=[
        {"kind": kind, "rows": rows, "width": width, "dtype": dtype}
        for kind in fused_norms.KINDS
        for rows, width in ((8192, 2048), (32768, 1024))
        for dtype in ("float16", "bfloat16")
    ],
    big_gpu=[
        {"kind": kind, "rows": rows, "width": width, "dtype": "bfloat16"}
        for kind in fused_norms.KINDS
        for rows, width in ((16384, 2048), (16384, 4096), (65536, 1024))
    ],
    version=2,
)
def norms(kind: str, rows: int, width: int, dtype: str) -> list[Row]:
    """Forward and backward of a norm in every variant, in turn in one process; shares are of the copy's bandwidth.

    The host is a millisecond ahead of the GPU, so that kernels are timed and not their launches, which take longer.
    """
    factory = {"device": device(), "dtype": getattr(torch, dtype)}
    x = torch.randn(rows, width, **factory, requires_grad=True)
    weight = torch.randn(width, **factory, requires_grad=True)
    bias = torch.randn(width, **factory, requires_grad=True) if kind == "layer" else None
    gradient = torch.randn_like(x)
    inputs = [tensor for tensor in (x, weight, bias) if tensor is not None]

    def both(compute: Callable[..., Tensor]) -> list[Tensor]:
        out = compute(x, weight, bias)
        return [out.detach(), *torch.autograd.grad(out, inputs, gradient)]

    missing = {variant: missing_because(*fused_norms.needs(variant)) for variant in fused_norms.VARIANTS}
    steps = {v: partial(both, fused_norms.norm(v, kind)) for v, reason in missing.items() if not reason}
    timed = compare({fused_norms.TORCH: steps[fused_norms.TORCH]} | steps, before=queue_ahead)
    moved = sum(fused_norms.least_bytes(x.numel(), x.element_size()))

    def peak(variant: str) -> Row:
        return {"peak_gib": peak_memory(steps[variant]).added_bytes / GIB}

    return _kernel_rows(missing, timed, fused_norms.TORCH, moved, peak)


@experiment(
    small=[{"million_parameters": 1}],
    cpu=[{"million_parameters": size} for size in (10, 100)],
    gpu=[{"million_parameters": size} for size in (10, 100)],
    big_gpu=[{"million_parameters": size} for size in (10, 100, 1000)],
    version=2,
)
def adam(million_parameters: int) -> list[Row]:
    """A step of AdamW in every variant, in turn in one process, on 64 parameters of one size.

    The host is a millisecond ahead of the GPU, as in training, where the backward pass is still running. A variant
    whose launches take longer, such as the loop over small parameters, is launch-bound: its time is the host's. The
    others' times are the device's.
    """
    elements = million_parameters * 10**6 // 64
    params = [torch.randn(elements, device=device()).requires_grad_() for _ in range(64)]
    for param in params:
        param.grad = torch.randn_like(param)
    missing = {v: missing_because(*optimizers.NEEDS.get(v, ())) for v in optimizers.VARIANTS}
    steps = {v: optimizers.build(v, params).step for v, reason in missing.items() if not reason}
    timed = compare(steps, check=False, before=queue_ahead)
    moved = optimizers.LEAST_BYTES * 64 * elements
    return _kernel_rows(missing, timed, optimizers.FUSED, moved)


def _kernel_rows(
    missing: dict[str, str],
    timed: Comparison,
    baseline: str,
    moved: int,
    more: Callable[[str], Row] = lambda _: {},
) -> list[Row]:
    """A row for each variant: its time, the ratio to the baseline's, and its bandwidth in moving `moved` bytes as a
    share of a copy's; or why it can't run here."""
    gb_per_s = copy(large_copy(on_cpu=512))[1]
    rows = []
    for variant, reason in missing.items():
        if reason:
            status = reason if reason.startswith("not installed") else f"not here: {reason}"
            rows.append({"variant": variant, STATUS: status})
            continue
        row = _against(timed, variant, baseline)
        rows.append(row | {"share_of_copy": moved / row["median_ms"] / 1e6 / gb_per_s} | more(variant))
    return rows


def _against(timed: Comparison, variant: str, baseline: str) -> Row:
    """A variant's time, its baseline's, and the ratio of the two."""
    ratio = {"baseline_ms": timed.timing(baseline).median_ms, f"ratio_to_{baseline}": timed.ratio(variant, baseline)[0]}
    return {"variant": variant} | timed.timing(variant).row() | ratio


# The lecture's two tables: row -> whether under autocast, norm and optimizer.
LECTURE = {
    "fp32": (False, fused_norms.TORCH, optimizers.FOR_LOOP),
    "AMP": (True, fused_norms.TORCH, optimizers.FOR_LOOP),
    "AMP + fused norm": (True, fused_norms.OURS, optimizers.FOR_LOOP),
    "AMP + fused Adam": (True, fused_norms.TORCH, optimizers.FUSED),
    "AMP + both": (True, fused_norms.OURS, optimizers.FUSED),
}


@experiment(
    small=[{"batch": 4, "width": 32, "layers": 1}],
    cpu=[{"batch": 16, "width": 256, "layers": 4}],
    gpu=[{"batch": size, "width": 256, "layers": 4} for size in (64, 128)],
    big_gpu=[{"batch": size, "width": 256, "layers": 4} for size in (512, 1024)],
)
def lecture(batch: int, width: int, layers: int) -> list[Row]:
    """Training steps of `nn.TransformerDecoderLayer`s in fp32, with AMP, and with LayerNorms and Adam replaced."""
    x = torch.randn(batch, 64, width, device=device())
    steps: dict[str, Callable[[], Tensor]] = {}
    rows = {}
    for name, (mixed, norm, optimizer) in LECTURE.items():
        reason = missing_because(*fused_norms.needs(norm), *optimizers.NEEDS.get(optimizer, ()))
        rows[name] = {"variant": name} | ({STATUS: f"not here: {reason}"} if reason else {})
        if not reason:
            steps[name] = fused_norms.decoder_step(x, layers, half_dtype() if mixed else None, norm, optimizer)
    timed = compare(steps, check=False)
    for name, step in steps.items():
        rows[name] = _against(timed, name, "fp32") | {"peak_gib": peak_memory(step).added_bytes / GIB}
    return list(rows.values())


@experiment(
    small=[{"model": TINY, "strategy": "zero3"}],
    cpu=[{"model": SIXTY_M, "strategy": strategy} for strategy in ("ddp", "zero2", "zero3")],
    gpu=[{"model": SIXTY_M, "strategy": strategy} for strategy in ("ddp", "zero2", "zero3")],
    big_gpu=[{"model": ONE_B, "strategy": strategy} for strategy in ("ddp", "zero2", "zero3")],
)
def memory_alone(model: str, strategy: str) -> Row:
    """Peak memory of a single rank in a step: counted on tensors without memory, derived by formula, and measured."""
    sequence = 64 if model == TINY else 2048
    job = Job(strategy=strategy, model=model, batch=1, sequence=sequence, **PLANNED)
    counted, derived = rank_memory(job, 1, count=True)["peak_gib"], rank_peak(job, 1).bytes / GIB
    measured = rank_memory(job, 1, count=False)["peak_gib"]
    return {"counted_gib": counted, "derived_gib": derived, "measured_gib": measured, "ratio": counted / measured}


def _apart(setup: Setup, fn: Callable[..., Row], *arguments, **options) -> Row:
    """`fn(…)`; on a CPU in a fresh process, with the setup's allocator."""
    if device().type == "cuda" or setup.model == TINY:
        return fn(*arguments, **options)
    return in_fresh_process(fn, *arguments, environment=setup.environment, **options)


def _run(setup: Setup, **steps: int) -> Row:
    on_cpu = {"loss_steps": ON_CPU_LOSS_STEPS} if device().type == "cpu" else {}
    return _apart(setup, run, setup, **(FEW if setup.model == TINY else on_cpu | steps))


def _setup(model: str, sequence: int, step: str = "", batch: int = 0, checkpointing: str = "", **_: object) -> Setup:
    """A configuration's setup, a step of the device's ladder; the tiny model's is uncompiled, to save time."""
    names = BEFORE_BATCHES if batch else BEFORE_LENGTHS if checkpointing else BEST
    setup = rung(step or names[device().type], Setup(model=model, sequence=sequence), device())
    setup = replace(setup if step else setup.possible(device()), compile="none") if model == TINY else setup
    changed = {"batch": 1, "checkpointing": checkpointing} if checkpointing else {"batch": batch} if batch else {}
    return replace(setup, **changed)


def _missing(**config: object) -> str:
    """Why a configuration's setup can't run here, as a status; "" if it can."""
    try:
        reason = _setup(**config).missing_because(device())
    except ValueError as error:  # on an old GPU without a compiler a rung isn't compiled, which its change may need
        reason = str(error)
    return f"not here: {reason}" if reason else ""


@experiment(
    small=[SMALL | {"step": step} for step in ("no optimisation", "fused AdamW", "FlashAttention", "batch 2")],
    cpu=[MEDIUM | {"step": step} for step in CPU_LADDER],
    gpu=[MEDIUM | {"step": step} for step in LADDER],
    big_gpu=[FULL | {"step": step} for step in LADDER],
    version=3,
    missing=_missing,
)
def ladder(model: str, sequence: int, step: str) -> Row:
    """Each step of the ladder: speed, memory, and the loss after equally many training steps on the same text."""
    return _run(_setup(model, sequence, step))


@experiment(
    small=[SMALL | {"variant": "transformers"}],
    cpu=[
        MEDIUM | {"variant": variant}
        for variant in ("transformers, eager attention", "transformers", "transformers, fused AdamW, compile")
    ],
    gpu=[MEDIUM | {"variant": variant} for variant in others.VARIANTS],
    big_gpu=[FULL | {"variant": variant} for variant in others.VARIANTS],
    version=3,
    missing=lambda variant, **sizes: missing_because(*others.needs(variant), "native bf16") or _missing(**sizes),
)
def peers(model: str, sequence: int, variant: str) -> Row:
    """The same model with the same weights and batch, trained by transformers and by us, in turn in one process.

    Both have the process's allocator, which on a CPU is the best rung's.
    """
    setup = _setup(model, sequence)
    return _apart(setup, others.against, variant, setup)


@experiment(
    small=[SMALL | {"workers": 0, "pinned": False}],
    cpu=[MEDIUM | {"workers": workers, "pinned": False} for workers in (0, 2)],
    gpu=[MEDIUM | {"workers": workers, "pinned": pinned} for workers in (0, 2) for pinned in (False, True)],
    big_gpu=[FULL | {"workers": workers, "pinned": pinned} for workers in (0, 2, 8) for pinned in (False, True)],
    version=3,
    missing=_missing,
)
def loading(model: str, sequence: int, workers: int, pinned: bool) -> Row:
    """Training steps on tokens from a `DataLoader`; the host's wait for each batch and in its copy."""
    setup = _setup(model, sequence)
    steps = {TINY: 8, SIXTY_M: 12}.get(model, 40)
    return _apart(setup, epoch, setup, steps, workers, pinned)


@experiment(
    small=[SMALL | {"batch": size} for size in (1, 2)],
    cpu=[MEDIUM | {"batch": size} for size in (4,)],
    gpu=[],  # the ladder's largest batch fills such a GPU
    big_gpu=[FULL | {"batch": size} for size in (32,)],
    version=3,
    missing=_missing,
)
def batch(model: str, sequence: int, batch: int) -> Row:
    """Batch sizes that the ladder leaves out, on a CPU by its best setup, on a GPU by that before batches grow."""
    return _run(_setup(model, sequence, batch=batch), loss_steps=WARM)


CHECKPOINTING = ("none", "selective", "full", "memory budget")
LENGTHS = (2**11, 2**13, 2**15, 2**16)  # at 2**17 a step would take a quarter of a minute


@experiment(
    small=[SMALL | {"checkpointing": name} for name in ("none", "full")],
    cpu=[MEDIUM | {"sequence": length, "checkpointing": name} for length in (512, 2048) for name in CHECKPOINTING],
    gpu=[MEDIUM | {"sequence": length, "checkpointing": name} for length in (2048, 8192) for name in CHECKPOINTING],
    big_gpu=[FULL | {"sequence": length, "checkpointing": name} for length in LENGTHS for name in CHECKPOINTING],
    version=3,
    missing=_missing,
)
def checkpointing(model: str, sequence: int, checkpointing: str) -> Row:
    """A batch of one sequence of growing length: which checkpointing still fits in memory, and its speed."""
    return _run(_setup(model, sequence, checkpointing=checkpointing), loss_steps=WARM)


@experiment(small=[{"ranks": 2}], cpu=[{"ranks": ranks} for ranks in (1, 2, 4)])
def distributed(ranks: int) -> list[Row]:
    """The tiny model on real CPU processes, by each strategy: bytes a rank, and the loss after 20 steps.

    Processes on one CPU share its cores, so losses and bytes are valid for GPUs too, but times aren't.
    """
    rows, jobs = [], []
    for strategy in ("single",) if ranks == 1 else ("ddp", "zero2", "zero3", "tp"):
        job = Job(strategy=strategy, steps=20, timeout_s=300)
        try:
            job.check(ranks)
            jobs.append(job)
        except ValueError as error:
            rows.append({"strategy": strategy, STATUS: f"not here: {error}"})
    columns = ("strategy", "step_ms", "parameter_bytes", "gradient_bytes", "optimizer_bytes")
    measured = [
        {name: row[name] for name in columns} | {"last_loss": row["losses"][-1]} for row in measure_ranks(jobs, ranks)
    ]
    return measured + rows


@experiment(
    small=[{"model": TINY, "strategy": "zero3", "ranks": 2}],
    cpu=[
        {"model": EIGHT_B, "strategy": strategy, "ranks": ranks}
        for strategy in ("ddp", "zero2", "zero3")
        for ranks in (2, 8, 64, 512)
    ],
)
def memory_plan(model: str, strategy: str, ranks: int) -> Row:
    """SIMULATED: memory of one of `ranks` ranks with one sequence each; the other ranks do not exist."""
    sequence = 64 if model == TINY else 4096
    job = Job(strategy=strategy, model=model, batch=ranks, sequence=sequence, **PLANNED)
    simulated = rank_memory(job, ranks)
    derived = rank_peak(job, ranks).bytes / GIB
    row = {name: value for name, value in simulated.items() if name not in ("strategy", "ranks", "model")}
    return row | {"derived_gib": derived, "derived_ratio": derived / simulated["peak_gib"]}


ASSUMED_MFU = 0.5  # of the computation without communication


@experiment(
    small=[{"model": TINY, "sequence": 64, "cluster": CLUSTERS[0].name}],
    cpu=[{"model": EIGHT_B, "sequence": 4096, "cluster": cluster.name} for cluster in CLUSTERS],
)
def scaling(model: str, sequence: int, cluster: str) -> list[Row]:
    """PREDICTED: step time on many GPUs with one sequence each, from the bytes that they exchange.

    Compute time assumes half the peak of an H100 or H200; nothing here is measured.
    """
    by_name = {known.name: known for known in CLUSTERS}
    compute_ms = flops_per_token(model, sequence) * sequence / (ASSUMED_MFU * PEAKS["H200"]) * 1e3
    rows = []
    for strategy in ("ddp", "zero2", "zero3"):
        for ranks in (2, 4, 8, 16, 64, 256, 512):
            job = Job(strategy=strategy, model=model, batch=ranks, sequence=sequence, **PLANNED)
            rows.append(predict(job, ranks, by_name[cluster], compute_ms))
    return [{name: value for name, value in row.items() if name not in ("model", "cluster")} for row in rows]
