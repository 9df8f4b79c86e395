"""Checks of mixed precision: loss scalers, autocast, steps with accumulated gradients."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from .check import Checker, Line, at_most, close, equals

Operation = Callable[[Any, Any, Tensor], Tensor]  # of a linear layer, a norm and x (4, 16)
LOW: dict[str, Operation] = {
    "matmul": lambda _linear, _norm, x: torch.matmul(x, x.T),
    "conv2d": lambda _linear, _norm, x: F.conv2d(x[None, None], torch.ones(1, 1, 3, 3)),
}
FP32: dict[str, Operation] = {
    "layer_norm": lambda _linear, norm, x: norm(x),
    "softmax": lambda _linear, _norm, x: F.softmax(x, dim=-1),
    "cross_entropy": lambda _linear, _norm, x: F.cross_entropy(x, torch.arange(4)),
}
READS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default}


@Checker
def grad_scaler(make: Callable[..., Any], dynamic: bool = True, reads: bool = True, seed: int = 0) -> Iterator[Line]:
    """A loss scaler with `scale(loss)`, `step(optimizer)`, `update()`, against plain training and torch's scaler.

    It skips steps with an inf or a NaN in a gradient. A static one is built by `make(scale)`; a dynamic one by
    `make(init_scale=…, growth_factor=…, backoff_factor=…, growth_interval=…)`, and it says its scale by `get_scale()`.
    One that `reads` nothing has no `if` on a tensor.
    """

    def built(scale: float) -> Any:
        return make(init_scale=scale) if dynamic else make(scale)

    def scaled() -> float:
        return float(built(64.0).scale(torch.tensor(1.5, requires_grad=True)).detach())

    def trained(scale: float, bad: tuple[int, ...] = ()) -> list[Tensor]:
        return _train(built(scale), seed, bad)[0]

    def same_weights(bad: Iterable[int], weights: list[Tensor]) -> tuple[bool, str]:
        return close(weights, _train(None, seed, bad)[0], 1e-5)

    about, hint = "scale(loss) is loss · scale", "The scale is a number that the loss is multiplied by."
    yield Line(f"{about}, 1.5 · 64", scaled, equals(96.0), hint)
    hint = "Before the optimizer's step each gradient is divided by the scale once. Who divides it here, and how often?"
    about = "40 steps give the weights of unscaled training"
    yield Line(about, partial(trained, 1024.0), partial(same_weights, ()), hint)
    hint = "After a skipped step everything that the optimizer changes is as before, its momentum too."
    for about, bad in (("a step with inf in a gradient is skipped", (4, 6)), ("so is one with NaN", (5, 7))):
        yield Line(about, partial(trained, 8.0, bad), partial(same_weights, bad), hint)
    if not dynamic:
        return
    options: dict[str, Any] = {"init_scale": 1024.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 7}

    def scales(bad: tuple[int, ...]) -> list[float]:
        return _train(make(**options), seed, bad)[1]

    def same_scales(bad: tuple[int, ...], ours: list[float]) -> tuple[bool, str]:
        theirs = _train(torch.amp.GradScaler("cpu", **options), seed, bad)[1]
        wrong = next((n for n, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]), None)
        if wrong is None:
            return True, f"40 scales equal torch's, the last {ours[-1]:g}"
        return False, f"after step {wrong} the scale is {ours[wrong]:g}, and not torch's"

    hint = "When does the count of good steps begin anew: after growing, after an overflow?"
    overflows = 3, 12, 13, 30
    for about, steps in (("the scale grows after 7 good steps", ()), ("the scale falls after inf", overflows)):
        about += ", and counts anew" if steps else ""
        yield Line(about, partial(scales, steps), partial(same_scales, steps), hint)
    if not reads:
        hint = "`if`, `bool`, `float` and `.item()` read a number of a tensor; `torch.where` chooses without."
        yield Line(
            "step and update read no number of a tensor",
            partial(_reads, make, options, seed),
            at_most(0, "in 40 steps"),
            hint,
            conditional=True,
        )


def _problem(seed: int) -> tuple[nn.Linear, torch.optim.Optimizer, list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    model = nn.Linear(8, 4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    groups = [{"params": [parameter]} for parameter in model.parameters()]
    optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
    return model, optimizer, [torch.randn(16, 8, generator=generator) for _ in range(40)]


def _train(scaler: Any, seed: int, bad: Iterable[int] = ()) -> tuple[list[Tensor], list[float]]:
    """The weights at the end and the scale by step; in `bad` ones a gradient has an inf, or a NaN in odd steps."""
    model, optimizer, batches = _problem(seed)
    scales = []
    for number, batch in enumerate(batches):
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        (loss if scaler is None else scaler.scale(loss)).backward()
        if number in bad:
            model.bias.grad[0] = float("nan" if number % 2 else "inf")
        if scaler is None:
            if number not in bad:
                optimizer.step()
            continue
        scaler.step(optimizer)
        scaler.update()
        if hasattr(scaler, "get_scale"):
            scales.append(float(scaler.get_scale()))
    return [p.detach().clone() for p in model.parameters()], scales


class _Reads(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += operation in READS
        return operation(*args, **(kwargs or {}))


def _reads(make: Callable[..., Any], options: dict[str, Any], seed: int) -> int:
    """How often 40 steps of a scaler read a tensor's number into Python."""
    model, optimizer, batches = _problem(seed)
    scaler, reads = make(**options), _Reads()
    for batch in batches:
        optimizer.zero_grad()
        scaler.scale(model(batch).square().mean()).backward()
        with reads:
            scaler.step(optimizer)
            scaler.update()
    return reads.count


