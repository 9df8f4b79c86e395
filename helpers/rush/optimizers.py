"""AdamW in seven variants: from one launch per operation and tensor to a single fused one, and with a smaller state.

for-loop          torch.optim.AdamW, one operation on one parameter at a time
foreach           one operation on all parameters at a time
fused             torch's fused kernel
apex              NVIDIA's FusedAdam
triton            ours: `kernels.AdamW`
bf16-state 8-bit  `SmallStateAdamW`

The first five compute the same; they differ in memory traffic and in the number of launches. The lower bound on the
traffic is `LEAST_BYTES` a parameter.

`SmallStateAdamW` has its two moments in bf16 (4 bytes a parameter) or in 8 bits (2.03) instead of fp32 (8).

Bytes that a step must move for each parameter of an fp32 model (read and write the weight and both moments, read the
gradient): 28 with fp32 moments, 20 with bf16, 16 with 8 bits. With weights and gradients in bf16 it is 14 and 10.

Rounding is stochastic: a running mean with a decay of 0.999 moves by less than half a step of bf16, so rounding to
nearest would freeze it. A weight in bf16 is rounded in the same way. Runs are reproducible only with the same seed.

In 8 bits, blocks of 256 numbers share a scale, their largest magnitude. The first moment is stored as its signed square
root in ±127 steps, the second as its fourth root in 255: both have a fine resolution near zero, where most numbers are.
A second moment above zero is never stored as zero, as the update would then divide by ε alone. Codes follow from a
formula, without a look-up table, so the compiler fuses unpacking, update and packing into one kernel. For this tensors
are viewed as rows of 256: with a known row length, the compiler keeps a row on chip between its scale and its codes.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from helpers.lab.arguments import check_choice

FOR_LOOP, FOREACH, FUSED, APEX, OURS = "for-loop", "foreach", "fused", "apex", "triton"
VARIANTS = (FOR_LOOP, FOREACH, FUSED, APEX, OURS)  # those that compute the same
NEEDS = {APEX: ("apex", "CUDA"), OURS: ("triton", "CUDA")}
FLAGS = {FOR_LOOP: {"foreach": False, "fused": False}, FOREACH: {"foreach": True}, FUSED: {"fused": True}}
LEAST_BYTES = 28  # a parameter, in fp32: read and write the parameter and two moments, read the gradient

BLOCK = 256  # numbers that share a scale
STATES = ("bf16", "8-bit")

Options = tuple[float, float, float, float, float]  # learning rate, two betas, epsilon, weight decay


def build(
    variant: str,
    params: Iterable[Tensor],
    *,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    weight_decay: float = 1e-2,
    capturable: bool = False,
) -> torch.optim.Optimizer:
    """An optimizer over parameters. `capturable` lets a CUDA graph capture torch's AdamW. Requirements: `NEEDS`."""
    check_choice((*VARIANTS, "bf16-state", "8-bit"), variant=variant)
    options = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
    if variant == OURS:
        from .kernels import AdamW

        return AdamW(params, **options)
    if variant == APEX:
        from apex.optimizers import FusedAdam

        return FusedAdam(params, adam_w_mode=True, **options)
    if variant in FLAGS:
        return torch.optim.AdamW(params, capturable=capturable, **options, **FLAGS[variant])
    return SmallStateAdamW(params, state=variant.removesuffix("-state"), **options)


