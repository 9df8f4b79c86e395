"""Timing: warmed up, synchronised, repeated, with the spread.

A GPU works asynchronously: a Python call returns when the work is queued, not when it is done. On CUDA every
repetition is therefore put between two CUDA events, all repetitions are queued, and the host waits once at the end;
the times are the device's. On the CPU they are those of the host's clock.

As in a training loop, a time includes the gaps between kernels when Python is too slow to fill the queue. Inputs are
not evicted from the cache between repetitions. How much of a time is the device's own work is `device_share`.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .arguments import check_at_least
from .device_share import busy_ms, busy_phases, share
from .estimate import LEAST_PAIRS, LUCK_HERE, Estimate, estimate
from .machine import device

if TYPE_CHECKING:
    import pandas as pd

# Gains of medians below this are within what two measurements of the same differ by.
NO_DIFFERENCE = 0.03

# A turn of `compare` takes at least so long, of as many calls as that needs, up to `MOST_CALLS`.
TURN_S, MOST_CALLS, FEWEST_ROUNDS = 0.05, 1000, 8

# The default tolerance of outputs, as ‖a − b‖ / ‖b‖.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}


class Disagreement(AssertionError):
    """A variant does not compute what the reference computes."""


@dataclass(frozen=True)
class Timing:
    """Milliseconds of repeated runs: the median, the 20th and 80th percentile, and the number of runs.

    On a GPU also the share of the median in which the device worked, where that was profiled.
    """

    median_ms: float
    p20_ms: float
    p80_ms: float
    n: int
    device_share: float | None = None

    @classmethod
    def of(cls, samples_ms: list[float]) -> "Timing":
        p20, median, p80 = np.percentile(samples_ms, [20, 50, 80])
        return cls(float(median), float(p20), float(p80), len(samples_ms))

    def row(self) -> dict[str, float]:
        return {name: value for name, value in asdict(self).items() if value is not None}


def bench(fn: Callable[[], Any], *, repeat: int = 20, warmup: int = 3, seconds: float = 0.2) -> Timing:
    """Time `fn()`: at least `repeat` runs, and more until they take `seconds` (1,000 runs at most).

    If a run takes over a second, there are fewer, about `repeat` seconds of them, but at least 5. On the CPU
    a time includes about 1 µs of its own.
    """
    return phases(_once(fn), repeat=repeat, warmup=warmup, seconds=seconds)["run"]


def phases(
    step: Callable[[], Iterator[str]], *, repeat: int = 20, warmup: int = 3, seconds: float = 0.2
) -> dict[str, Timing]:
    """Time each phase of a step. `step` is a generator function that yields the name of a phase at its end:

        def step():
            loss = model(batch); yield "forward"
            loss.backward();     yield "backward"

    What follows the last `yield` is not timed. On a GPU each phase is profiled once, for its `device_share`.
    """
    check_at_least(1, repeat=repeat)
    for _ in range(max(warmup, 1)):
        began = time.perf_counter()
        _run(step)
        synchronize()
        once = time.perf_counter() - began
    few = repeat if once <= 1 else max(min(repeat, round(repeat / once)), min(repeat, 5))
    count = min(max(few, int(seconds / max(once, 1e-7))), max(repeat, 1000))
    runs = [_run(step) for _ in range(count)]
    synchronize()
    samples = [{name: between_ms(start, end) for (_, start), (name, end) in itertools.pairwise(run)} for run in runs]
    times = {name: Timing.of([sample[name] for sample in samples]) for name in samples[0]}
    busy = busy_phases(step, times)
    return {name: replace(timing, device_share=share(busy[name], timing.median_ms)) for name, timing in times.items()}


def each(items: Iterable[Any], fn: Callable[[Any], Any], where: torch.device | None = None) -> list[float]:
    """Milliseconds of `fn(item)` on `where`, by default `device()`, for items that differ. Their making isn't timed."""
    pairs = []
    for item in items:
        start = moment(where)
        fn(item)
        pairs.append((start, moment(where)))
    synchronize(where)
    return [between_ms(*pair) for pair in pairs]


