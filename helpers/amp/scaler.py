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

Otherwise as torch's, but for two rare uses: an optimizer whose `step` takes a `grad_scaler` isn't given this one (torch
deprecates it), and a `grad_scale` that was set on a fused optimizer before is replaced.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.nn.utils import clip_grad_norm_, get_total_norm
from torch.optim import Optimizer


def _new_state() -> dict[str, Any]:
    """The state of an optimizer since `update`, laid out as torch.amp.GradScaler's, which some libraries read.

    If `clip_grad_norm_` has left the gradients as they are, "divisor" is what the fused step divides them by.
    """
    return {"stage": OptState.READY, "found_inf_per_device": {}}


class StaticGradScaler:
    """Scales by a constant factor. Steps with an inf or a NaN in a gradient are skipped; `skipped_steps()` counts them.

    With too small a scale small gradients underflow, with too large a scale every step is skipped: `DynamicGradScaler`
    finds the largest that works.
    """

    def __init__(self, scale: float = 2.0**12, *, enabled: bool = True) -> None:
        self._enabled = enabled
        self._init_scale = fp32("scale", scale)
        self._scale: Tensor | None = None  # from the first loss on, on its device, as is the count
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
        if state["stage"] is not OptState.READY or "divisor" in state:
            raise RuntimeError("unscale_ is called once, before clip_grad_norm_ and step")
        grads = gradients(optimizer)
        self._record(state, total_norm(grads, math.inf))
        multiply_(grads, self._scale.reciprocal())
        state["stage"] = OptState.UNSCALED

    def clip_grad_norm_(self, optimizer: Optimizer, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the optimizer's gradients to a norm of `max_norm`; returns their norm before that.

        It is the norm of the gradients without the scale, as a tensor on their device. With a fused optimizer no
        gradient is written: the step divides and clips at once. A sum of squares that overflows fp32
        (a scaled gradient above 1e19) counts as inf, and the step is skipped.
        """
        if not self._enabled:
            return clip_grad_norm_(parameters(optimizer), max_norm, norm_type)
        state = self._state(optimizer, "clip_grad_norm_")
        if state["stage"] is OptState.STEPPED or "divisor" in state:
            raise RuntimeError("clip_grad_norm_ is called once, before step")
        grads = gradients(optimizer)
        norm = total_norm(grads, norm_type)
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
            multiply_(grads, self._scale.reciprocal() / excess)
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
                raise RuntimeError(
                    f"the host decides whether this {type(optimizer).__name__} steps, so no CUDA graph can capture it: "
                    "build the optimizer with fused=True, and take its first step outside of the capture"
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
        if state["stage"] is OptState.READY and "divisor" not in state:
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
        elif isinstance(new_scale, Tensor) and new_scale.device.type != "cpu":
            self._scale.copy_(new_scale.detach().reshape(()))
        else:
            self._scale.fill_(fp32("new_scale", new_scale))
        self._per_optimizer_states.clear()

    def _adapt(self, found_inf: Tensor) -> None:
        """Update the state after an iteration; `found_inf` is 1 if any gradient was inf or NaN, else 0."""
        self._skipped.add_(found_inf)

    def is_enabled(self) -> bool:
        return self._enabled

    def get_scale(self) -> float:
        """The scale. Waits for the GPU."""
        if not self._enabled:
            return 1.0
        return self._init_scale if self._scale is None else self._scale.item()

    def skipped_steps(self) -> int:
        """The number of skipped steps. Waits for the GPU."""
        return 0 if self._skipped is None else int(self._skipped.item())

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint. Waits for the GPU. Empty if disabled."""
        return {"scale": self.get_scale()} if self._enabled else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state that `state_dict` returned."""
        if self._enabled:
            self._init_scale = fp32("scale", state["scale"])
            if self._scale is not None:
                self._scale.fill_(self._init_scale)

    def _start(self, device: torch.device) -> None:
        """Put the state on the device, where it is used without waiting."""
        self._scale = torch.full((), self._init_scale, dtype=torch.float32, device=device)
        self._skipped = torch.zeros((), device=device)

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


def fp32(name: str, value: float | Tensor) -> float:
    """A scale, rounded to fp32, in which it is kept; a ValueError if that is not above 0 and finite."""
    number = torch.tensor(float(value), dtype=torch.float32).item()
    if not 0 < number < math.inf:
        raise ValueError(f"{name} is {value}; it must be above 0 and finite in fp32")
    return number


def _is_captured(tensor: Tensor) -> bool:
    """Whether a CUDA graph records what is done with the tensor."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _hands_over(optimizer: Optimizer) -> bool:
    """Whether the optimizer's kernel divides, clips and skips.

    Not in the first step of torch's fused SGD with momentum: if its kernel skips that step, it leaves the momentum
    buffers uninitialised (seen in torch 2.13), and later steps use them.
    """
    first_momentum = isinstance(optimizer, torch.optim.SGD) and optimizer.defaults["momentum"] and not optimizer.state
    return getattr(optimizer, "_step_supports_amp_scaling", False) and not first_momentum


# An optimizer's gradients may be sparse, or sharded over ranks (`DTensor`, as by FSDP2): a norm is then over all ranks,
# which communicate once, and a product is local.


def gradients(optimizer: Optimizer) -> list[Tensor]:
    """The optimizer's gradients; for sparse ones their coalesced values. Empty ones are left out."""
    with_gradient = [parameter for parameter in parameters(optimizer) if parameter.grad is not None]
    if not with_gradient:
        raise RuntimeError("the optimizer has no gradients: call scaler.scale(loss).backward() first")
    grads = []
    for parameter in with_gradient:
        if parameter.grad.dtype == torch.float16:
            raise ValueError(
                "a gradient is in fp16: keep the parameters in fp32 and use Autocast; a model in pure fp16 has no "
                "precision left to unscale into"
            )
        if parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()
        grads.append(parameter.grad._values() if parameter.grad.is_sparse else parameter.grad)
    return [grad for grad in grads if grad.numel() > 0]


def parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def total_norm(grads: list[Tensor], norm_type: float) -> Tensor:
    """The norm of all gradients, in one read-only pass; of sharded ones over all ranks of their mesh."""
    by_mesh = defaultdict(list)
    for grad in grads:
        by_mesh[getattr(grad, "device_mesh", None)].append(grad)
    norms = [
        get_total_norm(group, norm_type) if mesh is None else _sharded_norm(group, norm_type)
        for mesh, group in by_mesh.items()
    ]
    return norms[0] if len(norms) == 1 else get_total_norm(norms, norm_type)


def _sharded_norm(grads: list[Any], norm_type: float) -> Tensor:
    """The norm of DTensors of one mesh, the same on every rank; inf where the largest magnitude is NaN."""
    if norm_type != math.inf:
        return get_total_norm(grads, norm_type).full_tensor()
    from torch.distributed.tensor import DTensor, Partial  # not at the top: few need it, and it takes a while

    first, mesh = grads[0], grads[0].device_mesh
    # DTensor's own inf norm fails on a rank without rows, and a maximum over ranks may lose a NaN, but not an inf.
    shards = [shard for grad in grads if (shard := grad.to_local()).numel() > 0]
    largest = get_total_norm(shards, norm_type).to(first.device, first.dtype).nan_to_num(nan=math.inf, posinf=math.inf)
    return DTensor.from_local(largest, mesh, [Partial("max")] * mesh.ndim).full_tensor()


@torch.no_grad()
def multiply_(grads: list[Tensor], factor: Tensor) -> None:
    """Multiply gradients in place by a 0-dimensional factor, in a few launches for any number of them."""
    grads = [grad.to_local() if hasattr(grad, "to_local") else grad for grad in grads]
    for device in {grad.device for grad in grads}:
        torch._foreach_mul_([grad for grad in grads if grad.device == device], factor.to(device, non_blocking=True))


def not_finite(number: Tensor) -> Tensor:
    """1.0 if a number is inf or NaN, else 0.0, in fp32: both times 0 are NaN."""
    return torch.nan_to_num((number * 0.0).float(), nan=1.0)
