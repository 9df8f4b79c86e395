"""Checks that judge any implementation of what the tasks ask for: the reader's, ours, torch's.

    from helpers.lab import checks
    checks.swiglu(MySwigluFunction)

A check prints a line for each thing that must hold, with the figure that shows it, and raises nothing: what raises
inside counts as failed, with its message. `check.passed` says whether all held. What isn't written yet (it raises
`NotImplementedError`) is "not attempted". References are torch's own operations, gradcheck or brute force; the checks
know nothing of the rest of this library. Each takes a second or a few.
"""

import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .memory import saved_bytes
from .timing import relative_error


@dataclass
class Check:
    """What held and what didn't, a line each."""

    name: str
    lines: list[tuple[str, str]] = field(default_factory=list)  # (verdict, what it is about)
    attempted: bool = True

    @property
    def passed(self) -> bool:
        return self.attempted and all(verdict == "holds" for verdict, _ in self.lines)

    def holds(self, about: str, test: Callable[[], Any]) -> None:
        """One line. `test` returns whether it holds, or that and a figure; what it raises is told as a failure."""
        if not self.attempted:
            return
        try:
            result = test()
        except NotImplementedError:
            self.attempted = False
            return
        except Exception as error:
            said = str(error).strip().partition("\n")[0][:120]
            self.lines.append(("FAILS", f"{about}: {type(error).__name__}: {said}"))
            return
        held, figure = result if isinstance(result, tuple) else (result, "")
        self.lines.append(("holds" if held else "FAILS", f"{about}: {figure}" if figure else about))

    def summary(self) -> str:
        """One line without figures, the same on every machine."""
        if not self.attempted:
            return f"{self.name}: not attempted"
        failed = [about.partition(":")[0] for verdict, about in self.lines if verdict == "FAILS"]
        said = f"{self.name}: {len(self.lines) - len(failed)} of {len(self.lines)} checks hold"
        return f"{said}; not: {'; '.join(failed)}" if failed else said

    def __repr__(self) -> str:
        if not self.attempted:
            return f"{self.name}: not attempted"
        return "\n".join([self.name, *(f"  {verdict}  {about}" for verdict, about in self.lines)])


def _name(implementation: Any) -> str:
    return getattr(implementation, "__name__", type(implementation).__name__)


