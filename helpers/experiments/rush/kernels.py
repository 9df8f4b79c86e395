"""Norms, AdamW and the lecture's stack: fused variants against each other and against a copy's bandwidth."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from ...kernels import swaps
from ...lab import Comparison, Worth, compare, device, experiment, half_dtype, peak_memory
from ...lab.ceilings import copy, large_copy
from ...lab.machine import missing_because
from ...lab.memory import GIB
from ...lab.records import STATUS, Row
from ...lab.timing import queue_ahead
from ...rush import optimizers

TIMES = "variant median_ms p20_ms p80_ms n "


def _each_kind(*shapes: tuple[int, int, str]) -> list[Row]:
    return [
        {"kind": kind, "rows": rows, "width": width, "dtype": dtype}
        for kind in swaps.KINDS
        for rows, width, dtype in shapes
    ]


@experiment(
    small=_each_kind((64, 64, "float32")),
    # in fp32: a CPU adds up the gradient of torch's weights in their own type, and bf16 loses a tenth of it
    cpu=_each_kind((2048, 2048, "float32")),
    gpu=_each_kind(*((*shape, t) for shape in ((16384, 2048), (65536, 1024)) for t in ("float16", "bfloat16"))),
    big_gpu=_each_kind((16384, 2048, "bfloat16"), (16384, 4096, "bfloat16"), (65536, 1024, "bfloat16")),
    version=2,
    columns=TIMES + "share_of_copy",
    worth=Worth(30, "norms beside apex and Liger", cpu=3.8, gpu=2, big_gpu=5),
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

    missing = {variant: missing_because(*swaps.needs(variant)) for variant in swaps.VARIANTS}
    steps = {v: partial(both, swaps.norm(v, kind)) for v, reason in missing.items() if not reason}
    timed = compare({swaps.TORCH: steps[swaps.TORCH]} | steps, before=queue_ahead)
    return _kernel_rows(missing, timed, sum(swaps.least_bytes(x.numel(), x.element_size())))


@experiment(
    small=[{"million_parameters": 1}],
    cpu=[{"million_parameters": size} for size in (10, 100)],
    gpu=[{"million_parameters": size} for size in (10, 100)],
    big_gpu=[{"million_parameters": size} for size in (10, 100, 1000)],
    version=2,
    columns=TIMES + "share_of_copy",
    worth=Worth(40, "AdamW beside apex and torch's", cpu=9, gpu=3, big_gpu=5),
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
    steps = {v: optimizers.build_optimizer(v, params).step for v, reason in missing.items() if not reason}
    timed = compare(steps, check=False, before=queue_ahead)
    return _kernel_rows(missing, timed, optimizers.LEAST_BYTES * 64 * elements)


def _kernel_rows(missing: dict[str, str], timed: Comparison, moved: int) -> list[Row]:
    """A row for each variant: its time, and its bandwidth in moving `moved` bytes as a share of a copy's; or why it
    can't run here."""
    gb_per_s = copy(large_copy(on_cpu=512))[1]
    rows = []
    for variant, reason in missing.items():
        if reason:
            status = reason if reason.startswith("not installed") else f"not here: {reason}"
            rows.append({"variant": variant, STATUS: status})
            continue
        timing = timed.timing(variant)
        share = moved / timing.median_ms / 1e6 / gb_per_s
        rows.append({"variant": variant} | timing.row() | {"share_of_copy": share})
    return rows


# The lecture's two tables: row -> whether under autocast, norm and optimizer.
LECTURE = {
    "fp32": (False, swaps.TORCH, optimizers.FOR_LOOP),
    "AMP": (True, swaps.TORCH, optimizers.FOR_LOOP),
    "AMP + fused norm": (True, swaps.OURS, optimizers.FOR_LOOP),
    "AMP + fused Adam": (True, swaps.TORCH, optimizers.FUSED),
    "AMP + both": (True, swaps.OURS, optimizers.FUSED),
}


@experiment(
    small=[{"batch": 4, "width": 32, "layers": 1}],
    cpu=[{"batch": 16, "width": 256, "layers": 4}],
    gpu=[{"batch": size, "width": 256, "layers": 4} for size in (64, 128)],
    big_gpu=[{"batch": 2048, "width": 256, "layers": 4}],
    columns=TIMES + "ratio_to_fp32 peak_gib",
    worth=Worth(30, "the lecture's table", cpu=15.8, gpu=6, big_gpu=6),
)
def lecture(batch: int, width: int, layers: int) -> list[Row]:
    """Training steps of `nn.TransformerDecoderLayer`s in fp32, with AMP, and with LayerNorms and Adam replaced.

    Python takes some 25 ms for a step of 4 layers: a GPU needs a batch that takes longer in each row.
    """
    x = torch.randn(batch, 64, width, device=device())
    steps: dict[str, Callable[[], Tensor]] = {}
    rows = {}
    for name, (mixed, norm, optimizer) in LECTURE.items():
        half = ["native bf16"] if mixed and device().type == "cpu" else []
        reason = missing_because(*half, *swaps.needs(norm), *optimizers.NEEDS.get(optimizer, ()))
        rows[name] = {"variant": name} | ({STATUS: f"not here: {reason}"} if reason else {})
        if not reason:
            steps[name] = decoder_step(x, layers, half_dtype() if mixed else None, norm, optimizer)
    timed = compare(steps, check=False)
    for name, step in steps.items():
        rows[name] |= timed.timing(name).row() | {"ratio_to_fp32": timed.ratio(name, "fp32")[0]}
        rows[name]["peak_gib"] = peak_memory(step).added_bytes / GIB
    return list(rows.values())


def decoder_step(x: Tensor, layers: int, dtype: torch.dtype | None, norm: str, optimizer: str) -> Callable[[], Tensor]:
    """A training step on x (B, T, C), which is also every layer's memory, with the mean square as the loss."""
    torch.manual_seed(0)
    width = x.shape[-1]
    blocks = [nn.TransformerDecoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True) for _ in range(layers)]
    model = nn.ModuleList(blocks).to(device())
    swaps.swap_norms(model, norm)
    adamw = optimizers.build_optimizer(optimizer, list(model.parameters()))

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
