"""What the rules of `findings` look at: a trace with its account, and how much of a step a span of time is."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Any

from ..faults import remedy
from . import account
from .account import Account, Spans, intersect, length, of, subtract
from .source_places import by_source_line, others, source_lines
from .summary import Finding, milliseconds
from .trace import KERNEL, OP, Event, Trace

SEVERAL = "several"  # parts of the account: a finding's spans count wherever they lie
OUTLIER = 2.0  # times the median step
HOST_BOUND_REASONS = (*account.HOST_REASONS, account.IN_LOADER)
HOST_BOUND_SHARE = 0.2  # of the time idle for the host and the loader: from then on the host may bound the step
NEVER_WAITS = 0.05  # of the time: a host that waits less for the device never does


@dataclass(frozen=True)
class Scene:
    """A trace and its account, on a GPU or a CPU."""

    trace: Trace

    @cached_property
    def account(self) -> Account | None:
        return account.device_account(self.trace)

    @cached_property
    def parts(self) -> dict[str, Spans]:
        return self.account.parts if self.account else account.host_account(self.trace)

    @cached_property
    def us(self) -> float:
        """The recorded time, which the parts add up to."""
        return sum(map(length, self.parts.values()))

    @cached_property
    def shares(self) -> dict[str, float]:
        return {part: self.share(spans) for part, spans in self.parts.items()}

    @cached_property
    def outliers(self) -> Spans:
        """Single steps (at most one in five) that took twice as long as the median, but for waits for the loader."""
        windows = account.step_windows(self.trace)
        middle, loading = median(end - begin for begin, end in windows), of(self.trace.fetches)
        slow = [(begin, end) for begin, end in windows if end - begin > OUTLIER * middle]
        slow = [span for span in slow if length(intersect(loading, [span])) < (span[1] - span[0]) / 2]
        return slow if len(slow) <= len(windows) / 5 else []

    @cached_property
    def host_bound(self) -> bool:
        """Whether the device waits for the host, and the host never for the device."""
        if self.account is None:
            return False
        waits = [e for e in self.trace.host if account.is_wait(e) or account.is_blocking_read(e)]
        share = self.share(self.account.idle_for(*HOST_BOUND_REASONS))
        return share >= HOST_BOUND_SHARE and length(of(waits)) < NEVER_WAITS * self.us

    def per_step(self, total: float) -> float:
        return total / len(self.trace.steps)

    def idle(self, spans: Spans) -> Spans:
        """What of the spans holds the step up: all where the host does throughout, and on a CPU; else the idle time."""
        if self.account is None or self.host_bound:
            return spans
        return intersect(spans, subtract(self.account.parts[account.IDLE], self.account.idle[account.START_UP]))

    def kernels(self, events: Iterable[Event]) -> Spans:
        """When the kernels among the events, and those that they launched, run and nothing else does."""
        if self.account is None:
            return []
        kernels = {e for event in events for e in (event, *event.inner()) if e.kind == KERNEL}
        return intersect(of(list(kernels)), self.account.parts[account.COMPUTE])

    def work(self, ops: list[Event]) -> tuple[str, Spans]:
        """The part of the account that the ops' work belongs to, and its time: kernels, or the host while idle."""
        if self.account is None:
            mine = of([op for op in ops if op.track == self.trace.thread])
            return larger({part: intersect(mine, spans) for part, spans in self.parts.items()})
        idle = self.idle(of([op for op in ops if op.kind == OP]))
        return larger({account.COMPUTE: self.kernels(ops), account.IDLE: idle})

    def products(self, ops: list[Event]) -> tuple[str, Spans]:
        """As `work`, for what other kernels would shorten: on a GPU the host's time doesn't count."""
        return self.work(ops) if self.account is None else (account.COMPUTE, self.kernels(ops))

    def time(self, spans: Spans) -> str:
        """How long they are in a step."""
        return milliseconds(self.per_step(length(spans)) / 1e3)

    def each(self, total: float, noun: str) -> str:
        """ "1 copy a step", "3.5 copies a step"."""
        often = self.per_step(total)
        plural = noun if often == 1 else f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
        return f"{often:,.4g} {plural} a step"

    def share(self, spans: Spans) -> float:
        return length(spans) / self.us

    def finding(
        self,
        name: str,
        work: tuple[str, Spans],
        where: str,
        evidence: str,
        sure: str,
        factor: float = 1.0,
        of_host: bool = False,
        case: str = "",
        **values: str,
    ) -> Finding:
        """A finding that could bring `factor` of the work's spans, as far as they lie in its part and in no outlier.

        Where the host never waits for the device, all that work `of_host` takes holds the step up, up to the device's
        idle time. `case` and `values` are the remedy's.
        """
        part, spans = work
        gained = factor * length(subtract(intersect(spans, self.parts.get(part, spans)), self.outliers))
        if self.account and self.host_bound and part == account.IDLE and of_host:
            idle = self.account.idle_for(*HOST_BOUND_REASONS)
            gained = min(length(subtract(spans, self.outliers)), length(idle))
        steps = max(len(self.trace.steps) - len(self.outliers), 1)
        gain_ms, gain_share, advice = gained / 1e3 / steps, gained / self.us, remedy(name, case, **values)
        return Finding(name, part, gain_ms, gain_share, where, evidence, advice, sure, spans)

    def where(self, events: list[Event]) -> str:
        """The source line that most of the time goes to, and how many more there are."""
        groups = by_source_line(self.trace, events)
        first = max(groups.values(), key=lambda group: sum(e.device_us or e.us for e in group))
        return source_lines(self.trace, first) + others(len(groups))


def totals(times: Iterable[tuple[str, float]]) -> list[tuple[str, float]]:
    """The sum for each name, the largest first."""
    sums: Any = Counter()
    for name, us in times:
        sums[name] += us
    return sums.most_common()


def larger(choices: dict[str, Spans]) -> tuple[str, Spans]:
    """The part in which more time goes, and that time."""
    return max(choices.items(), key=lambda choice: length(choice[1]))
