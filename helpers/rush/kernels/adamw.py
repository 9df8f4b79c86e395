"""AdamW in fp32 that moves 28 bytes a parameter a step, with a loss scaler or without.

An optimizer like torch's: the same state under the same names (a checkpoint of `torch.optim.AdamW` loads, and the other
way round), schedulers, parameter groups. With torch's `GradScaler` no step waits for the GPU. On a GPU all fp32
parameters are updated by one launch, elsewhere torch's fused AdamW does the work.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw as torchs_adamw

from .where import on_triton


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
        self._step_supports_amp_scaling = True  # what GradScaler asks before it hands over scale and overflow
        self._plans: dict[tuple[int, torch.device], _Plan] = {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """What a copy, a pickle or a checkpoint goes on from: torch keeps its own attributes, and these follow."""
        super().__setstate__(state)
        self._step_supports_amp_scaling = True
        self._plans = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for number, group in enumerate(self.param_groups):
            here: dict[torch.device, list[tuple[Tensor, ...]]] = {}
            elsewhere = []
            for p in group["params"]:
                if p.grad is None:
                    continue
                row = self._row(p)
                if _fits(row):
                    here.setdefault(p.device, []).append(row)
                else:
                    elsewhere.append(row)
            for device, rows in here.items():
                plan = self._plans.setdefault((number, device), _Plan())
                plan.step(rows, group, self._amp(device))
            if elsewhere:
                self._step_elsewhere(elsewhere, group)
        return loss

    def _row(self, p: Tensor) -> tuple[Tensor, ...]:
        """The parameter, its gradient, both moments and the step's number."""
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
        given = (getattr(self, name, None) for name in ("grad_scale", "found_inf"))
        return [None if tensor is None else tensor.to(device, non_blocking=True) for tensor in given]

    def _step_elsewhere(self, rows: list[tuple[Tensor, ...]], group: dict[str, Any]) -> None:
        params, grads, *state = map(list, zip(*rows, strict=True))
        grad_scale, found_inf = self._amp(params[0].device)
        if grad_scale is not None:
            grads = [grad / grad_scale for grad in grads]  # torch's would divide them in place
        torchs_adamw(
            params, grads, state[0], state[1], [], state[2],
            fused=True, found_inf=found_inf, amsgrad=False, maximize=False,
            beta1=group["betas"][0], beta2=group["betas"][1],
            lr=group["lr"], eps=group["eps"], weight_decay=group["weight_decay"],
        )  # fmt: skip


class _Plan:
    """What the kernels are told about a group's tensors on a device: where they are, and how they are cut up.

    The table of addresses is written anew when a tensor has moved, which gradients do; the chunks when a size has
    changed. A captured CUDA graph copies its table from the host at each replay, so it gets one of its own, in host
    memory that was set aside before and is kept.
    """

    def __init__(self) -> None:
        self.written: list[int] = []
        self.layout = self.table = self.factors = self.spare = None
        self.chunks: dict[bool, Tensor] = {}
        self.captured: list[Tensor] = []

    def step(self, rows: list[tuple[Tensor, ...]], group: dict[str, Any], amp: list[Tensor | None]) -> None:
        from . import adamw_triton

        p = rows[0][0]
        written = [number for row in rows for number in (*(t.data_ptr() for t in row), row[0].numel())]
        if written != self.written:
            table = torch.tensor(written, dtype=torch.int64).view(-1, adamw_triton.COLUMNS)
            self._place(table, adamw_triton.layout(table), p.device)
            self.written = written
        lr = group["lr"]
        if isinstance(lr, Tensor) and lr.device != p.device:
            lr = float(lr) if lr.device.type == "cpu" else lr.to(p.device)
        options = (group["betas"], group["eps"], group["weight_decay"])
        adamw_triton.step(self.table, self.chunks, self.factors, lr, *options, *amp)

    def _place(self, table: Tensor, layout: Tensor, device: torch.device) -> None:
        from . import adamw_triton

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
            self.chunks = {vector: part.to(device) for vector, part in adamw_triton.cut(layout).items()}
            self.factors = torch.empty((len(table), 2), dtype=torch.float32, device=device)
            self.layout = layout


def _fits(row: tuple[Tensor, ...]) -> bool:
    """Whether the kernels take these tensors: fp32 on a GPU, and laid out alike without gaps."""
    p, moment = row[0], row[2]
    return on_triton(p) and all(t.dtype == torch.float32 for t in row) and moment.stride() == p.stride()


def _check(lr: float | Tensor, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
    for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
        if not (isinstance(value, Tensor) and value.numel() == 1) and not value >= 0:
            raise ValueError(f"{name} must be at least 0, not {value}")
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas must be two numbers from 0 up to but not including 1, not {betas}")
