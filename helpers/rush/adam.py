"""The ways of Adam: one update, from a launch for each operation on each tensor to one launch for all.

    for-loop   torch.optim.AdamW, an operation at a time on a parameter at a time
    foreach    an operation at a time on all parameters
    fused      torch's kernel for all of it
    apex       NVIDIA's FusedAdam
    triton     ours: `kernels.AdamW`

They compute the same; what differs is how often a number is read and written, and how many launches that takes. The
least is `LEAST_BYTES` a parameter.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from helpers.lab.machine import NOT_INSTALLED, installed

from . import kernels

# fp32: parameter and two moments in and out, gradient in.
LEAST_BYTES = 28

FOR_LOOP, FOREACH, FUSED, APEX, OURS = "for-loop", "foreach", "fused", "apex", "triton"
WAYS = (FOR_LOOP, FOREACH, FUSED, APEX, OURS)


def adamw(
    way: str,
    params: Iterable[Tensor],
    *,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
) -> torch.optim.Optimizer:
    """An optimizer of a way over parameters. See `obstacle` before."""
    options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
    if way == OURS:
        return kernels.AdamW(params, **options)
    if way == APEX:
        from apex.optimizers import FusedAdam

        return FusedAdam(params, adam_w_mode=True, **options)
    flags = {
        FOR_LOOP: {"foreach": False, "fused": False},
        FOREACH: {"foreach": True},
        FUSED: {"fused": True},
    }
    if way not in flags:
        raise ValueError(f"way is {way!r}; allowed: {', '.join(map(repr, WAYS))}")
    return torch.optim.AdamW(params, **options, **flags[way])


def obstacle(way: str, device: torch.device) -> str:
    """Why a way can't run on this machine, in a line for a table's status; "" if it can."""
    package = {APEX: "apex", OURS: "triton"}.get(way)
    if package is None:
        return ""
    if installed(package) is None:
        return NOT_INSTALLED + package
    return "" if device.type == "cuda" else "needs CUDA"


def steps(params: Sequence[Tensor], ways: Iterable[str] = WAYS, **options) -> dict[str, Callable[[], None]]:
    """For each way that runs here, a function that takes its step on these parameters with the gradients they have.

    Each way has moments of its own, 8 bytes a parameter. To be timed in turn; the parameters go on changing.
    """
    device = params[0].device
    return {way: adamw(way, params, **options).step for way in ways if not obstacle(way, device)}


def updated(way: str, params: Sequence[Tensor], gradients: Sequence[Sequence[Tensor]], **options) -> list[Tensor]:
    """What a way makes of copies of the parameters, a step for each list of gradients: to check that ways agree."""
    copies = [p.detach().clone().requires_grad_() for p in params]
    optimizer = adamw(way, copies, **options)
    for given in gradients:
        for p, gradient in zip(copies, given, strict=True):
            p.grad = gradient.clone()
        optimizer.step()
    return [p.detach() for p in copies]
