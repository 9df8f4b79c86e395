"""Loss scaling by hand: gradients too small for fp16 are lifted into its range, and put back before they are used.

    scaler = DynamicGradScaler()
    for batch in loader:
        optimizer.zero_grad()
        with Autocast():
            loss = model(batch)
        scaler.scale(loss).backward()
        scaler.clip_grad_norm_(optimizer, 1.0)      # optional
        scaler.step(optimizer)
        scaler.update()

What it costs beyond the optimizer's step, for P parameters with fp32 gradients:

    optimizer      without clipping                       with clipping
    fused          4P read, 4P written by the step        the same
    not fused      12P read and written, one wait         12P read and written, one wait

With a fused optimizer (`fused=True`) nothing waits for the GPU: one pass that only reads is the norm and the check
for inf at once, and the optimizer's own kernel divides by the scale, clips, and skips. Any other optimizer is stepped
or not by Python, which has to know, so the host waits once a step. `readable=True` is the same in plain tensor
operations, one gradient after another, with the wait.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from . import fast
from . import readable as plain


class Stage(Enum):
    """What has been done to an optimizer's gradients since the last `update`."""

    SCALED = 0
    CLIPPED = 1  # a norm was taken, and the fused step will divide and clip
    UNSCALED = 2
    STEPPED = 3


@dataclass
class _State:
    stage: Stage = Stage.SCALED
    found_inf: dict[torch.device, Tensor] = field(default_factory=dict)
    divisor: Tensor | None = None  # what the fused step divides gradients by, to unscale and clip them