@Checker
def autocast(
    make: Callable[..., Any], fp32: Sequence[str] = (), low: Sequence[str] = (), seed: int = 0
) -> Iterator[Line]:
    """A context manager `make(dtype=…)` in which linear layers compute in `dtype` and norms of fp32 numbers in fp32.

    Those of `LOW` that are named give `dtype` as linear layers do, and those of `FP32` give fp32 of numbers in `dtype`.
    """

    dtype, parts = torch.bfloat16, cache(partial(_parts, seed))

    def run(fn: Operation, of: torch.dtype = torch.float32, to: torch.dtype = dtype) -> Tensor:
        linear, norm, x = parts()
        with make(dtype=to):
            return fn(linear, norm, x.to(of))

    def dtype_of(fn: Operation, of: torch.dtype = torch.float32, to: torch.dtype = dtype) -> str:
        return str(run(fn, of, to).dtype)[6:]

    def right(given: Tensor) -> tuple[bool, str]:
        linear, norm, x = parts()
        with torch.autocast("cpu", dtype=dtype):
            return close([given], [norm(linear(x))], 1e-2)

    def gradients() -> str:
        linear = parts()[0]
        linear.zero_grad()
        run(lambda linear, norm, x: norm(linear(x))).square().sum().backward()
        return "none" if linear.weight.grad is None else str(linear.weight.grad.dtype)[6:]

    def after() -> list[str]:
        linear, _, x = parts()
        functions = F.linear, F.layer_norm, F.relu
        try:
            with make(dtype=dtype), make(dtype=dtype):
                raise KeyError
        except KeyError:
            put_back = (F.linear, F.layer_norm, F.relu) == functions
            return [str(linear(x).dtype)[6:], "torch's functions" if put_back else "other functions"]

    half, hint = str(dtype)[6:], "Which of the arguments of F.linear have to be in 16 bits?"
    yield Line(f"a linear layer gives {half}", partial(dtype_of, _linear), equals(half), hint)
    about, hint = "one in another region gives float16", "The type is what the region was made with."
    yield Line(about, partial(dtype_of, _linear, to=torch.float16), equals("float16"), hint)
    for name in low:
        hint = "Which functions are products of matrices? A convolution is one, too."
        yield Line(f"{name} gives {half}", partial(dtype_of, LOW[name]), equals(half), hint)
    about, hint = "a norm of fp32 numbers stays fp32", "A norm sums many numbers: in which type?"
    yield Line(about, partial(dtype_of, FP32["layer_norm"]), equals("float32"), hint, conditional=True)
    for name in fp32:
        about, hint = f"{name} of {half} numbers is fp32", "What sums many numbers: in which type are its inputs?"
        yield Line(about, partial(dtype_of, FP32[name], dtype), equals("float32"), hint)
    hint = "The norm gets what the linear layer gave; which type has its weight?"
    yield Line("the result is torch.autocast's", lambda: run(lambda linear, norm, x: norm(linear(x))), right, hint)
    hint = "A cast that autograd sees is differentiated; one on `.data` or under `no_grad` is not."
    yield Line("the weights' gradients are fp32", gradients, equals("float32"), hint, conditional=True)
    about = "outside, also after an error inside, all is as before"
    hint = "What is put back on leaving: also where the region raises, and where it lies in another?"
    yield Line(about, after, equals(["float32", "torch's functions"]), hint, conditional=True)


