"""AdamW over any number of tensors as two Triton kernels: one for the tensors' numbers, one for all their elements.

It costs 28 bytes a parameter, the least there is in fp32: parameter and both moments in and out, gradient in.
A loss scale and an overflow are handled on the way: the gradient is divided in registers, not in memory (torch's fused
AdamW writes it back, 32 bytes), and no step is taken where `found_inf` says so, without asking the GPU.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from .where import launch

CHUNK = 1024  # elements a program; 8 a thread
COLUMNS = 6  # of the table of tensors: addresses of p, g, m, v and the step, then the number of elements
AT_A_TIME = 256  # tensors a program of the first kernel


def step(
    table: Tensor,
    chunks: dict[bool, Tensor],
    factors: Tensor,
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    """One step for the tensors of `table` (tensors, 6) int64.

    `chunks[vector]` (chunks, 2) int32 names a tensor and a chunk within it; `vector` says that the chunks can be read
    in 16 bytes: see `cut`. `factors` (tensors, 2) fp32 is space to work in.
    """
    count, on_device = table.shape[0], isinstance(lr, Tensor)
    launch(
        _advance, triton.cdiv(count, AT_A_TIME),
        table, factors, lr, found_inf, count, *map(_log2, betas),
        LR_ON_DEVICE=on_device, COLUMNS=COLUMNS, BLOCK=AT_A_TIME, num_warps=4,
    )  # fmt: skip
    for vector, part in chunks.items():
        launch(
            _update, part.shape[0],
            table, part, factors, lr, grad_scale, found_inf, *betas, 1 - betas[0], 1 - betas[1], eps, weight_decay,
            LR_ON_DEVICE=on_device, COLUMNS=COLUMNS, CHUNK=CHUNK, VECTOR=vector, num_warps=4,
        )  # fmt: skip


def layout(table: Tensor) -> Tensor:
    """What the chunks depend on, (tensors, 2): the number of elements, and whether all four begin at 16 bytes."""
    return torch.stack((table[:, 5], (table[:, :4] % 16 == 0).all(1)), 1)


def cut(layout: Tensor) -> dict[bool, Tensor]:
    """The chunks of all tensors: those that can be read in 16 bytes (True), and those that cannot.

    They can if the tensors begin at a multiple of 16 bytes, and the chunk is whole or ends at one.
    """
    elements, aligned = layout.unbind(1)
    counts = (elements + CHUNK - 1) // CHUNK
    tensor = torch.arange(len(elements)).repeat_interleave(counts)
    within = torch.arange(len(tensor)) - (counts.cumsum(0) - counts)[tensor]
    vector = (aligned[tensor] == 1) & (((within + 1) * CHUNK <= elements[tensor]) | (elements[tensor] % 4 == 0))
    chunks = torch.stack((tensor, within), 1).to(torch.int32)
    return {True: chunks[vector], False: chunks[~vector]}


def _log2(number: float) -> float:
    return math.log2(number) if number > 0 else -math.inf


@triton.jit
def _advance(
    table_at, factors_at, lr, found_inf_at, count, log2_beta1, log2_beta2,
    LR_ON_DEVICE: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Count the step, and find lr / (1 − β₁ᵗ) and 1 / √(1 − β₂ᵗ) in fp64: at first β₂ᵗ is next to 1."""
    tensor = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = tensor < count
    step_at = tl.load(table_at + tensor * COLUMNS + 4, mask=inside, other=0).to(tl.pointer_type(tl.float32))
    step = tl.load(step_at, mask=inside, other=0.0) + 1.0
    if found_inf_at is not None:
        step -= tl.where(tl.load(found_inf_at) == 0.0, 0.0, 1.0)
    tl.store(step_at, step, mask=inside)
    if LR_ON_DEVICE:
        lr = tl.load(lr)
    wide = tl.where(step > 0.0, step, 1.0).to(tl.float64)
    correction1 = 1.0 - tl.exp2(wide * log2_beta1)
    correction2 = 1.0 - tl.exp2(wide * log2_beta2)
    tl.store(factors_at + 2 * tensor, (lr / correction1).to(tl.float32), mask=inside)
    tl.store(factors_at + 2 * tensor + 1, (1.0 / tl.sqrt(correction2)).to(tl.float32), mask=inside)


@triton.jit
def _update(
    table_at, chunks_at, factors_at, lr, grad_scale_at, found_inf_at,
    beta1, beta2, rest1, rest2, eps, weight_decay,
    LR_ON_DEVICE: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    overflow = 0.0
    if found_inf_at is not None:
        overflow = tl.load(found_inf_at)
    if overflow == 0.0:
        tensor = tl.load(chunks_at + 2 * tl.program_id(0))
        first = tl.load(chunks_at + 2 * tl.program_id(0) + 1).to(tl.int64) * CHUNK
        row_at = table_at + tensor * COLUMNS
        p_at = tl.load(row_at).to(tl.pointer_type(tl.float32))
        g_at = tl.load(row_at + 1).to(tl.pointer_type(tl.float32))
        m_at = tl.load(row_at + 2).to(tl.pointer_type(tl.float32))
        v_at = tl.load(row_at + 3).to(tl.pointer_type(tl.float32))
        elements = tl.load(row_at + 5)
        if VECTOR:
            elements = tl.multiple_of(elements, 4)  # or the chunk is whole, and where it ends doesn't matter
            p_at, g_at = tl.multiple_of(p_at, 16), tl.multiple_of(g_at, 16)
            m_at, v_at = tl.multiple_of(m_at, 16), tl.multiple_of(v_at, 16)
        at = first + tl.arange(0, CHUNK)
        inside = at < elements
        g = tl.load(g_at + at, mask=inside, other=0.0)
        m = tl.load(m_at + at, mask=inside, other=0.0)
        v = tl.load(v_at + at, mask=inside, other=0.0)
        p = tl.load(p_at + at, mask=inside, other=0.0)
        decay = 1.0 - (tl.load(lr) if LR_ON_DEVICE else lr) * weight_decay
        if grad_scale_at is not None:
            g *= 1.0 / tl.load(grad_scale_at)
        m = beta1 * m + rest1 * g
        v = beta2 * v + rest2 * g * g
        rate, sharpness = tl.load(factors_at + 2 * tensor), tl.load(factors_at + 2 * tensor + 1)
        p = p * decay - rate * m / (tl.sqrt(v) * sharpness + eps)
        tl.store(p_at + at, p, mask=inside)
        tl.store(m_at + at, m, mask=inside)
        tl.store(v_at + at, v, mask=inside)