class SmallStateAdamW(torch.optim.Optimizer):
    """AdamW whose moments are stored in bf16 or in 8 bits; the update is computed in fp32.

    A parameter whose size isn't a multiple of 256 has bf16 moments, as 8 bits need full blocks. On CUDA the update of a
    parameter is one kernel, compiled once for each dtype and state, for any size. The step count is on the device, so a
    step never synchronizes and can be captured in a CUDA graph.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        state: str = "8-bit",
    ) -> None:
        check_choice(STATES, state=state)
        for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
            if not value >= 0:
                raise ValueError(f"{name} is {value}; it must be at least 0")
        for beta in betas:
            if not 0 <= beta < 1:
                raise ValueError(f"a beta is {beta}; it must be at least 0 and below 1")
        self.kind = state
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            options = (group["lr"], *group["betas"], group["eps"], group["weight_decay"])
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, options)
        return loss

    def _update(self, parameter: Tensor, options: Options) -> None:
        if parameter.grad.is_sparse:
            raise ValueError("a gradient is sparse; SmallStateAdamW needs dense ones")
        state = self.state[parameter]
        if not state:
            state |= self._initial_state(parameter)
        state["step"] += 1
        update, shape = (_update_8bit, (-1, BLOCK)) if "scale1" in state else (_update_bf16, (-1,))
        run = _compiled(update) if parameter.is_cuda else update
        moments = [value if "scale" in name else value.view(shape) for name, value in state.items() if name != "step"]
        run(parameter.view(shape), parameter.grad.reshape(shape), *moments, state["step"], options)

    def _initial_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Zero moments, flat, and the step count 0."""
        zeros = functools.partial(torch.zeros, device=parameter.device)
        step, size = zeros(()), parameter.numel()
        if self.kind == "bf16" or size % BLOCK:
            return {
                "moment1": zeros(size, dtype=torch.bfloat16),
                "moment2": zeros(size, dtype=torch.bfloat16),
                "step": step,
            }
        return {
            "codes1": zeros(size, dtype=torch.int8),
            "codes2": zeros(size, dtype=torch.uint8),
            "scale1": zeros(size // BLOCK),
            "scale2": zeros(size // BLOCK),
            "step": step,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As any optimizer's, but moments keep their dtype; torch would cast them to the parameter's."""
        super().load_state_dict(state_dict)
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, packed in state_dict["state"].items():
            parameter = parameters[index]
            self.state[parameter] = {name: value.to(parameter.device, copy=True) for name, value in packed.items()}


def pack(x: Tensor, power: int, steps: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes of numbers (blocks, 256) and scales (blocks,): |code| = steps · (|x| / scale)^(1/power), rounded
    stochastically. With `torch.uint8` (x ≥ 0), numbers above 0 get a code of at least 1."""
    scale = x.abs().amax(dim=1)  # (blocks,)
    share = x.abs() / scale.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
    for _ in range(power.bit_length() - 1):
        share = share.sqrt()
    code = (share * steps + torch.rand_like(share)).floor().clamp(max=steps)
    code = code.clamp(min=1) * (x > 0) if dtype == torch.uint8 else code * x.sign()
    return code.to(dtype), scale


def unpack(codes: Tensor, scale: Tensor, power: int, steps: int) -> Tensor:
    """The fp32 numbers (blocks, 256) of `pack`'s codes and scales."""
    share = codes.float() / steps
    magnitude = share.abs()
    for _ in range(power.bit_length() - 1):
        magnitude = magnitude * magnitude
    return magnitude * share.sign() * scale[:, None]


def round_at_random(x: Tensor) -> Tensor:
    """fp32 to bf16 by stochastic rounding: up or down with the probabilities that make the expectation exact."""
    bits = x.view(torch.int32)  # bf16 is the upper half; noise added to the lower half carries over at random
    noise = torch.randint(0, 2**16, x.shape, dtype=torch.int32, device=x.device)
    rounded = ((bits + noise) & -65536).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x).to(torch.bfloat16)


def _updated(weight: Tensor, grad: Tensor, m: Tensor, v: Tensor, step: Tensor, options: Options) -> tuple[Tensor, ...]:
    """AdamW in fp32: the new weight and moments."""
    lr, beta1, beta2, eps, decay = options
    m = m + (1 - beta1) * (grad - m)
    v = v + (1 - beta2) * (grad * grad - v)
    mean, deviation = m / (1 - beta1**step), (v / (1 - beta2**step)).sqrt()
    return weight * (1 - lr * decay) - lr * mean / (deviation + eps), m, v


def _store(weight: Tensor, updated: Tensor) -> None:
    weight.copy_(round_at_random(updated) if weight.dtype == torch.bfloat16 else updated)


def _update_bf16(weight: Tensor, grad: Tensor, m: Tensor, v: Tensor, step: Tensor, options: Options) -> None:
    updated, *moments = _updated(weight.float(), grad.float(), m.float(), v.float(), step, options)
    _store(weight, updated)
    m.copy_(round_at_random(moments[0]))
    v.copy_(round_at_random(moments[1]))


def _update_8bit(
    weight: Tensor, grad: Tensor, codes1: Tensor, codes2: Tensor, scale1: Tensor, scale2: Tensor, step: Tensor, options
) -> None:
    if weight.shape[1] != BLOCK:  # this check makes the row length static for the compiler; the row count stays dynamic
        raise ValueError(f"rows are {weight.shape[1]} numbers long; they must be blocks of {BLOCK}")
    m, v = unpack(codes1, scale1, 2, 127), unpack(codes2, scale2, 4, 255)
    updated, m, v = _updated(weight.float(), grad.float(), m, v, step, options)
    _store(weight, updated)
    for value, codes, scale, power, steps in ((m, codes1, scale1, 2, 127), (v, codes2, scale2, 4, 255)):
        new_codes, new_scale = pack(value, power, steps, codes.dtype)
        codes.copy_(new_codes)
        scale.copy_(new_scale)


@functools.cache
def _compiled(update: Callable[..., None]) -> Callable[..., None]:
    return torch.compile(update, dynamic=True)
