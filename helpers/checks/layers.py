"""Checks of a layer's output, gradients and saved tensors, and of what is derived for a model."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..lab.machine import device
from ..lab.memory import peak_memory, saved_bytes
from .check import Checker, Line, at_most, close

RANDOM_STATES = 2**15  # bytes; each has 5,000
# What is asked of gradients, by the names of those that differ.
HINTS = {
    "x": "x is used twice, so its gradient is a sum.",
    "xW": "V's gradient is right: so is that of z. Which steps lead to xW? The derivative of SiLU has two terms.",
    "xV": "In an elementwise product each factor's gradient holds the other factor.",
    "xWV": "U's gradient is right: what is the gradient of z, which those of xW and xV begin with?",
    "U": "The gradient of a product's right factor is the left factor's transpose times l: which product is it here?",
}
WEIGHTS = "x's gradient is right: so are those of xW and xV. A weight's sums over all tokens; which is whose?"
SEVERAL = "Several steps differ. Go backwards from l, and compare each with autograd's."
SILU = "SiLU(a) is a · σ(a), for every number of xW, and ⊙ multiplies elementwise."
# What each level may save, bytes for each of xW's numbers, and a hint.
SAVED = (
    ("x, xW, SiLU(xW), xV", 12, "What can backward compute again from these, without a matrix product?"),
    ("x alone", 0, "Backward can compute all else again from x and the weights; an attribute of ctx is memory, too."),
    ("x, xW, xV", 8, "What can backward compute again from these, without a matrix product?"),
    (
        "x, and xW and xV in 8 bits",
        2,
        "`torch.int8` holds −127 to 127: which scale has a token's largest number there?",
    ),
)


@Checker
def swiglu(function: Any, levels: Sequence[int] = (0, 1), seed: int = 0) -> Iterator[Line]:
    """A `torch.autograd.Function` (or a callable) of (x, W, V, U, level), against autograd of the plain formula.

    W and V are (d, I), U is (I, d). Level 0 may save xW, SiLU(xW) and xV, level 1 nothing but x, level 2 xW and xV, and
    level 3 those two in 8 bits, with a scale of 4 bytes for each token or for 128 numbers.
    """
    apply = getattr(function, "apply", function)
    d, intermediate, tokens = 8, 24, 1000

    def inputs(dtype: torch.dtype, *leading: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        sizes = ((*leading, d), (d, intermediate), (d, intermediate), (intermediate, d))
        return [torch.randn(s, generator=generator, dtype=dtype).requires_grad_() for s in sizes]

    def gradients(layer: Callable[..., Tensor]) -> Sequence[Tensor]:
        tensors = inputs(torch.float32, 3, 7)
        l = torch.randn(3, 7, d, generator=torch.Generator().manual_seed(seed + 1))
        return torch.autograd.grad(layer(*tensors), tensors, l, allow_unused=True)

    def derivatives(level: int) -> bool:
        return torch.autograd.gradcheck(lambda *tensors: apply(*tensors, level), inputs(torch.float64, 2))

    def saved(level: int) -> int:
        x, *weights = inputs(torch.float32, tokens)
        return _held_bytes(lambda: apply(x, *weights, level), weights)

    def output(level: int) -> Tensor:
        return apply(*inputs(torch.float32, 3, 7), level)

    def right_output(y: Tensor) -> tuple[bool, str]:
        return close([y], [_swiglu(*inputs(torch.float32, 3, 7))], 1e-4)

    def hint_of_output(y: Tensor) -> str:
        x, W, V, U = inputs(torch.float32, 3, 7)
        if close([y], [_swiglu(x, V, W, U)], 1e-4)[0]:
            return "Which of the two products goes through SiLU?"
        return "Nearly right: which step rounds?" if close([y], [_swiglu(x, W, V, U)], 5e-2)[0] else SILU

    def right_gradient(place: int, within: float, ours: list[Tensor]) -> tuple[bool, str]:
        return close(ours[place : place + 1], gradients(_swiglu)[place : place + 1], within)

    def hint_of_gradients(within: float, ours: list[Tensor]) -> str:
        wrong = "".join(name for place, name in enumerate("xWVU") if not right_gradient(place, within, ours)[0])
        return HINTS.get(wrong, SEVERAL if "x" in wrong else WEIGHTS)

    for level in levels:
        about = f"level {level}: the output is (SiLU(xW) ⊙ xV) U, for x (3, 7, d)"
        yield Line(about, partial(output, level), right_output, hint_of_output)
        computed = partial(gradients, lambda *tensors, level=level: apply(*tensors, level))
        within, roughly = (5e-2, ", within 5 %") if level == 3 else (1e-4, "")
        for place, name in enumerate("xWVU"):
            about = f"level {level}: the gradient of {name} is autograd's{roughly}"
            yield Line(about, computed, partial(right_gradient, place, within), partial(hint_of_gradients, within))
        if level < 3:
            hint = "fp64 inputs want fp64 steps, and x may have two dimensions."
            yield Line(f"level {level}: gradcheck in fp64", partial(derivatives, level), hint=hint)
        what, a_number, hint = SAVED[level]
        scales = 2 * 4 if level == 3 else 0
        few = at_most(tokens * (4 * d + a_number * intermediate + scales), "bytes")
        yield Line(f"level {level} saves {what}", partial(saved, level), few, hint, conditional=True)


def _swiglu(x: Tensor, W: Tensor, V: Tensor, U: Tensor) -> Tensor:
    return (F.silu(x @ W) * (x @ V)) @ U


def _held_bytes(fn: Callable[[], Tensor], without: Sequence[Tensor]) -> int:
    """What a call leaves for backward, beside its result and the tensors in `without`.

    Autograd says what it saves; what is kept elsewhere, such as in attributes of `ctx`, is seen by its memory, where
    the random states that `checkpoint` keeps don't count.
    """
    return max(saved_bytes(fn, without=without), peak_memory(fn).kept_bytes - fn().nbytes - RANDOM_STATES)


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
        return _held_bytes(lambda: loss(x, w, targets), [x, w, targets])

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
    about, most = "x isn't read or written as a whole time and again", at_most(2, "operations on all rows")
    yield Line(about, lambda: _whole_passes(fused, inputs(4096)), most, hint, conditional=True)
    unchanged = partial(_unchanged, fused, inputs(301))
    yield Line("the arguments stay as they were", unchanged, hint="`out=` writes there.", conditional=True)


class _Passes(TorchDispatchMode):
    """Counts the operations that compute with a tensor of so many numbers."""

    def __init__(self, numbers: int) -> None:
        super().__init__()
        self.numbers, self.count = numbers, 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        sizes = [each.numel() for each in tree_leaves((args, kwargs, result)) if isinstance(each, Tensor)]
        computes = not operation.is_view and "empty" not in str(operation)
        self.count += computes and max(sizes, default=0) >= self.numbers
        return result


def _whole_passes(fn: Callable[..., Any], tensors: Sequence[Tensor]) -> int:
    with _Passes(tensors[0].numel()) as passes:
        fn(*tensors)
    return passes.count


def _unchanged(fn: Callable[..., Any], tensors: Sequence[Tensor]) -> bool:
    before = [tensor.clone() for tensor in tensors]
    fn(*tensors)
    return all(map(torch.equal, before, tensors))