@dataclass(frozen=True)
class Comparison:
    """Times of variants of the same work, which took turns A B C C B A …, so that drift affects all of them alike.

    A sample is the mean of a turn; `calls_ms` are the calls of all turns. `device_shares` are those of a GPU.
    """

    samples_ms: dict[str, list[float]]
    errors: dict[str, float] = field(default_factory=dict)
    calls_ms: dict[str, list[float]] = field(default_factory=dict)
    device_shares: dict[str, float | None] = field(default_factory=dict)

    def timing(self, variant: str) -> Timing:
        return replace(Timing.of(self.samples_ms[variant]), device_share=self.device_shares.get(variant))

    def ratio(self, variant: str, to: str) -> tuple[float, float, float]:
        """median(variant) / median(to), and the 20th and 80th percentile of the rounds' ratios."""
        ratios = np.array(self.samples_ms[variant]) / np.array(self.samples_ms[to])
        p20, p80 = np.percentile(ratios, [20, 80])
        return self.timing(variant).median_ms / self.timing(to).median_ms, float(p20), float(p80)

    def estimate(self, variant: str, to: str) -> Estimate | None:
        """The paired ratio with its interval; None of too few rounds."""
        return estimate([np.log(np.divide(self.samples_ms[variant], self.samples_ms[to]))], LUCK_HERE)

    def row(self, variant: str, to: str) -> dict[str, Any]:
        """A variant's columns in a record: its times, its baseline with its time, and the paired ratio."""
        baseline = {"baseline": to, "baseline_ms": self.timing(to).median_ms}
        paired = self.estimate(variant, to)
        ratio = paired.row() if paired else {"ratio": self.ratio(variant, to)[0]}
        return self.timing(variant).row() | baseline | ratio

    def table(self, to: str | None = None) -> "pd.DataFrame":
        """One row a variant; the ratio is to `to` (the first variant if not given)."""
        import pandas as pd  # not above: it takes 0.3 s

        to = to or next(iter(self.samples_ms))
        rows = []
        for variant in self.samples_ms:
            error = {"error": self.errors[variant]} if variant in self.errors else {}
            paired = self.estimate(variant, to) if variant != to else None
            ratio = paired.row() if paired else {"ratio": self.ratio(variant, to)[0], "verdict": "baseline"}
            rows.append({"variant": variant} | self.timing(variant).row() | ratio | error)
        return pd.DataFrame(rows)

    def _repr_html_(self) -> str:
        return self.table().to_html(index=False)


def compare(
    variants: Mapping[str, Callable[[], Any]],
    *,
    rounds: int = 20,
    warmup: int = 3,
    tolerance: float | None = None,
    check: bool = True,
    before: Callable[[], Any] = lambda: None,
    turn_s: float | None = None,
    seconds: float = math.inf,
) -> Comparison:
    """Check that all `variants` return what the first returns, then time them interleaved in this process.

    They take `rounds` turns each, in the order A B C C B A …. A turn is one call, or as many as take `turn_s` (50 ms):
    then there are fewer turns, as long as all variants have `rounds` calls, but at least 8. It begins when the device
    has done the last one's work, else what waits for the host would be queued meanwhile. After `seconds` no round is
    begun, but 4 of them there are.
    A variant returns what must agree (outputs, gradients): a tensor or a nested tuple, list or dict of tensors,
    which agree key by key, in any order.
    `before()` runs before each run and isn't timed. `tolerance` bounds ‖a − b‖ / ‖b‖ for each tensor; by default it
    follows the reference's dtype. Raises `Disagreement`, which names the variant and the error. `check=False` is for
    variants that return nothing.
    """
    check_at_least(1, rounds=rounds)
    if not variants:
        raise ValueError("there are no variants to compare; give at least one, {name: function}")
    errors = check_agreement(variants, tolerance, before) if check else {}
    calls = {}
    for variant, fn in variants.items():
        for _ in range(max(warmup, 1)):
            began = time.perf_counter()
            before()
            fn()
        synchronize()
        calls[variant] = min(max(1, round((turn_s or TURN_S) / (time.perf_counter() - began))), MOST_CALLS)
    turns: dict[str, list] = {variant: [] for variant in variants}
    order = list(variants)
    began = time.perf_counter()
    for number in range(min(rounds, max(FEWEST_ROUNDS, math.ceil(rounds / min(calls.values()))))):
        if number >= LEAST_PAIRS and time.perf_counter() - began > seconds:
            break
        for variant in order:
            synchronize()
            turns[variant].append([_call(variants[variant], before) for _ in range(calls[variant])])
        order.reverse()
    synchronize()
    # The first call of a turn, whose caches hold the other variants' data, counts only if it is alone.
    times = {name: [[between_ms(*call) for call in turn[1:] or turn] for turn in of] for name, of in turns.items()}
    samples = {name: [float(np.mean(turn)) for turn in of] for name, of in times.items()}
    calls_ms = {name: [ms for turn in of for ms in turn] for name, of in times.items()}
    shares = {name: share(busy_ms(fn, before), float(np.median(samples[name]))) for name, fn in variants.items()}
    return Comparison(samples, errors, calls_ms, shares)


def _call(fn: Callable[[], Any], before: Callable[[], Any]) -> tuple[Any, Any]:
    """Run a function, and give the moments before and after it."""
    now = clock()
    before()
    began = now()
    fn()
    return began, now()