def swiglu(function: Any, levels: Sequence[int] = (0, 1), tolerance: float = 1e-4) -> Check:
    """A `torch.autograd.Function` (or a callable) of (x, W, V, U, level), against autograd of the plain formula.

    W and V are (d, I), U is (I, d). Level 0 may save xW, SiLU(xW) and xV, level 1 nothing but x; other levels are
    checked for their output and gradients.
    """
    check = Check(_name(function))
    apply = getattr(function, "apply", function)
    d, intermediate = 12, 40
    shapes = ((d, intermediate), (d, intermediate), (intermediate, d))

    def inputs(dtype: torch.dtype, *leading: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        sizes = ((*leading, d), *shapes)
        return [torch.randn(s, generator=generator, dtype=dtype).requires_grad_() for s in sizes]

    def plain(x: Tensor, W: Tensor, V: Tensor, U: Tensor) -> Tensor:
        return (F.silu(x @ W) * (x @ V)) @ U

    def output(level: int) -> tuple[bool, str]:
        tensors = inputs(torch.float32, 3, 7)
        error = relative_error(apply(*tensors, level), plain(*tensors))
        return error <= tolerance, f"relative error {error:.1e}"

    def gradient(level: int, place: int) -> tuple[bool, str]:
        tensors = inputs(torch.float32, 3, 7)
        l = torch.randn(3, 7, d, generator=torch.Generator().manual_seed(1))
        found, expected = (torch.autograd.grad(y, tensors, l)[place] for y in (apply(*tensors, level), plain(*tensors)))
        error = relative_error(found, expected)
        return error <= tolerance, f"relative error {error:.1e}"

    def derivatives(level: int) -> bool:
        return torch.autograd.gradcheck(lambda *tensors: apply(*tensors, level), inputs(torch.float64, 2))

    def saved(level: int, allowed: int) -> tuple[bool, str]:
        x, *weights = inputs(torch.float32, 50)
        found = saved_bytes(lambda: apply(x, *weights, level), without=weights)
        return found <= allowed, f"{found:,} bytes, at most {allowed:,}"

    for level in levels:
        check.holds(f"level {level}: the output is (SiLU(xW) ⊙ xV) U, for x (3, 7, d)", partial(output, level))
        for place, name in enumerate("xWVU"):
            check.holds(f"level {level}: the gradient of {name} is autograd's", partial(gradient, level, place))
        if tolerance <= 1e-4:
            check.holds(f"level {level}: gradcheck in fp64", partial(derivatives, level))
        if level < 2:
            what, tensors_of_xW = (("x, xW, SiLU(xW), xV", 3), ("x alone", 0))[level]
            check.holds(
                f"level {level} saves {what}", partial(saved, level, 50 * (d + tensors_of_xW * intermediate) * 4)
            )
    return check


def grad_scaler(make: Callable[..., Any], dynamic: bool = True) -> Check:
    """A loss scaler with `scale(loss)`, `step(optimizer)`, `update()`, against plain training and torch's scaler.

    A static one is built by `make(scale)`; a dynamic one by `make(init_scale=…, growth_factor=…, backoff_factor=…,
    growth_interval=…)`, and it says its scale by `get_scale()`.
    """
    check = Check(_name(make))

    def built(scale: float) -> Any:
        return make(init_scale=scale) if dynamic else make(scale)

    def problem() -> tuple[nn.Module, torch.optim.Optimizer, list[Tensor]]:
        generator = torch.Generator().manual_seed(0)
        model = nn.Linear(8, 4)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        return model, optimizer, [torch.randn(16, 8, generator=generator) for _ in range(40)]

    def train(scaler: Any, bad: Iterable[int] = ()) -> tuple[list[Tensor], list[float]]:
        """Train with inf in the gradients of the steps in `bad`; the weights at the end, and the scale by step."""
        model, optimizer, batches = problem()
        scales = []
        for number, batch in enumerate(batches):
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            (loss if scaler is None else scaler.scale(loss)).backward()
            if number in bad:
                model.weight.grad[0, 0] = float("inf")
            if scaler is None:
                if number not in bad:
                    optimizer.step()
                continue
            scaler.step(optimizer)
            scaler.update()
            if hasattr(scaler, "get_scale"):
                scales.append(float(scaler.get_scale()))
        return [p.detach().clone() for p in model.parameters()], scales

    def equal(found: list[Tensor], expected: list[Tensor]) -> tuple[bool, str]:
        error = max(relative_error(a, b) for a, b in zip(found, expected, strict=True))
        return error <= 1e-5, f"relative error {error:.1e}"

    def scaled() -> tuple[bool, str]:
        loss = torch.tensor(1.5, requires_grad=True)
        value = float(built(64.0).scale(loss).detach())
        return value == 96.0, f"1.5 · 64 = {value:g}"

    check.holds("scale(loss) is loss · scale", scaled)
    check.holds(
        "40 steps give the weights of unscaled training",
        lambda: equal(train(built(1024.0))[0], train(None)[0]),
    )
    if not dynamic:
        return check
    check.holds(
        "a step with inf in a gradient is skipped",
        lambda: equal(train(built(8.0), {5, 6})[0], train(None, {5, 6})[0]),
    )
    options = {"init_scale": 1024.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 7}

    def same_scales(bad: tuple[int, ...]) -> tuple[bool, str]:
        ours = train(make(**options), bad)[1]
        theirs = train(torch.amp.GradScaler("cpu", **options), bad)[1]
        wrong = next((n for n, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]), None)
        if wrong is None:
            return True, f"40 scales equal torch's, the last {ours[-1]:g}"
        return False, f"after step {wrong} the scale is {ours[wrong]:g}, torch's {theirs[wrong]:g}"

    check.holds("the scale grows after 7 good steps", partial(same_scales, ()))
    check.holds("the scale falls after inf, and counts anew", partial(same_scales, (3, 12, 13, 30)))
    return check


