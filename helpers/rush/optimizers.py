"""AdamW in seven variants: from a launch for each operation on each tensor to one for all, and with a smaller state.

for-loop          torch.optim.AdamW, an operation at a time on a parameter at a time
foreach           an operation at a time on all parameters
fused             torch's kernel for all of it
apex              NVIDIA's FusedAdam
triton            ours: `kernels.AdamW`
bf16-state 8-bit  `SmallStateAdamW`

The first five compute the same; what differs is how often a number is read and written, and how many launches that
takes. The least is `LEAST_BYTES` a parameter.

`SmallStateAdamW` has its two moments in bf16 (4 bytes a parameter) or in 8 bits (2.03) instead of fp32 (8).

Bytes that a step must move for each parameter of an fp32 model (read and write the weight and both moments, read the
gradient): 28 with fp32 moments, 20 with bf16, 16 with 8 bits. With weights and gradients in bf16 it is 14 and 10.

Rounding is random (a number between two steps goes up as often as it is near the upper one), for a running mean with
a decay of 0.999 moves by less than half a step of bf16, and rounded to nearest would not move at all. A weight in bf16
is rounded in the same way. So runs differ in these bits unless the seed is the same.

In 8 bits, each 256 numbers share a scale, their largest magnitude. The first moment is stored as its signed square
root in ±127 steps, the second as its fourth root in 255: both are fine near zero, where most numbers are. A second
moment above zero is never stored as zero, which would divide by ε alone. The codes follow from a formula, so there is
no table to look up, and the compiler makes one kernel of unpacking, update and packing: of all tensors as rows of 256,
for only where it knows the length of a row does it keep a row on the chip between its scale and its codes.
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
LEAST_BYTES = 28  # fp32: parameter and two moments in and out, gradient in

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
    """An optimizer over parameters; what it needs is in `NEEDS`. `capturable` lets a CUDA graph capture torch's own."""
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
    """AdamW whose moments are kept in bf16 or in 8 bits, and computed with in fp32.

    A parameter whose size isn't a multiple of 256 keeps bf16 moments, as 8 bits would split a block. On CUDA the update
    of a parameter is one compiled kernel (compiled once for each kind of parameter, for any size). The step count is
    on the device: nothing is read on the host, and a step can be captured in a CUDA graph.
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
            state |= self._fresh(parameter)
        state["step"] += 1
        update, shape = (_update_8bit, (-1, BLOCK)) if "scale1" in state else (_update_bf16, (-1,))
        run = _compiled(update) if parameter.is_cuda else update
        moments = [value if "scale" in name else value.view(shape) for name, value in state.items() if name != "step"]
        run(parameter.view(shape), parameter.grad.reshape(shape), *moments, state["step"], options)

    def _fresh(self, parameter: Tensor) -> dict[str, Tensor]:
        """The state of a parameter that has not been updated yet, flat."""
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
        """As any optimizer's, but the moments keep their types, where torch casts them to the parameter's."""
        super().load_state_dict(state_dict)
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, packed in state_dict["state"].items():
            parameter = parameters[index]
            self.state[parameter] = {name: value.to(parameter.device, copy=True) for name, value in packed.items()}


def pack(x: Tensor, power: int, steps: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes of numbers (blocks, 256) and the blocks' scales: |code| = steps · (|x| / scale)^(1/power), rounded at
    random. With `torch.uint8`, for numbers that are not negative, what is above 0 gets a code of at least 1."""
    scale = x.abs().amax(dim=1)  # (blocks,)
    share = x.abs() / scale.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
    for _ in range(power.bit_length() - 1):
        share = share.sqrt()
    code = (share * steps + torch.rand_like(share)).floor().clamp(max=steps)
    code = code.clamp(min=1) * (x > 0) if dtype == torch.uint8 else code * x.sign()
    return code.to(dtype), scale


def unpack(codes: Tensor, scale: Tensor, power: int, steps: int) -> Tensor:
    """The numbers (blocks, 256) that `pack` stored, in fp32."""
    share = codes.float() / steps
    magnitude = share.abs()
    for _ in range(power.bit_length() - 1):
        magnitude = magnitude * magnitude
    return magnitude * share.sign() * scale[:, None]


def round_at_random(x: Tensor) -> Tensor:
    """fp32 to bf16, up or down with the odds that make the mean exact."""
    bits = x.view(torch.int32)  # bf16 is the upper half: what is added to the lower half carries over now and then
    noise = torch.randint(0, 2**16, x.shape, dtype=torch.int32, device=x.device)
    rounded = ((bits + noise) & -65536).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x).to(torch.bfloat16)


def _moved(weight: Tensor, grad: Tensor, m: Tensor, v: Tensor, step: Tensor, options: Options) -> tuple[Tensor, ...]:
    """AdamW in fp32: the new weight and moments."""
    lr, beta1, beta2, eps, decay = options
    m = m + (1 - beta1) * (grad - m)
    v = v + (1 - beta2) * (grad * grad - v)
    mean, deviation = m / (1 - beta1**step), (v / (1 - beta2**step)).sqrt()
    return weight * (1 - lr * decay) - lr * mean / (deviation + eps), m, v


def _store(weight: Tensor, moved: Tensor) -> None:
    weight.copy_(round_at_random(moved) if weight.dtype == torch.bfloat16 else moved)


def _update_bf16(weight: Tensor, grad: Tensor, m: Tensor, v: Tensor, step: Tensor, options: Options) -> None:
    moved, *moments = _moved(weight.float(), grad.float(), m.float(), v.float(), step, options)
    _store(weight, moved)
    m.copy_(round_at_random(moments[0]))
    v.copy_(round_at_random(moments[1]))


def _update_8bit(
    weight: Tensor, grad: Tensor, codes1: Tensor, codes2: Tensor, scale1: Tensor, scale2: Tensor, step: Tensor, options
) -> None:
    if weight.shape[1] != BLOCK:  # checked, it is known to the compiler, whatever the number of rows
        raise ValueError(f"rows are {weight.shape[1]} numbers long; they must be blocks of {BLOCK}")
    m, v = unpack(codes1, scale1, 2, 127), unpack(codes2, scale2, 4, 255)
    moved, m, v = _moved(weight.float(), grad.float(), m, v, step, options)
    _store(weight, moved)
    for value, codes, scale, power, steps in ((m, codes1, scale1, 2, 127), (v, codes2, scale2, 4, 255)):
        new_codes, new_scale = pack(value, power, steps, codes.dtype)
        codes.copy_(new_codes)
        scale.copy_(new_scale)


@functools.cache
def _compiled(update: Callable[..., None]) -> Callable[..., None]:
    return torch.compile(update, dynamic=True)
