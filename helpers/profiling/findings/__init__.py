"""The rules of `diagnose`: a function for each finding, from a `Scene` to its `Finding`s.

    waiting     the host waits for the device, both for the loader
    traffic     copies and communication while nothing computes
    host_work   work of the host that the device waits for: optimizers and gradients in many ops, memory, launches
    products    matrix products and convolutions: sizes, types, settings, attention from separate ops, unfused chains
    on_cpu      products in fp32 and chains too large for the cache on a CPU, and what other fixes bring there
    needless    graphs that no backward uses, unused results, constants rebuilt in each step, separate Q, K and V

A rule reports only what the trace proves. A finding's gain is the time in which its part of the account would shrink:
host work counts while the device idles, a kernel while nothing else runs.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from statistics import median

from ..account import (
    COMPUTE,
    IDLE,
    IN_LOADER,
    IN_OP,
    IN_PYTHON,
    START_UP,
    Account,
    Spans,
    device_account,
    host_account,
    intersect,
    is_blocking_read,
    is_wait,
    length,
    of,
    step_windows,
    subtract,
    union,
)
from ..diagnosis import Finding, milliseconds
from ..places import by_source_line, source_lines
from ..trace import KERNEL, OP, Event, Trace

HOST_WAITS = "host synchronisation"
LOADER_WAITS = "waiting for the loader"
PAGEABLE = "copies from pageable memory"
COPYING = "exposed copies"
COLLECTIVES = "exposed communication"
LAUNCHES = "host slower than the device"
UNFUSED = "unfused optimizer"
ZEROED = "gradients zeroed, not dropped"
RETURNED = "memory returned and reserved again"
UNALIGNED = "unaligned sizes"
FP32 = "fp32 products"
ATTENTION = "attention from matmul and softmax"
CHAINS = "unfused elementwise operations"
LAYOUT = "layout conversions"
DETERMINISTIC = "deterministic cuDNN"
UNBENCHMARKED = "unbenchmarked cuDNN"
KEPT_GRAPH = "graph kept in evaluation"
UNUSED = "result never used"
CONSTANT = "repeated constant work"
SEPARATE = "separate projections of one input"

HOST_WORK = {UNFUSED, ZEROED, CONSTANT}
OUTLIER = 2.0  # times the median step
HELD_BY = (IN_OP, IN_PYTHON, IN_LOADER)
HELD_UP = 0.2  # of the time idle for the host and the loader: from then on the host may be what bounds the step
NEVER_WAITS = 0.05  # of the time: a host that waits less for the device holds it up


@dataclass(frozen=True)
class Scene:
    """A trace and its account, on a GPU or a CPU."""

    trace: Trace

    @cached_property
    def account(self) -> Account | None:
        return device_account(self.trace)

    @cached_property
    def parts(self) -> dict[str, Spans]:
        return self.account.parts if self.account else host_account(self.trace)

    @cached_property
    def us(self) -> float:
        """The recorded time, which the parts add up to."""
        return sum(map(length, self.parts.values()))

    @cached_property
    def outliers(self) -> Spans:
        """Single steps (at most one in five) that took twice as long as the median, but for waits for the loader."""
        windows = step_windows(self.trace)
        middle, loading = median(end - begin for begin, end in windows), of(self.trace.fetches)
        slow = [(begin, end) for begin, end in windows if end - begin > OUTLIER * middle]
        slow = [span for span in slow if length(intersect(loading, [span])) < (span[1] - span[0]) / 2]
        return slow if len(slow) <= len(windows) / 5 else []

    @cached_property
    def held_up(self) -> bool:
        """Whether the device waits for the host, and the host never for the device."""
        if self.account is None:
            return False
        idle = self.account.idle_shares
        waited = [e for e in self.trace.host if is_wait(e) or is_blocking_read(e)]
        return sum(map(idle.get, HELD_BY, [0.0] * 3)) >= HELD_UP and length(of(waited)) < NEVER_WAITS * self.us

    @property
    def counted(self) -> int:
        """The number of steps without the outliers."""
        return len(self.trace.steps) - len(self.outliers)

    def per_step(self, total: float) -> float:
        return total / len(self.trace.steps)

    def idle(self, spans: Spans) -> Spans:
        """What of the spans holds the step up: all where the host does throughout, and on a CPU; else the idle time."""
        if self.account is None:
            return intersect(spans, union([(s.begin, s.end) for s in self.trace.steps]))
        if self.held_up:
            return spans
        return intersect(spans, subtract(self.account.parts[IDLE], self.account.idle[START_UP]))

    def kernels(self, events: Iterable[Event]) -> Spans:
        """When the kernels among the events, and those that they launched, run and nothing else does."""
        if self.account is None:
            return []
        found = {e for event in events for e in (event, *event.inner()) if e.kind == KERNEL}
        return intersect(of(list(found)), self.account.parts[COMPUTE])

    def work(self, ops: list[Event]) -> tuple[str, Spans]:
        """The part of the account that the ops' work belongs to, and its time: kernels, or the host while idle."""
        if self.account is None:
            mine = of([op for op in ops if op.track == self.trace.thread])
            shares = {part: length(intersect(mine, spans)) for part, spans in self.parts.items()}
            part = max(shares, key=shares.__getitem__)
            return part, intersect(mine, self.parts[part])
        return self.larger({COMPUTE: self.kernels(ops), IDLE: self.idle(of([op for op in ops if op.kind == OP]))})

    def products(self, ops: list[Event]) -> tuple[str, Spans]:
        """As `work`, for what other kernels would shorten: on a GPU the host's time doesn't count."""
        return self.work(ops) if self.account is None else (COMPUTE, self.kernels(ops))

    def larger(self, choices: dict[str, Spans]) -> tuple[str, Spans]:
        """The part in which more time goes, and that time."""
        part = max(choices, key=lambda name: length(choices[name]))
        return part, choices[part]

    def ms(self, spans: Spans) -> float:
        """Milliseconds a step."""
        return length(spans) / 1e3 / len(self.trace.steps)

    def told(self, spans: Spans) -> str:
        return milliseconds(self.ms(spans))

    def each(self, total: float, noun: str) -> str:
        """ "1 copy a step", "3.5 copies a step"."""
        often = self.per_step(total)
        plural = noun if often == 1 else f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
        return f"{often:,.4g} {plural} a step"

    def share(self, spans: Spans) -> float:
        return length(spans) / self.us

    def finding(
        self, name: str, part: str, spans: Spans, where: str, evidence: str, advice: str, sure: str, factor: float = 1.0
    ) -> Finding:
        """A finding that could bring `factor` of the spans, as far as they lie in the part and not in an outlier.

        Where the host never waits for the device, all of its time holds the step up, up to the device's idle time.
        """
        gained = factor * length(subtract(intersect(spans, self.parts.get(part, [])), self.outliers))
        if self.held_up and part == IDLE and name in HOST_WORK:
            reasons = union([span for reason in HELD_BY for span in self.account.idle[reason]])
            gained = min(length(subtract(spans, self.outliers)), length(reasons))
        gain_ms = gained / 1e3 / max(self.counted, 1)
        return Finding(name, part, gain_ms, gained / self.us, where, evidence, advice, sure, spans)

    def where(self, events: list[Event]) -> str:
        """The source line that most of the time goes to, and how many more there are."""
        groups = by_source_line(self.trace, events)
        first = max(groups.values(), key=lambda group: sum(e.device_us or e.us for e in group))
        return source_lines(self.trace, first) + others(len(groups))


def others(lines: int) -> str:
    """The end of a place that stands for several lines."""
    return f", and {lines - 1} more line{'s' * (lines > 2)}" if lines > 1 else ""