def autocast(make: Callable[..., Any], dtype: torch.dtype = torch.bfloat16) -> Check:
    """A context manager `make(dtype=…)` in which linear layers compute in `dtype` and norms in fp32."""
    check = Check(_name(make))
    torch.manual_seed(0)
    linear, norm = nn.Linear(16, 16), nn.LayerNorm(16)
    x = torch.randn(4, 16)

    def run(fn: Callable[[], Tensor]) -> Tensor:
        with make(dtype=dtype):
            return fn()

    def is_of(fn: Callable[[], Tensor], wanted: torch.dtype) -> tuple[bool, str]:
        found = run(fn).dtype
        return found == wanted, str(found)[6:]

    check.holds(f"a linear layer gives {str(dtype)[6:]}", lambda: is_of(lambda: linear(x), dtype))
    check.holds("a norm of fp32 numbers stays fp32", lambda: is_of(lambda: norm(x), torch.float32))

    def values() -> tuple[bool, str]:
        with torch.autocast("cpu", dtype=dtype):
            expected = norm(linear(x))
        error = relative_error(run(lambda: norm(linear(x))), expected)
        return error <= 1e-2, f"relative error {error:.1e}"

    check.holds("the result is torch.autocast's", values)

    def gradients() -> tuple[bool, str]:
        linear.zero_grad()
        run(lambda: norm(linear(x))).square().sum().backward()
        grad = linear.weight.grad
        return grad is not None and grad.dtype == torch.float32, "" if grad is None else str(grad.dtype)[6:]

    check.holds("the weights' gradients are fp32", gradients)

    def restored() -> bool:
        try:
            with make(dtype=dtype):
                raise KeyError
        except KeyError:
            return linear(x).dtype == torch.float32

    check.holds("outside, also after an error inside, all is as before", restored)
    return check