def check_agreement(
    variants: Mapping[str, Callable[[], Any]], tolerance: float | None = None, before: Callable[[], Any] = lambda: None
) -> dict[str, float]:
    """The largest relative error of each variant's tensors against the first variant's; raises `Disagreement`."""
    names = list(variants)
    before()
    reference = [(key, t.detach().clone()) for key, t in _by_key(variants[names[0]]())]
    if not reference:
        raise Disagreement(f"{names[0]!r} returns no tensor to compare with; return one, or pass check=False")
    errors = {names[0]: 0.0}
    for name in names[1:]:
        before()
        outputs = _by_key(variants[name]())
        got, wanted = ([(*key, tuple(t.shape)) for key, t in returned] for returned in (outputs, reference))
        if got != wanted:
            raise Disagreement(f"{name!r} returns {_listed(got)}, the reference {names[0]!r} {_listed(wanted)}")
        worst = 0.0
        for (key, ours), (_, theirs) in zip(outputs, reference, strict=True):
            error = relative_error(ours, theirs)
            allowed = TOLERANCE.get(theirs.dtype, 0.0) if tolerance is None else tolerance
            if not error <= allowed:  # a NaN is never within bounds
                at = "".join(f" at {part}" for part in key)
                raise Disagreement(
                    f"{name!r} differs from {names[0]!r} by {error:.3g} of its norm{at}; at most {allowed:g} is allowed"
                )
            worst = max(worst, error)
        errors[name] = worst
    return errors


def relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    """‖value − reference‖ / ‖reference‖ in fp64; the plain norm of `value` if the reference is all zeros.

    Equal infinities agree, and the norm is that of the finite elements.
    """
    wide = torch.complex128 if reference.is_complex() or value.is_complex() else torch.float64
    reference, value = reference.detach().to(wide), value.detach().to(wide)
    difference = (value - reference).masked_fill(value == reference, 0)
    norm = reference.masked_fill(~reference.isfinite(), 0).norm()
    return float(difference.norm() / (norm if norm > 0 else 1.0))


def tensors(nested: Any) -> list[torch.Tensor]:
    """The tensors in nested tuples, lists and dicts, in order."""
    return [tensor for _, tensor in _with_keys(nested, ())]


def _with_keys(nested: Any, keys: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
    """The same, each with the keys of the dicts that it lies in."""
    if isinstance(nested, torch.Tensor):
        yield keys, nested
    elif isinstance(nested, Mapping):
        for key, item in nested.items():
            yield from _with_keys(item, (*keys, repr(key)))
    elif hasattr(nested, "__iter__") and not isinstance(nested, (str, bytes)):
        for item in nested:
            yield from _with_keys(item, keys)


def _by_key(nested: Any) -> list[tuple[tuple[str, ...], torch.Tensor]]:
    """The same in the order of the keys, so that dicts are compared whatever their order."""
    return sorted(_with_keys(nested, ()), key=lambda pair: pair[0])


def _listed(shapes: list[tuple]) -> str:
    """Shapes, each after its keys."""
    return "shapes " + ", ".join(" ".join(map(str, shape)) for shape in shapes)


def _once(fn: Callable[[], Any]) -> Callable[[], Iterator[str]]:
    def step() -> Iterator[str]:
        fn()
        yield "run"

    return step


def _run(step: Callable[[], Iterator[str]]) -> list[tuple[str, Any]]:
    """One repetition: a moment at its start and one after each phase."""
    now = clock()
    return [("", now()), *((name, now()) for name in step())]


def moment(where: torch.device | None = None) -> Any:
    """A time stamp for `between_ms`: on CUDA an event behind the work queued so far, else the host's clock.

    Read events after `synchronize()`. `where` is the device if it isn't `device()`: ranks on the CPU of a machine with
    a GPU, say.
    """
    return clock(where)()


def clock(where: torch.device | None = None) -> Callable[[], Any]:
    """What makes such moments. To look for the device takes 2 µs, which would be timed with a short function."""
    return _event if (where or device()).type == "cuda" else time.perf_counter


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between_ms(start: Any, end: Any) -> float:
    """Milliseconds between two moments."""
    return (end - start) * 1e3 if isinstance(start, float) else start.elapsed_time(end)


def queue_ahead(cycles: int = 2_000_000) -> None:
    """Occupy the GPU for about a millisecond, so that the host can queue work ahead; for `compare`'s `before`.

    The time is then that of the kernels, without the gaps that Python leaves between short ones, as in training with a
    full queue. Work that takes the host more than a millisecond to queue still has gaps. Does nothing on the CPU.
    """
    if device().type == "cuda":
        torch.cuda._sleep(cycles)


def queue_far_ahead() -> None:
    """The same for about 10 ms: longer than Python takes to queue a loop over parameters, or a compiled function."""
    queue_ahead(20_000_000)


def synchronize(where: torch.device | None = None) -> None:
    """Wait until the device has done all queued work; on the CPU, return at once."""
    if (where or device()).type == "cuda":
        torch.cuda.synchronize()
