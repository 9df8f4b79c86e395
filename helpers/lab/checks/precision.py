"""Checks of mixed precision: loss scalers, autocast, steps with accumulated gradients."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .check import Check, close, name_of


def grad_scaler(make: Callable[..., Any], dynamic: bool = True) -> Check:
    """A loss scaler with `scale(loss)`, `step(optimizer)`, `update()`, against plain training and torch's scaler.

    A static one is built by `make(scale)`; a dynamic one by `make(init_scale=…, growth_factor=…, backoff_factor=…,
    growth_interval=…)`, and it says its scale by `get_scale()`.
    """
    check = Check(name_of(make))

    def built(scale: float) -> Any:
        return make(init_scale=scale) if dynamic else make(scale)

    def problem() -> tuple[nn.Linear, torch.optim.Optimizer, list[Tensor]]:
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

    def scaled() -> tuple[bool, str]:
        loss = torch.tensor(1.5, requires_grad=True)
        value = float(built(64.0).scale(loss).detach())
        return value == 96.0, f"1.5 · 64 = {value:g}"

    check.holds("scale(loss) is loss · scale", scaled)
    check.holds(
        "40 steps give the weights of unscaled training", lambda: close(train(built(1024.0))[0], train(None)[0], 1e-5)
    )
    if not dynamic:
        return check
    check.holds(
        "a step with inf in a gradient is skipped",
        lambda: close(train(built(8.0), {5, 6})[0], train(None, {5, 6})[0], 1e-5),
    )
    options: dict[str, Any] = {"init_scale": 1024.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 7}

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
    check = Check(name_of(make))
    torch.manual_seed(0)
    linear, norm = nn.Linear(16, 16), nn.LayerNorm(16)
    x = torch.randn(4, 16)

    def run(fn: Callable[[], Tensor]) -> Tensor:
        with make(dtype=dtype):
            return fn()

    def is_of(fn: Callable[[], Tensor], wanted: torch.dtype) -> tuple[bool, str]:
        actual = run(fn).dtype
        return actual == wanted, str(actual)[6:]

    check.holds(f"a linear layer gives {str(dtype)[6:]}", lambda: is_of(lambda: linear(x), dtype))
    check.holds("a norm of fp32 numbers stays fp32", lambda: is_of(lambda: norm(x), torch.float32))

    def values() -> tuple[bool, str]:
        with torch.autocast("cpu", dtype=dtype):
            expected = norm(linear(x))
        return close([run(lambda: norm(linear(x)))], [expected], 1e-2)

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
    check = Check(name_of(step))
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
        weight = weights(steps, lambda model, optimizer: step(model, optimizer, scaler, pairs))
        return close([weight], [weights(steps, at_once)], 1e-5)

    def skipped() -> tuple[bool, str]:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        bad = [(inputs * float("inf"), targets) for inputs, targets in pairs[:1]] + pairs[1:]
        weight = weights(1, lambda model, optimizer: step(model, optimizer, scaler, bad))
        return torch.equal(weight, start.weight) and scaler.get_scale() == 512, f"the scale is {scaler.get_scale():g}"

    check.holds("a step on 4 micro-batches is the clipped step on all of their samples", lambda: same(1))
    check.holds("so are 3 steps", lambda: same(3))
    check.holds("a step with inf in one micro-batch is skipped, and the scale halves", skipped)
    return check
