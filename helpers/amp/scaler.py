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
decides whether to step, so the host waits once a step, and a CUDA graph can't capture it: `step` refuses.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from .gradients import gradients, multiply_, not_finite, parameters, total_norm

# The state of an optimizer since `update`, laid out as torch.amp.GradScaler's, which some libraries read. If
# `clip_grad_norm_` has left the gradients as they are, "divisor" is what the fused step divides them by.
_LAST_CALL = {OptState.READY: "scale", OptState.UNSCALED: "unscale_", OptState.STEPPED: "step"}


def _new_state() -> dict[str, Any]:
    return {"stage": OptState.READY, "found_inf_per_device": {}}


def _last_call(state: dict[str, Any]) -> str:
    clipped = state["stage"] is OptState.READY and "divisor" in state
    return "clip_grad_norm_" if clipped else _LAST_CALL[state["stage"]]


class StaticGradScaler:
    """Scales by a constant factor. Steps with an inf or a NaN in a gradient are skipped; `skipped_steps()` counts them.

    With too small a scale small gradients underflow, with too large a scale every step is skipped: `DynamicGradScaler`
    finds the largest that works. A scaler can be copied, pickled and saved by torch.save after `update`.
    """

    def __init__(self, scale: float = 2.0**12, *, enabled: bool = True) -> None:
        self._enabled = enabled
        # Numbers on the host until the first loss, then tensors on its device.
        self._init_scale, self._init_skipped = fp32("scale", scale), 0
        self._scale: Tensor | None = None
        self._skipped: Tensor | None = None
        self._per_optimizer_states: dict[int, dict[str, Any]] = defaultdict(_new_state)

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
        """Divide the optimizer's gradients by the scale, in place, so that they can be inspected or changed."""
        if not self._enabled:
            return
        state = self._state(optimizer, "unscale_")
        if _last_call(state) != "scale":
            raise RuntimeError(f"unscale_ after {_last_call(state)}: call it once, before step, then update")
        grads = gradients(optimizer)
        self._record(state, total_norm(grads, math.inf))
        multiply_(grads, _reciprocal(self._scale))
        state["stage"] = OptState.UNSCALED

    def clip_grad_norm_(
        self, optimizer: Optimizer, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Clip the optimizer's gradients to a norm of `max_norm`; returns their norm before that.

        It is the norm of the gradients without the scale, as a tensor on their device. With a fused optimizer no
        gradient is written: the step divides and clips at once. A sum of squares that overflows fp32
        (a scaled gradient above 1e19) counts as inf, and the step is skipped, or it is a RuntimeError if
        `error_if_nonfinite`, for which the host waits.
        """
        max_norm = positive("max_norm", max_norm, allow_inf=True)
        if not self._enabled:
            return clip_grad_norm_(parameters(optimizer), max_norm, norm_type, error_if_nonfinite)
        state = self._state(optimizer, "clip_grad_norm_")
        if _last_call(state) in ("clip_grad_norm_", "step"):
            raise RuntimeError(f"clip_grad_norm_ after {_last_call(state)}: call it once, before step")
        grads = gradients(optimizer)
        norm = total_norm(grads, norm_type)
        if error_if_nonfinite and not math.isfinite(norm):
            raise RuntimeError(f"the gradients' norm is {norm.item()}; without error_if_nonfinite the step is skipped")
        true_norm = self._to_scale_device(norm)
        unscaled = state["stage"] is OptState.UNSCALED
        if not unscaled:
            self._record(state, norm)
            true_norm = true_norm / self._scale
        excess = torch.clamp((true_norm + 1e-6) / max_norm, min=1.0)  # the divisor for clipping
        if unscaled:
            multiply_(grads, excess.reciprocal())
        elif _hands_over(optimizer):
            state["divisor"] = self._scale * excess
        else:
            multiply_(grads, _reciprocal(self._scale) / excess)
            state["stage"] = OptState.UNSCALED
        return true_norm

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """`optimizer.step(*args, **kwargs)` on unscaled gradients, or nothing if one of them isn't finite."""
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        if any(map(callable, args)) or kwargs.get("closure") is not None:
            raise RuntimeError("step takes no closure: a scaled loss cannot be evaluated again inside the step")
        state = self._state(optimizer, "step")
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("step after step: call update once all optimizers have stepped")
        if _hands_over(optimizer):
            result = self._fused_step(optimizer, state, args, kwargs)
        else:
            if _is_captured(self._scale):
                fused = getattr(optimizer, "_step_supports_amp_scaling", False)
                raise RuntimeError(
                    f"the host decides whether this {type(optimizer).__name__} steps, so no CUDA graph can capture it: "
                    + ("take its first step outside of the capture" if fused else "build the optimizer with fused=True")
                )
            if state["stage"] is OptState.READY:
                self.unscale_(optimizer)
            found_inf = self._found_inf(state).item()  # the host waits here
            result = None if found_inf else optimizer.step(*args, **kwargs)
        state["stage"] = OptState.STEPPED
        return result

    def _fused_step(self, optimizer: Optimizer, state: dict[str, Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Let the optimizer's kernel divide, clip and skip, without waiting.

        torch's fused optimizers read two attributes, as `torch.amp.GradScaler` sets them: they divide gradients by
        `grad_scale`, and do nothing where `found_inf` is 1 (and no other number).
        """
        if _last_call(state) == "scale":
            self._record(state, total_norm(gradients(optimizer), math.inf))
            state["divisor"] = self._scale
        optimizer.found_inf, optimizer.grad_scale = self._found_inf(state), state.get("divisor")
        try:
            return optimizer.step(*args, **kwargs)
        finally:
            del optimizer.grad_scale, optimizer.found_inf

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """End an iteration: count a skipped step and adapt the scale, or set it if a new one is given.

        A `new_scale` on a GPU is taken as it is: to check it the host would wait.
        """
        if not self._enabled:
            return
        if self._scale is None:
            raise RuntimeError("update before scale: call scaler.scale(loss).backward() and scaler.step first")
        if new_scale is None:
            states = self._per_optimizer_states.values()
            flags = [self._found_inf(state) for state in states if state["found_inf_per_device"]]
            if not flags:
                raise RuntimeError("update without step: call scaler.step(optimizer) (or unscale_) first")
            self._adapt(flags[0] if len(flags) == 1 else torch.stack(flags).amax())
        elif not isinstance(new_scale, Tensor):
            self._scale.fill_(fp32("new_scale", new_scale))
        elif new_scale.numel() != 1 or new_scale.requires_grad or not new_scale.is_floating_point():
            raise ValueError("new_scale must be a floating-point tensor with one element and no gradient")
        else:
            if new_scale.device.type == "cpu":
                fp32("new_scale", new_scale.item())
            self._scale.copy_(new_scale.reshape(()))
        self._per_optimizer_states.clear()

    def _adapt(self, found_inf: Tensor) -> None:
        """Update the state after an iteration; `found_inf` is 1 if any gradient was inf or NaN, else 0."""
        self._skipped.add_(found_inf)

    def is_enabled(self) -> bool:
        return self._enabled

    def get_scale(self) -> float:
        """The scale. Waits for the GPU."""
        return on_host(self._scale, self._init_scale) if self._enabled else 1.0

    def skipped_steps(self) -> int:
        """The number of skipped steps. Waits for the GPU."""
        return int(on_host(self._skipped, self._init_skipped))

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint. Waits for the GPU. Empty if disabled."""
        return {"scale": self.get_scale()} if self._enabled else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state that `state_dict` returned; if part of it is missing or makes no sense, nothing changes."""
        if not self._enabled:
            return
        if not state:
            raise RuntimeError("the state is empty: it was saved by a scaler that was disabled")
        self._check(state)
        self._init_scale = fp32("scale", state["scale"])
        if self._scale is not None:
            self._scale.fill_(self._init_scale)

    def _check(self, state: Mapping[str, Any]) -> None:
        if missing := self.state_dict().keys() - state.keys():
            raise ValueError(f"the state lacks {', '.join(sorted(missing))}")
        fp32("scale", state["scale"])

    def __getstate__(self) -> dict[str, Any]:
        """The attributes for a copy or a pickle, with numbers in place of tensors."""
        if self._per_optimizer_states:
            raise RuntimeError("a scaler can't be copied or pickled in the middle of an iteration: call update first")
        numbers = {"_init_scale": on_host(self._scale, self._init_scale), "_init_skipped": self.skipped_steps()}
        return self.__dict__ | numbers | {"_scale": None, "_skipped": None}

    def _start(self, device: torch.device) -> None:
        """Put the state on the device, where it is used without waiting."""
        self._scale = torch.full((), self._init_scale, dtype=torch.float32, device=device)
        self._skipped = torch.full((), float(self._init_skipped), device=device)

    def _state(self, optimizer: Optimizer, caller: str) -> dict[str, Any]:
        if self._scale is None:
            raise RuntimeError(f"{caller} before scale: call scaler.scale(loss).backward() first")
        return self._per_optimizer_states[id(optimizer)]

    def _record(self, state: dict[str, Any], norm: Tensor) -> None:
        """Note whether a norm of the gradients, and with it any of them, isn't finite: 1.0 if so, else 0.0."""
        state["found_inf_per_device"] = {self._scale.device: self._to_scale_device(not_finite(norm))}

    def _found_inf(self, state: dict[str, Any]) -> Tensor:
        return state["found_inf_per_device"][self._scale.device]

    def _to_scale_device(self, number: Tensor) -> Tensor:
        return number.to(self._scale.device, torch.float32, non_blocking=True)


def positive(name: str, value: float, allow_inf: bool = False) -> float:
    number = float(value)
    if not number > 0 or (math.isinf(number) and not allow_inf):
        raise ValueError(f"{name} is {value}; it must be above 0" + ("" if allow_inf else " and finite"))
    return number


def fp32(name: str, value: float) -> float:
    """A scale, rounded to fp32, in which it is kept; a ValueError if that is 0 or not finite."""
    number = torch.tensor(positive(name, value), dtype=torch.float32).item()
    if not 0 < number < math.inf:
        raise ValueError(f"{name} is {value}, in fp32 {number}; it must be above 0 and finite")
    return number


def on_host(tensor: Tensor | None, otherwise: float) -> float:
    return otherwise if tensor is None else tensor.item()


def _reciprocal(scale: Tensor) -> Tensor:
    """1 / scale, rounded once."""
    return scale.reciprocal() if scale.device.type == "mps" else scale.double().reciprocal().float()


def _is_captured(tensor: Tensor) -> bool:
    """Whether a CUDA graph records what is done with the tensor."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _hands_over(optimizer: Optimizer) -> bool:
    """Whether the optimizer's kernel divides, clips and skips.

    Not in the first step of torch's fused SGD with momentum: if its kernel skips that step, it leaves the momentum
    buffers uninitialised (seen in torch 2.13), and later steps use them.
    """
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    return not isinstance(optimizer, torch.optim.SGD) or bool(optimizer.state) or not optimizer.defaults["momentum"]
