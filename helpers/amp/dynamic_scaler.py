"""`DynamicGradScaler`: the loss scale that is as large as gradients allow."""

import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from helpers.lab.arguments import check_at_least, check_positive

from .scaler import StaticGradScaler, fp32, on_host, positive


class DynamicGradScaler(StaticGradScaler, torch.amp.GradScaler):
    """Adapts the scale: it grows after `growth_interval` steps in a row without inf or NaN, and shrinks after one with.

    It takes the place of `torch.amp.GradScaler`, with its arguments, methods and state, and is an instance of it: what
    reads a scaler's insides (`_unscale_grads_`, `_get_scale_async`) finds torch's own methods. The scale stays between
    `min_scale` and `max_scale`, by default 1 and 2**24, or `init_scale` where that is outside; `update` also clamps
    one that was set or loaded. Warns once if gradients overflow even at `min_scale`. The state is on the device of the
    first loss, so the scale also adapts in a replayed CUDA graph; `device` only decides whether it is enabled: "cuda"
    without a GPU disables it with a warning, as torch's.
    """

    def __init__(
        self,
        device: str | torch.device | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        min_scale: float | None = None,
        max_scale: float | None = None,
    ) -> None:
        super().__init__(init_scale, enabled=enabled and _is_usable(device))
        init_scale = self._init_scale
        self._min_scale = min(1.0, init_scale) if min_scale is None else fp32("min_scale", min_scale)
        self._max_scale = max(2.0**24, init_scale) if max_scale is None else positive("max_scale", max_scale, True)
        if not self._min_scale <= init_scale <= self._max_scale:
            bounds = f"from min_scale, {self._min_scale:g}, to max_scale, {self._max_scale:g}"
            raise ValueError(f"init_scale is {init_scale:g}; it must be {bounds}")
        self.set_growth_factor(growth_factor)
        self.set_backoff_factor(backoff_factor)
        self.set_growth_interval(growth_interval)
        self._init_growth_tracker = 0
        self._growth_tracker: Tensor | None = None  # good steps in a row
        self._warned = False

    def get_growth_factor(self) -> float:
        return self._growth_factor

    def set_growth_factor(self, new_factor: float) -> None:
        self._growth_factor = _growth(new_factor)

    def get_backoff_factor(self) -> float:
        return self._backoff_factor

    def set_backoff_factor(self, new_factor: float) -> None:
        self._backoff_factor = _backoff(new_factor)

    def get_growth_interval(self) -> int:
        return self._growth_interval

    def set_growth_interval(self, new_interval: int) -> None:
        check_positive(growth_interval=new_interval)
        self._growth_interval = int(new_interval)

    def _adapt(self, found_inf: Tensor) -> None:
        super()._adapt(found_inf)
        torch.le(self._scale, self._min_scale, out=self._at_minimum)
        self._overflows.addcmul_(found_inf, self._at_minimum)
        rule = self._growth_factor, self._backoff_factor, self._growth_interval
        torch._amp_update_scale_(self._scale, self._growth_tracker, found_inf, *rule)  # torch.amp.GradScaler's kernel
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
            "_growth_tracker": int(on_host(self._growth_tracker, self._init_growth_tracker)),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        if self._enabled:
            self.set_growth_factor(state["growth_factor"])
            self.set_backoff_factor(state["backoff_factor"])
            self.set_growth_interval(state["growth_interval"])
            self._init_growth_tracker = int(state["_growth_tracker"])
            if self._growth_tracker is not None:
                self._growth_tracker.fill_(self._init_growth_tracker)

    def _check(self, state: Mapping[str, Any]) -> None:
        super()._check(state)
        _growth(state["growth_factor"])
        _backoff(state["backoff_factor"])
        check_positive(growth_interval=state["growth_interval"])
        check_at_least(0, _growth_tracker=state["_growth_tracker"])

    def __getstate__(self) -> dict[str, Any]:
        tensors = ("_growth_tracker", "_at_minimum", "_overflows", "_overflows_on_host")
        tracker = int(on_host(self._growth_tracker, self._init_growth_tracker))
        return super().__getstate__() | dict.fromkeys(tensors) | {"_init_growth_tracker": tracker}

    def _start(self, device: torch.device) -> None:
        super()._start(device)
        self._growth_tracker = torch.full((), self._init_growth_tracker, dtype=torch.int32, device=device)
        self._at_minimum = torch.zeros((), device=device)  # 1.0 if the scale is `min_scale`
        self._overflows = torch.zeros((), device=device)  # steps that overflowed at `min_scale`
        self._overflows_on_host = torch.zeros((), pin_memory=device.type == "cuda")


def _is_usable(device: str | torch.device | None) -> bool:
    """Whether there is such a kind of device; warns if it is CUDA and there is none."""
    if not isinstance(device, (str, torch.device, type(None))):
        raise ValueError(f"device is {device!r}; it must be a kind of device, like 'cuda', and the scale is init_scale")
    if device is None or torch.device(device).type != "cuda" or torch.cuda.is_available():
        return True
    warnings.warn("DynamicGradScaler is disabled: its device is 'cuda', which is not available", stacklevel=3)
    return False


def _growth(factor: float) -> float:
    if not (math.isfinite(factor) and factor > 1):
        raise ValueError(f"growth_factor is {factor}; it must be above 1")
    return float(factor)


def _backoff(factor: float) -> float:
    if not 0 < factor < 1:
        raise ValueError(f"backoff_factor is {factor}; it must be between 0 and 1")
    return float(factor)
