"""The scaler that finds its scale. How it scales, unscales, clips and steps is `scaler`'s."""

import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .scaler import StaticGradScaler, positive


class DynamicGradScaler(StaticGradScaler):
    """Finds the scale: after `growth_interval` good steps it grows, after a bad one it shrinks.

    It stays between `min_scale` and `max_scale` (the next update brings one back that was set or loaded from outside),
    and says once if gradients overflow even at `min_scale`. The state lives on the GPU, so a captured CUDA graph of a
    step goes on scaling when it is replayed. `readable.update_` spells the rule out.
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
        readable: bool = False,
    ) -> None:
        super().__init__(init_scale, enabled=enabled, readable=readable)
        self._check(growth_factor, backoff_factor, growth_interval, min_scale, max_scale)
        self._growth_factor, self._backoff_factor = float(growth_factor), float(backoff_factor)
        self._growth_interval = growth_interval
        self._min_scale, self._max_scale = float(min_scale), float(max_scale)
        self._good_steps = 0  # a tensor once there is a device
        self._at_least: Tensor | None = None  # 1.0 if the scale is as small as it may be
        self._stuck: Tensor | None = None  # above 0 once gradients overflowed at min_scale
        self._stuck_here = None  # the same on the host, some steps late, so that nobody waits for it
        self._said = False

    def _check(self, growth: float, backoff: float, interval: int, smallest: float, largest: float) -> None:
        if not (math.isfinite(growth) and growth > 1):
            raise ValueError(f"growth_factor is {growth}; it must be above 1")
        if not 0 < backoff < 1:
            raise ValueError(f"backoff_factor is {backoff}; it must be between 0 and 1")
        if isinstance(interval, bool) or not isinstance(interval, int) or interval < 1:
            raise ValueError(f"growth_interval is {interval!r}; it must be an integer of at least 1")
        positive("min_scale", smallest)
        positive("max_scale", largest, allow_inf=True)
        if not smallest <= self._initial_scale <= largest:
            given = f"init_scale is {self._initial_scale:g}"
            raise ValueError(f"{given}; it must be from min_scale, {smallest:g}, to max_scale, {largest:g}")

    def state_dict(self) -> dict[str, Any]:
        """Under the names that torch.amp.GradScaler uses, so that either loads the other's."""
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
            if isinstance(self._good_steps, Tensor):
                self._good_steps.fill_(state["_growth_tracker"])
            else:
                self._good_steps = state["_growth_tracker"]

    def _start(self, device: torch.device) -> None:
        super()._start(device)
        self._good_steps = torch.full((), self._good_steps, dtype=torch.int32, device=device)
        self._at_least, self._stuck = torch.zeros((), device=device), torch.zeros((), device=device)
        self._stuck_here = torch.zeros((), pin_memory=device.type == "cuda")

    def _finish(self, found_inf: Tensor) -> None:
        super()._finish(found_inf)
        torch.le(self._scale, self._min_scale, out=self._at_least)
        self._stuck.addcmul_(found_inf, self._at_least)
        rule = self._growth_factor, self._backoff_factor, self._growth_interval, (self._min_scale, self._max_scale)
        self._operations.update_(self._scale, self._good_steps, found_inf, *rule)
        self._say_if_stuck()

    def _say_if_stuck(self) -> None:
        """Warn once. The news comes by a copy that nobody waits for, so a few steps late."""
        if self._said:
            return
        if self._stuck_here.numpy()[()] > 0:
            self._said = True
            message = f"gradients are not finite even at the smallest scale, {self._min_scale:g}: steps are skipped"
            warnings.warn(f"{message}; look for a diverged model or bad data", RuntimeWarning, stacklevel=4)
        self._stuck_here.copy_(self._stuck, non_blocking=True)
