"""Loss scaling: the loss is multiplied so that small gradients don't underflow in fp16, and gradients are divided back.

    scaler = DynamicGradScaler()
    for batch in loader:
        optimizer.zero_grad()
        with Autocast():
            loss = model(batch)
        scaler.scale(loss).backward()
        scaler.clip_grad_norm_(optimizer, 1.0)      # optional
        scaler.step(optimizer)
        scaler.update()

The cost on top of the optimizer's step, with or without clipping, in bytes for P parameters with fp32 gradients:

    fused optimizer     4P read, and 4P written by the step
    any other           12P read and written, and one wait for the GPU

With a fused optimizer (`fused=True`) nothing waits for the GPU: one read-only pass computes the norm, which also
detects inf and NaN, and the optimizer's kernel divides by the scale, clips, and skips. For any other optimizer Python
decides whether to step, so the host waits once a step.
"""

import math
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, get_total_norm
from torch.optim import Optimizer

from helpers.lab.arguments import check_positive


class Stage(Enum):
    """The last call for an optimizer since `update`."""

    SCALED = "scale"
    CLIPPED = "clip_grad_norm_"  # a norm was taken, and the fused step will divide and clip
    UNSCALED = "unscale_"
    STEPPED = "step"


@dataclass
class _State:
    stage: Stage = Stage.SCALED
    found_inf: Tensor | None = None  # 1.0 if a gradient has an inf or a NaN, else 0.0; on the scale's device
    divisor: Tensor | None = None  # the fused step divides gradients by it, to unscale and clip them