def accumulated_step(step: Callable[[nn.Module, torch.optim.Optimizer, Any, list], Any]) -> Check:
    """A function of (model, optimizer, scaler, micro-batches): one step on pairs of inputs and targets under a scale.

    The loss is the mean squared error; gradients are clipped to a norm of 1. It is judged with torch's scaler.
    """
    check = Check(_name(step))
    generator = torch.Generator().manual_seed(0)
    pairs = [(torch.randn(6, 8, generator=generator), 9 * torch.randn(6, 4, generator=generator)) for _ in range(4)]
    start = nn.Linear(8, 4).requires_grad_(False)

    def weights(steps: int, run: Callable[[nn.Module, torch.optim.Optimizer], Any]) -> Tensor:
        model = nn.Linear(8, 4)
        model.load_state_dict(start.state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(steps):
            run(model, optimizer)
        return model.weight.detach()

    def at_once(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        inputs, targets = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        F.mse_loss(model(inputs), targets).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    def same(steps: int) -> tuple[bool, str]:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        found = weights(steps, lambda model, optimizer: step(model, optimizer, scaler, pairs))
        error = relative_error(found, weights(steps, at_once))
        return error <= 1e-5, f"relative error {error:.1e}"

    def skipped() -> tuple[bool, str]:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        bad = [(inputs * float("inf"), targets) for inputs, targets in pairs[:1]] + pairs[1:]
        found = weights(1, lambda model, optimizer: step(model, optimizer, scaler, bad))
        return torch.equal(found, start.weight) and scaler.get_scale() == 512, f"the scale is {scaler.get_scale():g}"

    check.holds("a step on 4 micro-batches is the clipped step on all of their samples", lambda: same(1))
    check.holds("so are 3 steps", lambda: same(3))
    check.holds("a step with inf in one micro-batch is skipped, and the scale halves", skipped)
    return check


def batch_sampler(make: Callable[..., Iterable[Sequence[int]]], batch_size: int = 32, k: int = 10) -> Check:
    """A sampler `make(lengths, batch_size, k)` of batches of indices whose lengths differ by at most k."""
    check = Check(_name(make))
    lengths = np.random.default_rng(0).integers(1, 641, 20_000)
    epoch: list[list[int]] = []

    def once() -> tuple[bool, str]:
        epoch.extend([int(i) for i in batch] for batch in make(lengths, batch_size, k))
        return _each_once(epoch, len(lengths))

    def spread() -> tuple[bool, str]:
        widest = max(int(np.ptp(lengths[batch])) for batch in epoch)
        return widest <= k, f"at most {widest}"

    def sizes() -> tuple[bool, str]:
        full = np.mean([len(batch) for batch in epoch]) / batch_size
        return max(map(len, epoch)) <= batch_size and full >= 0.5, f"{full:.0%} full on the mean"

    def shuffled() -> tuple[bool, str]:
        means = np.array([lengths[batch].mean() for batch in epoch])
        trend = abs(np.corrcoef(means, np.arange(len(means)))[0, 1])
        return trend < 0.2, f"correlation of length and position {trend:.2f}"

    def flat() -> tuple[bool, str]:
        few, many = (_batch_us(make, n, batch_size, k) for n in (10_000, 300_000))
        return many <= 3 * few + 5, f"{few:.0f} µs of 10,000 samples, {many:.0f} µs of 300,000"

    check.holds("every index comes once", once)
    if epoch:
        check.holds(f"lengths in a batch differ by at most k = {k}", spread)
        check.holds(f"batches have at most {batch_size} indices, and are mostly full", sizes)
        check.holds("short and long batches come in random order", shuffled)
        check.holds("a batch takes as long from many samples as from few", flat)
    return check


def _batch_us(make: Callable, samples: int, batch_size: int, k: int) -> float:
    """Microseconds a batch, without what happens before the first: the best of three."""
    lengths = np.random.default_rng(0).integers(1, 641, samples)
    best = float("inf")
    for _ in range(3):
        batches = iter(make(lengths, batch_size, k))
        next(batches)
        start = time.perf_counter()
        taken = sum(1 for _ in itertools.islice(batches, 200))
        best = min(best, (time.perf_counter() - start) / max(taken, 1) * 1e6)
    return best


def packing(pack: Callable[[Sequence[int], int], Iterable[Sequence[int]]], capacity: int = 640) -> Check:
    """A function of (lengths, capacity) that gives packs of indices, none longer together than the capacity."""
    check = Check(_name(pack))
    lengths = np.random.default_rng(0).integers(1, capacity + 1, 2000)
    packs: list[list[int]] = []

    def once() -> tuple[bool, str]:
        packs.extend([int(i) for i in indices] for indices in pack(lengths, capacity))
        return _each_once(packs, len(lengths))

    def few() -> tuple[bool, str]:
        least, most = -(-int(lengths.sum()) // capacity), _next_fit(lengths, capacity)
        return len(packs) < most, f"{len(packs)} packs; the lower bound is {least}, next fit takes {most}"

    check.holds("every sample is packed once", once)
    if packs:
        check.holds("no pack overflows", lambda: max(int(lengths[indices].sum()) for indices in packs) <= capacity)
        check.holds("fewer packs than by next fit", few)
    return check


def packed_attention(attend: Callable[[Tensor, Tensor, Tensor, np.ndarray], Tensor], device: str = "cpu") -> Check:
    """Attention `attend(q, k, v, offsets)` over documents packed in one sequence, causal within each.

    q, k and v are (1, heads, T, head_dim); document i lies at `offsets[i]` to `offsets[i + 1]`.
    """
    check = Check(_name(attend))
    lengths = [5, 1, 30, 12]
    offsets = np.cumsum([0, *lengths])

    def inputs() -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        shape = (1, 2, int(offsets[-1]), 16)
        return [torch.randn(shape, generator=generator).to(device).requires_grad_() for _ in range(3)]

    def alone(*tensors: Tensor) -> Tensor:
        parts = zip(*(tensor.split(lengths, dim=2) for tensor in tensors), strict=True)
        return torch.cat([F.scaled_dot_product_attention(*part, is_causal=True) for part in parts], dim=2)

    def close(found: Iterable[Tensor], expected: Iterable[Tensor]) -> tuple[bool, str]:
        error = max(relative_error(a, b) for a, b in zip(found, expected, strict=True))
        return error <= 1e-4, f"relative error {error:.1e}"

    def gradients(attention: Callable[..., Tensor], *more: Any) -> tuple[Tensor, ...]:
        tensors = inputs()
        out = attention(*tensors, *more)
        return torch.autograd.grad(out, tensors, torch.sin(torch.arange(out.numel(), device=device)).view(out.shape))

    def changed(at: int) -> Tensor:
        """By how much each position's output changes with the token at a place, (T,)."""
        q, k, v = (part.detach() for part in inputs())
        before = attend(q, k, v, offsets)
        for part in (q, k, v):
            part[:, :, at] += 1.0
        return (attend(q, k, v, offsets) - before).abs().amax(dim=(0, 1, 3))

    def contained() -> tuple[bool, str]:
        outside = torch.cat(
            [changed(at)[np.r_[0:begin, end : offsets[-1]]] for at, begin, end in ((8, 6, 36), (5, 5, 6))]
        )
        return float(outside.max()) == 0.0, f"largest change {float(outside.max()):.1e}"

    check.holds(
        "the output is that of each document alone", lambda: close([attend(*inputs(), offsets)], [alone(*inputs())])
    )
    check.holds("a changed token changes no other document", contained)
    check.holds("a changed token changes no position before it", lambda: float(changed(20)[:20].max()) == 0.0)
    check.holds(
        "the gradients are those of each document alone", lambda: close(gradients(attend, offsets), gradients(alone))
    )
    return check


def _each_once(groups: list[list[int]], count: int) -> tuple[bool, str]:
    wrong = int((np.bincount(np.concatenate(groups), minlength=count) != 1).sum())
    return wrong == 0, f"{wrong:,} of {count:,} not exactly once" if wrong else ""


def _next_fit(lengths: Iterable[int], capacity: int) -> int:
    """Packs that are needed if only the last one is looked at."""
    packs, room = 0, 0
    for length in lengths:
        if length > room:
            packs, room = packs + 1, capacity
        room -= length
    return packs


class _Spin(nn.Module):
    """Takes so many milliseconds, forward."""

    def __init__(self, ms: float) -> None:
        super().__init__()
        self.ms = ms

    def forward(self, x: Tensor) -> Tensor:
        end = time.perf_counter() + self.ms / 1e3
        while time.perf_counter() < end:
            pass
        return x


def profiler_times(measure: Callable[[nn.Module, Callable[[], Any]], Mapping[str, float]]) -> Check:
    """A function of (model, step) that runs a training step some times: milliseconds of forward by module name."""
    check = Check(_name(measure))
    model = nn.Sequential(nn.Linear(1, 1))
    for name, ms in (("short", 2.0), ("long", 6.0)):
        model.add_module(name, nn.Sequential(_Spin(ms / 2), _Spin(ms / 2)))
    times: dict[str, float] = {}

    def known() -> tuple[bool, str]:
        for _ in range(3):  # another process may take the core for a while
            times.update(measure(model, lambda: model(torch.zeros(1, 1)).sum().backward()))
            short, long = times["short"], times["long"]
            if held := max(abs(short / 2 - 1), abs(long / 6 - 1)) <= 0.15:
                break
        return held, f"{short:.2f} ms of 2, {long:.2f} ms of 6"

    def nested() -> tuple[bool, str]:
        inner = times["long.0"] + times["long.1"]
        return inner <= times["long"] * 1.05, f"{inner:.2f} ms in {times['long']:.2f}"

    check.holds("modules take the time that they are known to take", known)
    if times:
        check.holds("what lies inside takes no longer than what lies around it", nested)
        hooks = [hook for m in model.modules() for hook in (*m._forward_hooks, *m._forward_pre_hooks)]
        check.holds("no hook is left behind", lambda: not hooks)
    return check
