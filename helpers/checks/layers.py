"""Checks of a layer's output, gradients and saved tensors, and of what is derived for a model."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..lab.machine import device
from ..lab.memory import peak_memory, saved_bytes
from .check import Checker, Line, at_most, close

HINTS = {
    "x": "x is used twice, so its gradient is a sum.",
    "W": "The derivative of SiLU has two terms; compare it with autograd's at one number.",
    "V": "In an elementwise product each factor's gradient holds the other factor.",
    "U": "A weight's gradient sums over all tokens; of which matrix is it the left factor's transpose?",
}


@Checker
def swiglu(function: Any, levels: Sequence[int] = (0, 1), tolerance: float = 1e-4, seed: int = 0) -> Iterator[Line]:
    """A `torch.autograd.Function` (or a callable) of (x, W, V, U, level), against autograd of the plain formula.

    W and V are (d, I), U is (I, d). Level 0 may save xW, SiLU(xW) and xV, level 1 nothing but x, level 2 xW and xV;
    other levels are checked for their output and gradients.
    """
    apply = getattr(function, "apply", function)
    d, intermediate = 8, 24
    shapes = ((d, intermediate), (d, intermediate), (intermediate, d))

    def inputs(dtype: torch.dtype, *leading: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        sizes = ((*leading, d), *shapes)
        return [torch.randn(s, generator=generator, dtype=dtype).requires_grad_() for s in sizes]

    def plain(x: Tensor, W: Tensor, V: Tensor, U: Tensor) -> Tensor:
        return (F.silu(x @ W) * (x @ V)) @ U

    def gradient(layer: Callable[..., Tensor], place: int) -> Sequence[Tensor]:
        tensors = inputs(torch.float32, 3, 7)
        l = torch.randn(3, 7, d, generator=torch.Generator().manual_seed(seed + 1))
        return torch.autograd.grad(layer(*tensors), tensors[place], l)

    def derivatives(level: int) -> bool:
        return torch.autograd.gradcheck(lambda *tensors: apply(*tensors, level), inputs(torch.float64, 2))

    def saved(level: int) -> int:
        x, *weights = inputs(torch.float32, 50)
        return saved_bytes(lambda: apply(x, *weights, level), without=weights)

    def output(level: int) -> Tensor:
        return apply(*inputs(torch.float32, 3, 7), level)

    def right_output(y: Tensor) -> tuple[bool, str]:
        return close([y], [plain(*inputs(torch.float32, 3, 7))], tolerance)

    def right_gradient(place: int, ours: list[Tensor]) -> tuple[bool, str]:
        return close(ours, gradient(plain, place), tolerance)

    for level in levels:
        about = f"level {level}: the output is (SiLU(xW) ⊙ xV) U, for x (3, 7, d)"
        yield Line(about, partial(output, level), right_output, "Which of the two products goes through SiLU?")
        for place, name in enumerate("xWVU"):
            computed = partial(gradient, lambda *tensors, level=level: apply(*tensors, level), place)
            about = f"level {level}: the gradient of {name} is autograd's"
            yield Line(about, computed, partial(right_gradient, place), HINTS[name])
        if tolerance <= 1e-4:
            yield Line(f"level {level}: gradcheck in fp64", partial(derivatives, level))
        if level < 3:
            what, tensors_of_xW = (("x, xW, SiLU(xW), xV", 3), ("x alone", 0), ("x, xW, xV", 2))[level]
            allowed = 50 * (d + tensors_of_xW * intermediate) * 4
            hint = "What can backward compute again from the others, without a matrix product?"
            few = at_most(allowed, "bytes")
            yield Line(f"level {level} saves {what}", partial(saved, level), few, hint, conditional=True)


@Checker
def mfu(utilization: Callable[[str, int, float, float], float], seed: int = 0) -> Iterator[Line]:
    """A function of (model, sequence, tokens/s, peak FLOP/s): the share of the peak that a training's products take."""
    width, layers, vocabulary, intermediate, heads, kv_heads = 2048, 16, 128_256, 8192, 32, 8
    projections = 2 * width**2 + 2 * width * width // heads * kv_heads
    parameters = vocabulary * width + layers * (projections + 3 * width * intermediate + 2 * width) + width
    drawn = np.random.default_rng(seed).integers((5, 6, 100), (9, 12, 900))

    def judge(sequence: int, rate: float, peak: float, share: float) -> tuple[bool, str]:
        right = (6 * parameters + 6 * layers * 2 * width * sequence) * rate / peak
        return abs(share - right) < 1e-3 * right, f"{share:.4g}"

    hint = "A weight takes 6 operations a token; attention adds some for every token before. MFU is a share, not a %."
    another = 1024 * int(drawn[0]), 1000.0 * int(drawn[1]), 1e12 * int(drawn[2])
    for sequence, rate, peak in ((2048, 60_000.0, 989e12), another):
        about = f"MFU of llama-3.2-1b at {sequence} tokens, {rate:,.0f} tokens/s and {peak / 1e12:.0f} TFLOP/s"
        computed = partial(utilization, "llama-3.2-1b", sequence, rate, peak)
        yield Line(about, computed, partial(judge, sequence, rate, peak), hint)


