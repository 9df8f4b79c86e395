"""AdamW in six variants: from one launch per operation and tensor to a fused kernel, and with a smaller state.

for-loop    torch.optim.AdamW, one operation on one parameter at a time
foreach     one operation on all parameters at a time
fused       torch's fused kernel
in backward torch's fused kernel, a launch a parameter, as soon as its gradient is there, which is freed at once
apex        NVIDIA's FusedAdam
8-bit       torchao's AdamW8bit: both moments in 8 bits, 2.03 bytes a parameter instead of 8

All but the last compute the same; they differ in memory traffic and in the number of launches. The lower bound on the
traffic is `LEAST_BYTES` a parameter.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from ..lab.arguments import check_choice

FOR_LOOP, FOREACH, FUSED, APEX, EIGHT_BIT = "for-loop", "foreach", "fused", "apex", "8-bit"
IN_BACKWARD = "in backward"
VARIANTS = (FOR_LOOP, FOREACH, FUSED, APEX)  # those that compute the same
NEEDS = {APEX: ("apex", "CUDA")}
FLAGS = {FOR_LOOP: {"foreach": False, "fused": False}, FOREACH: {"foreach": True}, FUSED: {"fused": True}}
LEAST_BYTES = 28  # a parameter, in fp32: read and write the parameter and two moments, read the gradient


def build_optimizer(
    variant: str,
    params: Iterable[Tensor],
    *,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    weight_decay: float = 1e-2,
    capturable: bool = False,
) -> torch.optim.Optimizer:
    """An optimizer over parameters; with `capturable` a CUDA graph can capture its steps after the first."""
    check_choice((*VARIANTS, IN_BACKWARD, EIGHT_BIT), variant=variant)
    options = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
    if variant == APEX:
        from apex.optimizers import FusedAdam

        return FusedAdam(params, adam_w_mode=True, **options)
    if variant in FLAGS:
        return torch.optim.AdamW(params, capturable=capturable, **options, **FLAGS[variant])
    if variant == IN_BACKWARD:
        return InBackward(params, fused=True, capturable=capturable, **options)
    from torchao.optim import AdamW8bit

    # Rounded to nearest, weights in bf16 would lose updates below half a unit in the last place.
    optimizer = AdamW8bit(params, bf16_stochastic_round=True, **options)
    if capturable:
        optimizer.register_step_post_hook(_counts_on_device)
    return optimizer


def _counts_on_device(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """torchao has the step count and the rate on the host, and a graph would replay those of the captured step."""
    for parameter, state in optimizer.state.items():
        state["step"] = state["step"].to(parameter.device)
    for group in optimizer.param_groups:
        group["lr"] = group["lr"].to(group["params"][0].device)


class InBackward(torch.optim.AdamW):
    """AdamW that steps within backward, one parameter at a time, and frees its gradient: `step` has nothing left to do.

    So gradients are never all in memory, but nothing can be done with all of them: no clipping, no loss scale, no
    accumulation over batches. Each parameter's step looks through all of them, which is the host's time alone.
    """

    def __init__(self, params: Iterable[Tensor], **options) -> None:
        super().__init__(params, **options)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.register_post_accumulate_grad_hook(self._advance)

    def _advance(self, parameter: Tensor) -> None:
        super().step()  # of this parameter alone: no other has a gradient
        parameter.grad = None

    def step(self, closure=None) -> None:
        """With the gradients that are left: none after backward, which was the step."""
        if any(parameter.grad is not None for group in self.param_groups for parameter in group["params"]):
            super().step(closure)
