"""Which steps of a loop a profiler watches: some untouched, some watched and not counted, some recorded.

A schedule is any function from a step's number to a `torch.profiler.ProfilerAction`, so that `torch.profiler.schedule`
makes one for `ModuleProfiler`, and `Schedule` makes one for `torch.profiler.profile`.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch.profiler import ProfilerAction

NONE, WARMUP, RECORD = ProfilerAction.NONE, ProfilerAction.WARMUP, ProfilerAction.RECORD
ALLOWED = (NONE, WARMUP, RECORD, ProfilerAction.RECORD_AND_SAVE)


@dataclass(frozen=True)
class Schedule:
    """`wait` steps untouched, `warmup` not counted, `active` recorded; `repeat` times over (0: for ever).

    The first step is special in most loops: libraries choose their kernels, and the optimizer makes its state. So one
    step is waited for by default. A recorded step of 100 module calls takes some 100 kB of the host's memory.
    """

    wait: int = 1
    warmup: int = 1
    active: int = 20
    repeat: int = 1

    def __post_init__(self) -> None:
        for name, least in (("wait", 0), ("warmup", 0), ("active", 1), ("repeat", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name} is {value!r}; it must be a whole number, {least} or more")

    def __call__(self, step: int) -> ProfilerAction:
        turn, place = divmod(step, self.wait + self.warmup + self.active)
        if place < self.wait or (self.repeat and turn >= self.repeat):
            return NONE
        return WARMUP if place < self.wait + self.warmup else RECORD

    @property
    def steps_needed(self) -> int:
        """How many steps a loop must have for one to be recorded."""
        return self.wait + self.warmup + 1


def action(schedule: Callable[[int], ProfilerAction], step: int) -> ProfilerAction:
    """What to do in a step: `NONE`, `WARMUP` or `RECORD`."""
    chosen = schedule(step)
    if chosen not in ALLOWED:
        raise ValueError(f"the schedule returned {chosen!r} for step {step}; it must return one of {ALLOWED}")
    return RECORD if chosen is ProfilerAction.RECORD_AND_SAVE else chosen
