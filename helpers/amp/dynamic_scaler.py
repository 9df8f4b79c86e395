"""`DynamicGradScaler`: the loss scale that is as large as gradients allow."""

import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..lab.arguments import check_at_least
from .scaler import StaticGradScaler, fp32

LEAST, MOST = 1.0, 2.0**24  # the scale's bounds, unless it begins outside of them


class DynamicGradScaler(StaticGradScaler, torch.amp.GradScaler):
    """Adapts the scale: it grows after `growth_interval` steps in a row without inf or NaN, and shrinks after one with.

    It takes the place of `torch.amp.GradScaler`, with its arguments, methods and state, and is an instance of it: what
    reads a scaler's insides (`_unscale_grads_`, `_get_scale_async`) finds torch's own methods. The scale stays between
    1 and 2**24, or `init_scale` where that is outside; `update` also clamps one that was set or loaded. The state
    is on the device of the first loss, so the scale also adapts in a replayed CUDA graph; `device` only decides whether
    it is enabled: "cuda" without a GPU disables it with a warning, as torch's.
    """

    def __init__(
        self,
        device: str | torch.device | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        super().__init__(init_scale, enabled=enabled and _is_usable(device))
        _check_rule(growth_factor, backoff_factor, growth_interval)
        self._growth_factor = growth_factor
        self._backoff_factor = backoff_factor
        self._growth_interval = growth_interval
        self._least, self._most = min(LEAST, self._init_scale), max(MOST, self._init_scale)
        self._init_growth_tracker = 0
        self._growth_tracker: Tensor | None = None  # good steps in a row

    __getstate__ = object.__getstate__  # torch's would forget the count of skipped steps

    def _adapt(self, found_inf: Tensor) -> None:
        super()._adapt(found_inf)
        rule = self._growth_factor, self._backoff_factor, self._growth_interval
        torch._amp_update_scale_(self._scale, self._growth_tracker, found_inf, *rule)  # torch.amp.GradScaler's kernel
        self._scale.clamp_(self._least, self._most)

    def state_dict(self) -> dict[str, Any]:
        """With the names of torch.amp.GradScaler, so that either loads the other's."""
        return super(StaticGradScaler, self).state_dict()  # torch's

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state of ours or torch's; if part of it makes no sense, nothing changes."""
        if self._enabled and state:
            _check_rule(state["growth_factor"], state["backoff_factor"], state["growth_interval"])
            check_at_least(0, _growth_tracker=state["_growth_tracker"])
            fp32("scale", state["scale"])
        super(StaticGradScaler, self).load_state_dict(state)  # torch's

    def _start(self, device: torch.device) -> None:
        super()._start(device)
        self._growth_tracker = torch.full((), self._init_growth_tracker, dtype=torch.int32, device=device)


def _is_usable(device: str | torch.device | None) -> bool:
    """Whether there is such a kind of device; warns if it is CUDA and there is none."""
    if not isinstance(device, (str, torch.device, type(None))):
        raise ValueError(f"device is {device!r}; it must be a kind of device, like 'cuda', and the scale is init_scale")
    if device is None or torch.device(device).type != "cuda" or torch.cuda.is_available():
        return True
    warnings.warn("DynamicGradScaler is disabled: its device is 'cuda', which is not available", stacklevel=3)
    return False


def _check_rule(growth_factor: float, backoff_factor: float, growth_interval: int) -> None:
    if not 1 < growth_factor < math.inf:
        raise ValueError(f"growth_factor is {growth_factor}; it must be above 1")
    if not 0 < backoff_factor < 1:
        raise ValueError(f"backoff_factor is {backoff_factor}; it must be between 0 and 1")
    check_at_least(1, growth_interval=growth_interval)