class StaticGradScaler:
    """Scales by the same factor all the time. A step whose gradients hold an inf or a NaN is skipped.

    `skipped_steps()` counts those. Too small a scale loses small gradients, too large a one skips every step:
    `DynamicGradScaler` finds the largest that works by itself.
    """

    def __init__(self, scale: float = 2.0**12, *, enabled: bool = True, readable: bool = False) -> None:
        self._initial_scale = positive("scale", scale)
        self._enabled = enabled
        self._readable = readable
        self._operations: ModuleType = plain if readable else fast
        self._scale: Tensor | None = None  # 0-dimensional fp32, on the device of the first loss
        self._skipped: Tensor | None = None
        self._states: dict[int, _State] = {}

    def is_enabled(self) -> bool:
        return self._enabled

    def get_scale(self) -> float:
        """The scale. Waits for the GPU."""
        if not self._enabled:
            return 1.0
        return self._initial_scale if self._scale is None else float(self._scale)

    def skipped_steps(self) -> int:
        """How many optimizer steps were skipped so far. Waits for the GPU."""
        return 0 if self._skipped is None else int(self._skipped)

    def scale(self, outputs: Any) -> Any:
        """Multiply a tensor, or each tensor of a nested iterable, by the scale."""
        if not self._enabled:
            return outputs
        if isinstance(outputs, Tensor):
            if self._scale is None:
                self._start(outputs.device)
            return outputs * self._scale.to(outputs.device, non_blocking=True)
        if isinstance(outputs, Mapping):
            return {name: self.scale(value) for name, value in outputs.items()}
        if isinstance(outputs, tuple) and hasattr(outputs, "_fields"):
            return type(outputs)(*map(self.scale, outputs))
        if isinstance(outputs, (list, tuple)):
            return type(outputs)(map(self.scale, outputs))
        if isinstance(outputs, Iterable):
            return map(self.scale, outputs)
        raise ValueError(f"scale takes a tensor or an iterable of tensors, not {type(outputs).__name__}")

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the optimizer's gradients by the scale, in place, to look at them or to change them."""
        if not self._enabled:
            return
        state = self._state(optimizer, "unscale_")
        if state.stage is not Stage.SCALED:
            raise RuntimeError(f"unscale_ after {_done(state)}: call it once, before step, then update")
        self._multiply(optimizer, state, None)
        state.stage = Stage.UNSCALED

    def clip_grad_norm_(self, optimizer: Optimizer, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the optimizer's gradients so that their norm is `max_norm` at most; returns the true norm.

        It is the norm of the gradients without the scale, on their device, not read on the host. With a fused
        optimizer nothing is written: the step divides and clips in one. A sum of squares that overflows fp32
        (a scaled gradient above 1e19) counts as inf, and the step is skipped.
        """
        max_norm = positive("max_norm", max_norm, allow_inf=True)
        if not self._enabled:
            return torch.nn.utils.clip_grad_norm_(_parameters(optimizer), max_norm, norm_type)
        state = self._state(optimizer, "clip_grad_norm_")
        if state.stage in (Stage.CLIPPED, Stage.STEPPED):
            raise RuntimeError(f"clip_grad_norm_ after {_done(state)}: call it once, before step")
        by_device = _gradients(optimizer)
        norms = {device: self._operations.norm(grads, norm_type) for device, grads in by_device.items()}
        total = self._together(norms, lambda found: torch.linalg.vector_norm(found, norm_type))
        if state.stage is Stage.SCALED:
            state.found_inf = {device: self._operations.not_finite(norm) for device, norm in norms.items()}
            total = total / self._scale
        excess = torch.clamp((total + 1e-6) / max_norm, min=1.0)  # what the gradients are to be divided by
        if state.stage is Stage.UNSCALED:
            clip = excess.reciprocal()
            for device, grads in by_device.items():
                self._operations.multiply_(grads, clip.to(device, non_blocking=True))
        elif self._hands_over(optimizer):
            state.stage, state.divisor = Stage.CLIPPED, self._scale * excess
        else:
            self._multiply(optimizer, state, excess)
            state.stage = Stage.UNSCALED
        return total

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """`optimizer.step(*args, **kwargs)` on unscaled gradients, or nothing if one of them isn't finite."""
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        if args or "closure" in kwargs:
            raise RuntimeError("step takes no closure: a scaled loss cannot be evaluated again inside the step")
        state = self._state(optimizer, "step")
        if state.stage is Stage.STEPPED:
            raise RuntimeError("step after step: call update once all optimizers have stepped")
        if self._hands_over(optimizer):
            result = self._fused_step(optimizer, state, kwargs)
        else:
            if state.stage is Stage.SCALED:
                self.unscale_(optimizer)
            skip = bool(sum(found.item() for found in state.found_inf.values()))
            result = None if skip else optimizer.step(**kwargs)
        state.stage = Stage.STEPPED
        return result

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """End an iteration: count what was skipped, and set the scale if a new one is given."""
        if not self._enabled:
            return
        if self._scale is None:
            raise RuntimeError("update before scale: call scaler.scale(loss).backward() and scaler.step first")
        if new_scale is not None:
            self._set(new_scale)
        else:
            self._finish(self._found_inf_of_all())
        self._states.clear()

    def state_dict(self) -> dict[str, Any]:
        """What it takes to go on from here. Waits for the GPU. Empty if disabled."""
        return {"scale": self.get_scale()} if self._enabled else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if not self._enabled:
            return
        if not state:
            raise RuntimeError("the state is empty: it was saved by a scaler that was disabled")
        self._initial_scale = positive("scale", state["scale"])
        if self._scale is not None:
            self._scale.fill_(self._initial_scale)

    def _start(self, device: torch.device) -> None:
        self._scale = torch.full((), self._initial_scale, dtype=torch.float32, device=device)
        self._skipped = torch.zeros((), dtype=torch.float32, device=device)

    def _finish(self, found_inf: Tensor) -> None:
        """What `update` does with the news; `found_inf` is 1 if any optimizer's gradients were not finite, else 0."""
        self._skipped.add_(found_inf)

    def _set(self, new_scale: float | Tensor) -> None:
        if not isinstance(new_scale, Tensor):
            self._scale.fill_(positive("new_scale", new_scale))
        elif new_scale.numel() != 1 or new_scale.requires_grad or not new_scale.is_floating_point():
            raise ValueError("new_scale must be a floating-point tensor with one element and no gradient")
        else:
            self._scale.copy_(new_scale.reshape(()))

    def _inverse(self) -> Tensor:
        """1 / scale, rounded once."""
        return self._scale.double().reciprocal().float()

    def _state(self, optimizer: Optimizer, what: str) -> _State:
        if self._scale is None:
            raise RuntimeError(f"{what} before scale: call scaler.scale(loss).backward() first")
        return self._states.setdefault(id(optimizer), _State())

    def _hands_over(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer's kernel takes over dividing, clipping and skipping.

        Not in the first step of torch's fused SGD with momentum: if its kernel skips that one, it leaves the momentum
        uninitialised (seen in torch 2.13), and later steps use what happened to lie there.
        """
        if self._readable or not getattr(optimizer, "_step_supports_amp_scaling", False):
            return False
        return not isinstance(optimizer, torch.optim.SGD) or bool(optimizer.state) or not optimizer.defaults["momentum"]

    def _multiply(self, optimizer: Optimizer, state: _State, excess: Tensor | None) -> None:
        """Unscale in place, and clip in the same pass; look for inf if nobody has yet."""
        factor = self._inverse() if excess is None else self._inverse() / excess
        for device, grads in _gradients(optimizer).items():
            if device not in state.found_inf:
                state.found_inf[device] = self._operations.found_inf(grads)
            self._operations.multiply_(grads, factor.to(device, non_blocking=True))

    def _fused_step(self, optimizer: Optimizer, state: _State, kwargs: dict[str, Any]) -> Any:
        """Let the optimizer's kernel divide, clip and skip: nothing is read on the host."""
        if state.stage is Stage.SCALED:
            state.found_inf = {device: fast.found_inf(grads) for device, grads in _gradients(optimizer).items()}
        optimizer.found_inf = self._together(state.found_inf, torch.amax)
        optimizer.grad_scale = None
        if state.stage is not Stage.UNSCALED:
            optimizer.grad_scale = self._scale if state.divisor is None else state.divisor
        try:
            return optimizer.step(**kwargs)
        finally:
            del optimizer.grad_scale, optimizer.found_inf

    def _found_inf_of_all(self) -> Tensor:
        states = self._states.items()
        found = {(which, device): tensor for which, state in states for device, tensor in state.found_inf.items()}
        if not found:
            raise RuntimeError("update without step: call scaler.step(optimizer) (or unscale_) first")
        return self._together(found, torch.amax)

    def _together(self, found: Mapping[Any, Tensor], reduce: Callable[[Tensor], Tensor]) -> Tensor:
        """One number of several, on the scale's device. A flag stays 0 or 1: fused kernels skip at 1, not at 2."""
        if len(found) == 1:
            (only,) = found.values()
            return only.to(self._scale.device, non_blocking=True).float()
        home = [tensor.to(self._scale.device, non_blocking=True).float() for tensor in found.values()]
        return reduce(torch.stack(home))


def positive(name: str, value: float, allow_inf: bool = False) -> float:
    number = float(value)
    if not number > 0 or (math.isinf(number) and not allow_inf):
        raise ValueError(f"{name} is {value}; it must be above 0" + ("" if allow_inf else " and finite"))
    return number


def _done(state: _State) -> str:
    return {Stage.CLIPPED: "clip_grad_norm_", Stage.UNSCALED: "unscale_", Stage.STEPPED: "step"}[state.stage]


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _gradients(optimizer: Optimizer) -> dict[torch.device, list[Tensor]]:
    """The optimizer's gradients by device; of sparse ones the values, each index once."""
    found: dict[torch.device, list[Tensor]] = {}
    for parameter in _parameters(optimizer):
        grad = parameter.grad
        if grad is None or grad.numel() == 0:
            continue
        if grad.dtype == torch.float16:
            raise ValueError(
                "a gradient is in fp16: keep the parameters in fp32 and use Autocast; a model in pure fp16 has no "
                "precision left to unscale into"
            )
        if grad.is_sparse:
            parameter.grad = grad = grad.coalesce()
            grad = grad._values()
        found.setdefault(grad.device, []).append(grad)
    if not found:
        raise RuntimeError("the optimizer has no gradients: call scaler.scale(loss).backward() first")
    return found