def _parts(seed: int) -> tuple[nn.Linear, nn.LayerNorm, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    linear = nn.Linear(16, 16)
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.uniform_(-0.25, 0.25, generator=generator)
    return linear, nn.LayerNorm(16), torch.randn(4, 16, generator=generator)


def _linear(linear: nn.Linear, _norm: nn.LayerNorm, x: Tensor) -> Tensor:
    return linear(x)


@Checker
def accumulated_step(
    step: Callable[[nn.Module, torch.optim.Optimizer, Any, list], Any], seed: int = 0
) -> Iterator[Line]:
    """A function of (model, optimizer, scaler, micro-batches): one step on pairs of inputs and targets under a scale.

    The loss is the mean squared error; gradients are clipped to a norm of 1. It is judged with torch's scaler.
    """
    generator = torch.Generator().manual_seed(seed)
    long = [(torch.randn(6, 8, generator=generator), 9 * torch.randn(6, 4, generator=generator)) for _ in range(4)]
    short = [(inputs / 8, targets / 99) for inputs, targets in long]
    start = nn.Linear(8, 4).requires_grad_(False)
    start.weight.uniform_(-0.3, 0.3, generator=generator)
    start.bias.zero_()

    def weights(steps: int, run: Callable[[nn.Module, torch.optim.Optimizer], Any]) -> Tensor:
        model = nn.Linear(8, 4)
        model.load_state_dict(start.state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(steps):
            run(model, optimizer)
        return model.weight.detach()

    def at_once(model: nn.Module, optimizer: torch.optim.Optimizer, pairs: list) -> None:
        optimizer.zero_grad()
        inputs, targets = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        F.mse_loss(model(inputs), targets).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    def stepped(steps: int, pairs: list, scale: float = 1024.0) -> Tensor:
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        return weights(steps, lambda model, optimizer: step(model, optimizer, scaler, pairs))

    def with_inf() -> tuple[Tensor, float]:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        bad = [(inputs * float("inf"), targets) for inputs, targets in long[:1]] + long[1:]
        return weights(1, lambda model, optimizer: step(model, optimizer, scaler, bad)), scaler.get_scale()

    def right(steps: int, pairs: list, weight: Tensor) -> tuple[bool, str]:
        return close([weight], [weights(steps, lambda model, optimizer: at_once(model, optimizer, pairs))], 1e-5)

    def skipped(given: list) -> tuple[bool, str]:
        moved = "" if torch.equal(given[0], start.weight) else ", and the weights have moved"
        return not moved and given[1] == 512, f"the scale is {given[1]:g}, after 1024{moved}"

    about = "a step on 4 micro-batches is the clipped step on all of their samples"
    hint = "The gradients must be the mean of all, and unscaled, when their norm is computed."
    yield Line(about, partial(stepped, 1, long), partial(right, 1, long), hint)
    hint = "The loss is a mean over all micro-batches: which factor does each one's take?"
    about = "where the norm is below 1, nothing is clipped"
    yield Line(about, partial(stepped, 1, short), partial(right, 1, short), hint)
    hint = "What is left in the gradients when the next step begins?"
    yield Line("so are 3 steps, under a scale of 8", partial(stepped, 3, short, 8.0), partial(right, 3, short), hint)
    about = "a step with inf in one micro-batch is skipped, and the scale halves"
    yield Line(about, with_inf, skipped, "The scaler decides whether the optimizer steps, and is updated once a step.")