@Checker
def chunked_loss(
    loss: Callable[[Tensor, Tensor, Tensor], Tensor], recomputes: bool = False, seed: int = 0
) -> Iterator[Line]:
    """Mean cross-entropy of (hidden (N, d), weight (V, d), targets (N,)) as the full logits give it, and its gradients.

    One that recomputes saves nothing but its inputs.
    """

    def inputs() -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        x, w = (torch.randn(n, 32, dtype=torch.float64, generator=generator).requires_grad_() for n in (300, 50))
        return x, w, torch.randint(50, (300,), generator=generator)

    def full(x: Tensor, w: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, w).float(), targets)

    def gradient(of: Callable[..., Tensor], place: int) -> Tensor:
        tensors = inputs()
        return torch.autograd.grad(3 * of(*tensors), tensors[place])[0]

    def right_gradient(place: int, given: Tensor) -> tuple[bool, str]:
        return close([given], [gradient(full, place)], 1e-5)

    def saved() -> int:
        x, w, targets = inputs()
        return saved_bytes(lambda: loss(x, w, targets), without=[x, w, targets])

    hint = "The mean is over all 300 tokens, and the last chunk may be shorter than the others."
    yield Line(
        "the loss is F.cross_entropy's", lambda: loss(*inputs()), lambda y: close([y], [full(*inputs())], 1e-5), hint
    )
    hint = "What the loss is multiplied by reaches backward as its argument; softmax minus one-hot, over all tokens."
    for place, what in enumerate(("hidden states", "weight")):
        about = f"the gradient of the {what}"
        yield Line(about, partial(gradient, loss, place), partial(right_gradient, place), hint)
    if recomputes:
        hint = "Gradients of the inputs are as large as the inputs: save those, and compute in backward."
        yield Line("nothing but the inputs is saved", saved, at_most(0, "bytes more"), hint, conditional=True)


@Checker
def fused_norm(
    fused: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor], norm: bool = True, seed: int = 0
) -> Iterator[Line]:
    """LayerNorm(gelu(x ⊙ w + b) + r) of (x, w, b, r) without a temporary as large as x; without `norm` the chain."""

    def inputs(rows: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        shapes = ((rows, 256), (256,), (256,), (rows, 256))
        return [torch.randn(shape, generator=generator).to(device()) for shape in shapes]

    def right(rows: int, out: Tensor) -> tuple[bool, str]:
        x, w, b, r = (tensor.cpu() for tensor in inputs(rows))
        chain = F.gelu(x * w + b) + r
        return close([out], [F.layer_norm(chain, (256,)) if norm else chain], 1e-4)

    def extra() -> float:
        tensors = inputs(4096)
        return peak_memory(lambda: fused(*tensors)).added_bytes / tensors[0].nbytes

    for rows, hint in (
        (4096, "In which order do gelu, the residual and what follows come?"),
        (301, "The last block may be shorter than the others."),
    ):
        yield Line(
            f"{rows} rows agree with eager", partial(lambda n: fused(*inputs(n)), rows), partial(right, rows), hint
        )
    few = at_most(1.5, "times the bytes of x at the peak, the output among them")
    hint = "Take a block of rows through the whole chain before the next one."
    yield Line("no large temporary", extra, few, hint, conditional=True)
    unchanged = partial(_unchanged, fused, inputs(301))
    yield Line("the arguments stay as they were", unchanged, hint="`out=` writes there.", conditional=True)


def _unchanged(fn: Callable[..., Any], tensors: Sequence[Tensor]) -> bool:
    before = [tensor.clone() for tensor in tensors]
    fn(*tensors)
    return all(map(torch.equal, before, tensors))