class StaticGradScaler:
    """Scales by a constant factor. Steps with an inf or a NaN in a gradient are skipped; `skipped_steps()` counts them.

    With too small a scale small gradients underflow, with too large a scale every step is skipped: `DynamicGradScaler`
    finds the largest that works.
    """

    def __init__(self, scale: float = 2.0**12, *, enabled: bool = True) -> None:
        self._enabled = enabled
        self._scale = torch.tensor(_positive("scale", scale), dtype=torch.float32)  # moves to the first loss's device
        self._skipped = torch.zeros(())
        self._started = False
        self._states: dict[int, _State] = {}

    def scale(self, outputs: Any) -> Any:
        """Multiply a tensor, or each tensor of a nested iterable, by the scale."""
        if not self._enabled:
            return outputs
        if isinstance(outputs, Tensor):
            if not self._started:
                self._move(outputs.device)
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
        """Divide the optimizer's gradients by the scale, in place, so that they can be inspected or changed."""
        if not self._enabled:
            return
        state = self._state(optimizer, "unscale_")
        if state.stage is not Stage.SCALED:
            raise RuntimeError(f"unscale_ after {state.stage.value}: call it once, before step, then update")
        grads = _gradients(optimizer)
        state.found_inf = self._found_inf(grads)
        _multiply_(grads, self._scale.double().reciprocal().float())  # rounded once
        state.stage = Stage.UNSCALED

    def clip_grad_norm_(self, optimizer: Optimizer, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the optimizer's gradients to a norm of `max_norm`; returns their norm before that.

        It is the norm of the gradients without the scale, as a tensor on their device. With a fused optimizer no
        gradient is written: the step divides and clips at once. A sum of squares that overflows fp32
        (a scaled gradient above 1e19) counts as inf, and the step is skipped.
        """
        max_norm = _positive("max_norm", max_norm, allow_inf=True)
        if not self._enabled:
            return clip_grad_norm_(
                [p for group in optimizer.param_groups for p in group["params"]], max_norm, norm_type
            )
        state = self._state(optimizer, "clip_grad_norm_")
        if state.stage in (Stage.CLIPPED, Stage.STEPPED):
            raise RuntimeError(f"clip_grad_norm_ after {state.stage.value}: call it once, before step")
        grads = _gradients(optimizer)
        norm = get_total_norm(grads, norm_type)  # one read-only pass over the gradients
        true_norm = self._to_scale_device(norm)
        if state.stage is Stage.SCALED:
            state.found_inf = self._to_scale_device(_not_finite(norm))
            true_norm = true_norm / self._scale
        excess = torch.clamp((true_norm + 1e-6) / max_norm, min=1.0)  # the divisor for clipping
        if state.stage is Stage.UNSCALED:
            _multiply_(grads, excess.reciprocal())
        elif _hands_over(optimizer):
            state.stage, state.divisor = Stage.CLIPPED, self._scale * excess
        else:
            _multiply_(grads, self._scale.double().reciprocal().float() / excess)
            state.stage = Stage.UNSCALED
        return true_norm

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """`optimizer.step(*args, **kwargs)` on unscaled gradients, or nothing if one of them isn't finite."""
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        if args or "closure" in kwargs:
            raise RuntimeError("step takes no closure: a scaled loss cannot be evaluated again inside the step")
        state = self._state(optimizer, "step")
        if state.stage is Stage.STEPPED:
            raise RuntimeError("step after step: call update once all optimizers have stepped")
        if _hands_over(optimizer):
            result = self._fused_step(optimizer, state, kwargs)
        else:
            if state.stage is Stage.SCALED:
                self.unscale_(optimizer)
            result = None if state.found_inf.item() else optimizer.step(**kwargs)  # the host waits here
        state.stage = Stage.STEPPED
        return result

    def _fused_step(self, optimizer: Optimizer, state: _State, kwargs: dict[str, Any]) -> Any:
        """Let the optimizer's kernel divide, clip and skip, without waiting.

        torch's fused optimizers read two attributes, as `torch.amp.GradScaler` sets them: they divide gradients by
        `grad_scale`, and do nothing where `found_inf` is 1 (and no other number).
        """
        if state.stage is Stage.SCALED:
            state.found_inf = self._found_inf(_gradients(optimizer))
            state.divisor = self._scale
        optimizer.found_inf, optimizer.grad_scale = state.found_inf, state.divisor
        try:
            return optimizer.step(**kwargs)
        finally:
            del optimizer.grad_scale, optimizer.found_inf

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """End an iteration: count a skipped step and adapt the scale, or set it if a new one is given."""
        if not self._enabled:
            return
        if not self._started:
            raise RuntimeError("update before scale: call scaler.scale(loss).backward() and scaler.step first")
        if new_scale is None:
            flags = [state.found_inf for state in self._states.values() if state.found_inf is not None]
            if not flags:
                raise RuntimeError("update without step: call scaler.step(optimizer) (or unscale_) first")
            self._adapt(flags[0] if len(flags) == 1 else torch.stack(flags).amax())
        elif not isinstance(new_scale, Tensor):
            self._scale.fill_(_positive("new_scale", new_scale))
        elif new_scale.numel() != 1 or new_scale.requires_grad or not new_scale.is_floating_point():
            raise ValueError("new_scale must be a floating-point tensor with one element and no gradient")
        else:
            self._scale.copy_(new_scale.reshape(()))
        self._states.clear()

    def _adapt(self, found_inf: Tensor) -> None:
        """Update the state after an iteration; `found_inf` is 1 if any gradient was inf or NaN, else 0."""
        self._skipped.add_(found_inf)

    def is_enabled(self) -> bool:
        return self._enabled

    def get_scale(self) -> float:
        """The scale. Waits for the GPU."""
        return float(self._scale) if self._enabled else 1.0

    def skipped_steps(self) -> int:
        """The number of skipped steps. Waits for the GPU."""
        return int(self._skipped)

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint. Waits for the GPU. Empty if disabled."""
        return {"scale": self.get_scale()} if self._enabled else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if not self._enabled:
            return
        if not state:
            raise RuntimeError("the state is empty: it was saved by a scaler that was disabled")
        self._scale.fill_(_positive("scale", state["scale"]))

    def _move(self, device: torch.device) -> None:
        """Move the state to the device, where it is used without waiting."""
        self._scale, self._skipped, self._started = self._scale.to(device), self._skipped.to(device), True

    def _state(self, optimizer: Optimizer, caller: str) -> _State:
        if not self._started:
            raise RuntimeError(f"{caller} before scale: call scaler.scale(loss).backward() first")
        return self._states.setdefault(id(optimizer), _State())

    def _found_inf(self, grads: list[Tensor]) -> Tensor:
        """1.0 if any gradient has an inf or a NaN, else 0.0: their largest magnitude isn't finite then."""
        return self._to_scale_device(_not_finite(get_total_norm(grads, math.inf)))

    def _to_scale_device(self, number: Tensor) -> Tensor:
        return number.to(self._scale.device, torch.float32, non_blocking=True)


class DynamicGradScaler(StaticGradScaler):
    """Adapts the scale: it grows after `growth_interval` steps in a row without inf or NaN, and shrinks after one with.

    It stays between `min_scale` and `max_scale`; `update` also clamps one that was set or loaded. Warns once if
    gradients overflow even at `min_scale`. The state is on the GPU, so the scale also adapts in a replayed CUDA graph.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        min_scale: float = 1.0,
        max_scale: float = 2.0**24,
        *,
        enabled: bool = True,
    ) -> None:
        super().__init__(init_scale, enabled=enabled)
        if not (math.isfinite(growth_factor) and growth_factor > 1):
            raise ValueError(f"growth_factor is {growth_factor}; it must be above 1")
        if not 0 < backoff_factor < 1:
            raise ValueError(f"backoff_factor is {backoff_factor}; it must be between 0 and 1")
        check_positive(growth_interval=growth_interval)
        self._min_scale = _positive("min_scale", min_scale)
        self._max_scale = _positive("max_scale", max_scale, allow_inf=True)
        if not min_scale <= init_scale <= max_scale:
            given = f"init_scale is {init_scale:g}"
            raise ValueError(f"{given}; it must be from min_scale, {min_scale:g}, to max_scale, {max_scale:g}")
        self._growth_factor, self._backoff_factor = float(growth_factor), float(backoff_factor)
        self._growth_interval = growth_interval
        self._good_steps = torch.zeros((), dtype=torch.int32)  # in a row
        self._at_minimum = torch.zeros(())  # 1.0 if the scale is `min_scale`
        self._overflows = torch.zeros(())  # steps that overflowed at `min_scale`
        self._overflows_on_host = torch.zeros(())
        self._warned = False

    def _adapt(self, found_inf: Tensor) -> None:
        super()._adapt(found_inf)
        torch.le(self._scale, self._min_scale, out=self._at_minimum)
        self._overflows.addcmul_(found_inf, self._at_minimum)
        rule = self._growth_factor, self._backoff_factor, self._growth_interval
        torch._amp_update_scale_(self._scale, self._good_steps, found_inf, *rule)  # torch.amp.GradScaler's own kernel
        self._scale.clamp_(self._min_scale, self._max_scale)
        if not self._warned and self._overflows_on_host.numpy()[()] > 0:
            self._warned = True
            message = f"gradients are not finite even at the smallest scale, {self._min_scale:g}: steps are skipped"
            warnings.warn(f"{message}; look for a diverged model or bad data", RuntimeWarning, stacklevel=3)
        self._overflows_on_host.copy_(self._overflows, non_blocking=True)  # no wait: a warning is some steps late

    def state_dict(self) -> dict[str, Any]:
        """With the names of torch.amp.GradScaler, so that either loads the other's."""
        if not self._enabled:
            return {}
        return super().state_dict() | {
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval,
            "_growth_tracker": int(self._good_steps),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        if self._enabled:
            self._growth_factor, self._backoff_factor = state["growth_factor"], state["backoff_factor"]
            self._growth_interval = state["growth_interval"]
            self._good_steps.fill_(state["_growth_tracker"])

    def _move(self, device: torch.device) -> None:
        super()._move(device)
        self._good_steps = self._good_steps.to(device)
        self._at_minimum, self._overflows = self._at_minimum.to(device), self._overflows.to(device)
        self._overflows_on_host = torch.zeros((), pin_memory=device.type == "cuda")


def _positive(name: str, value: float, allow_inf: bool = False) -> float:
    number = float(value)
    if not number > 0 or (math.isinf(number) and not allow_inf):
        raise ValueError(f"{name} is {value}; it must be above 0" + ("" if allow_inf else " and finite"))
    return number


def _hands_over(optimizer: Optimizer) -> bool:
    """Whether the optimizer's kernel divides, clips and skips.

    Not in the first step of torch's fused SGD with momentum: if its kernel skips that step, it leaves the momentum
    buffers uninitialised (seen in torch 2.13), and later steps use them.
    """
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    return not isinstance(optimizer, torch.optim.SGD) or bool(optimizer.state) or not optimizer.defaults["momentum"]


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _gradients(optimizer: Optimizer) -> list[Tensor]:
    """The optimizer's gradients; for sparse ones their coalesced values."""
    grads: list[Tensor] = []
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
        grads.append(grad)
    if not grads:
        raise RuntimeError("the optimizer has no gradients: call scaler.scale(loss).backward() first")
    return grads


def _multiply_(grads: list[Tensor], factor: Tensor) -> None:
    """Multiply gradients in place by a 0-dimensional factor, in a few launches for any number of them."""
    for device in {grad.device for grad in grads}:
        torch._foreach_mul_([grad for grad in grads if grad.device == device], factor.to(device, non_blocking=True))


def _not_finite(number: Tensor) -> Tensor:
    """1.0 if a number is inf or NaN, else 0.0, in fp32: both times 0 are NaN."""
    return torch.nan_to_num((number * 0.0).float(), nan=1.0)
