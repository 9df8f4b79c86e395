"""AdamW in fp32 that moves 28 bytes a parameter a step, with or without a loss scaler.

A drop-in for torch's: same state under the same names (checkpoints of `torch.optim.AdamW` load, and vice versa),
schedulers, parameter groups. With torch's `GradScaler` no step synchronizes with the GPU. On a GPU all fp32 parameters
of a group are updated by two Triton kernels, one over tensors (step counts) and one over their elements; elsewhere
torch's fused AdamW is used.

28 bytes are the lower bound in fp32: parameter and both moments read and written, gradient read. The gradient is
unscaled in registers, not in memory (torch's fused AdamW writes it back, 32 bytes), and the kernels themselves skip the
step where `found_inf` is set.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw as torchs_adamw

from .launch import launch, on_triton, tl, triton

CHUNK = 1024  # elements a program; 8 a thread
COLUMNS = 6  # of the table of tensors: addresses of p, g, m, v and the step count, then the number of elements
AT_A_TIME = 256  # tensors a program of the first kernel


class AdamW(torch.optim.Optimizer):
    """Decoupled weight decay and bias correction, as `torch.optim.AdamW`; `lr` may be a tensor on the GPU.

    Gradients are left as they are: `optimizer.grad_scale`, a number on the GPU that they are divided by (a loss scale,
    a clipping factor's inverse, or their product), is applied in registers. `optimizer.found_inf` other than 0 skips
    the step. `GradScaler` sets both. A CUDA graph may capture the step after one step outside.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        _check(lr, betas, eps, weight_decay)
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._step_supports_amp_scaling = True  # makes GradScaler pass grad_scale and found_inf to `step`
        self._tables: dict[tuple[int, torch.device], _TensorTable] = {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy or a pickle: torch restores its own attributes only."""
        super().__setstate__(state)
        self._step_supports_amp_scaling = True
        self._tables = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for number, group in enumerate(self.param_groups):
            for_kernels: dict[torch.device, list[tuple[Tensor, ...]]] = {}
            for_torch = []
            for p in group["params"]:
                if p.grad is None:
                    continue
                row = self._row(p)
                if _fits(row):
                    for_kernels.setdefault(p.device, []).append(row)
                else:
                    for_torch.append(row)
            for device, rows in for_kernels.items():
                table = self._tables.setdefault((number, device), _TensorTable())
                table.step(rows, group, self._amp(device))
            if for_torch:
                self._step_by_torch(for_torch, group)
        return loss

    def _row(self, p: Tensor) -> tuple[Tensor, ...]:
        """The parameter, its gradient, both moments and the step count."""
        if p.grad.is_sparse:
            raise RuntimeError("AdamW: a gradient is sparse, which isn't supported; use torch.optim.SparseAdam")
        state = self.state[p]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        elif state["step"].device != p.device:  # a checkpoint of an optimizer that counts on the host
            state["step"] = state["step"].to(p.device, torch.float32)
        grad = p.grad
        if grad.stride() != p.stride():
            grad = torch.empty_like(p).copy_(grad)
        return p, grad, state["exp_avg"], state["exp_avg_sq"], state["step"]

    def _amp(self, device: torch.device) -> list[Tensor | None]:
        tensors = (getattr(self, name, None) for name in ("grad_scale", "found_inf"))
        return [None if tensor is None else tensor.to(device, non_blocking=True) for tensor in tensors]

    def _step_by_torch(self, rows: list[tuple[Tensor, ...]], group: dict[str, Any]) -> None:
        params, grads, *state = map(list, zip(*rows, strict=True))
        grad_scale, found_inf = self._amp(params[0].device)
        if grad_scale is not None:
            grads = [grad / grad_scale for grad in grads]  # torch's AdamW would divide them in place
        torchs_adamw(
            params, grads, state[0], state[1], [], state[2],
            fused=True, found_inf=found_inf, amsgrad=False, maximize=False,
            beta1=group["betas"][0], beta2=group["betas"][1],
            lr=group["lr"], eps=group["eps"], weight_decay=group["weight_decay"],
        )  # fmt: skip


class _TensorTable:
    """The kernels' inputs for a group's tensors on a device: their addresses and sizes, and their chunks.

    The table of addresses is rewritten when a tensor has moved, which gradients do; the chunks when a size has changed.
    A captured CUDA graph copies its table from the host at each replay, so it gets its own pinned table, which was
    allocated before the capture and stays alive.
    """

    def __init__(self) -> None:
        self.written: list[int] = []
        self.layout = self.table = self.factors = self.spare = None
        self.chunks: dict[bool, Tensor] = {}
        self.captured: list[Tensor] = []

    def step(self, rows: list[tuple[Tensor, ...]], group: dict[str, Any], amp: list[Tensor | None]) -> None:
        p = rows[0][0]
        written = [number for row in rows for number in (*(t.data_ptr() for t in row), row[0].numel())]
        if written != self.written:
            table = torch.tensor(written, dtype=torch.int64).view(-1, COLUMNS)
            self._upload(table, layout(table), p.device)
            self.written = written
        lr = group["lr"]
        if isinstance(lr, Tensor) and lr.device != p.device:
            lr = float(lr) if lr.device.type == "cpu" else lr.to(p.device)
        options = (group["betas"], group["eps"], group["weight_decay"])
        _step_on_triton(self.table, self.chunks, self.factors, lr, *options, *amp)

    def _upload(self, table: Tensor, layout: Tensor, device: torch.device) -> None:
        same = self.layout is not None and torch.equal(layout, self.layout)
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            if not same or self.spare is None:
                raise RuntimeError("AdamW: take a step with these parameters before a CUDA graph captures one")
            table, self.spare = self.spare.copy_(table), None
            self.captured.append(table)
        elif device.type == "cuda":
            table = table.pin_memory()
            if not same or self.spare is None:
                self.spare = torch.empty_like(table).pin_memory()
        self.table = table.to(device, non_blocking=True)
        if not same:
            self.chunks = {vector: part.to(device) for vector, part in cut(layout).items()}
            self.factors = torch.empty((len(table), 2), dtype=torch.float32, device=device)
            self.layout = layout


def _fits(row: tuple[Tensor, ...]) -> bool:
    """Whether the kernels support these tensors: fp32 on a GPU, with the same strides, without gaps."""
    p, moment = row[0], row[2]
    return on_triton(p) and all(t.dtype == torch.float32 for t in row) and moment.stride() == p.stride()


def _check(lr: float | Tensor, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
    for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
        if not (isinstance(value, Tensor) and value.numel() == 1) and not value >= 0:
            raise ValueError(f"{name} must be at least 0, not {value}")
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas must be two numbers from 0 up to but not including 1, not {betas}")


def _step_on_triton(
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

    `chunks[vector]` (chunks, 2) int32 holds the indices of a tensor and of a chunk within it; `vector`: the chunks
    support 16-byte accesses, see `cut`. `factors` (tensors, 2) fp32 is workspace.
    """
    count, on_device = table.shape[0], isinstance(lr, Tensor)
    launch(
        _advance_kernel, triton.cdiv(count, AT_A_TIME),
        table, factors, lr, found_inf, count, *map(_log2, betas),
        LR_ON_DEVICE=on_device, COLUMNS=COLUMNS, BLOCK=AT_A_TIME, num_warps=4,
    )  # fmt: skip
    for vector, part in chunks.items():
        launch(
            _update_kernel, part.shape[0],
            table, part, factors, lr, grad_scale, found_inf, *betas, 1 - betas[0], 1 - betas[1], eps, weight_decay,
            LR_ON_DEVICE=on_device, COLUMNS=COLUMNS, CHUNK=CHUNK, VECTOR=vector, num_warps=4,
        )  # fmt: skip


def layout(table: Tensor) -> Tensor:
    """The chunks' inputs, (tensors, 2): number of elements, and whether all four addresses are 16-byte aligned."""
    return torch.stack((table[:, 5], (table[:, :4] % 16 == 0).all(1)), 1)


def cut(layout: Tensor) -> dict[bool, Tensor]:
    """The chunks (tensor, chunk) of all tensors: those for 16-byte accesses (True), and the others (False).

    16-byte accesses need aligned tensors, and a chunk that is full or ends at a multiple of 16 bytes.
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


if triton is not None:

    @triton.jit
    def _advance_kernel(
        table_at, factors_at, lr, found_inf_at, count, log2_beta1, log2_beta2,
        LR_ON_DEVICE: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """Increment step counts; compute lr / (1 − β₁ᵗ) and 1 / √(1 − β₂ᵗ), in fp64 as β₂ᵗ is near 1 at first."""
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
    def _update_kernel(
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
                elements = tl.multiple_of(elements, 4)  # not true for full chunks, but their mask is true everywhere
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
