"""What the layer must cost, derived: bytes saved, peak bytes, operations. Beside what is measured.

T is tokens (batch × sequence length), d the hidden and I the intermediate size.
"""

from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from types import SimpleNamespace

import pandas as pd

from ...book.values import PERCENT, Number
from ...lab.memory import GIB
from ...swiglu.elementwise import groups
from ...swiglu.steps import KEEP_8BIT, KEEP_ALL, KEEP_INPUT, KEEP_TWO, LEVELS
from .layers import CHECKPOINT, LIGER, OURS, PLAIN, SAVES


def saved_bytes(level: int, tokens: int, hidden: int, intermediate: int, itemsize: int) -> int:
    """What a layer saves for backward besides its weights: its input, and what the level adds."""
    return tokens * hidden * itemsize + _saved_hidden(level, tokens * intermediate, itemsize)


@dataclass(frozen=True)
class Derived:
    """What a variant must cost: matrix products of T·d·I in a step, bytes saved a token, and their share of plain's."""

    products: int
    saved_per_token: float
    saved_ratio: float


def derived(variant: str, hidden: int, intermediate: int, itemsize: int) -> Derived | None:
    """The derived cost of a variant of `layers`; None where a compiler decides it.

    Autograd saves x, xW, SiLU(xW), xV and their product for the plain module. liger-kernel saves three tensors of xW's
    size: the two that its kernel reads, and the one that U multiplies.
    """
    tokens = 1000  # so that the scales of level 3 come in whole groups
    whole = tokens * (4 * intermediate + hidden) * itemsize
    saved = {
        PLAIN: whole,
        CHECKPOINT: tokens * hidden * itemsize,
        LIGER: tokens * (3 * intermediate + hidden) * itemsize,
    }
    saved |= {f"{OURS}{n}": saved_bytes(n, tokens, hidden, intermediate, itemsize) for n in LEVELS}
    if variant not in saved:
        return None
    # Both compute xW and xV again; torch's checkpoint stops before the last product, whose result nobody needs.
    products = 11 if variant in (CHECKPOINT, f"{OURS}{KEEP_INPUT}") else 9
    return Derived(products, saved[variant] / tokens, saved[variant] / whole)


def peak_bytes(level: int, tokens: int, hidden: int, intermediate: int, layers: int, itemsize: int) -> int:
    """The peak of one training step of a stack, by replaying what the kernels' code allocates and frees.

    On top of what exists before: weights, their gradients (which persist), the input with its gradient and the
    output's gradient. Exact to the byte but for the allocator's rounding.
    """
    wide, narrow = tokens * intermediate * itemsize, tokens * hidden * itemsize  # (T, I) and (T, d)
    weight = hidden * intermediate * itemsize
    saved = _saved_hidden(level, tokens * intermediate, itemsize)
    steps: list[int] = []  # bytes that are allocated, or freed
    for _ in range(layers):
        steps += [2 * wide]  # g, u
        steps += [{KEEP_ALL: 2 * wide, KEEP_INPUT: 0, KEEP_TWO: wide, KEEP_8BIT: saved}[level]]
        steps += [-wide if level in (KEEP_INPUT, KEEP_8BIT) else 0]  # u, where z is over g
        steps += [narrow, -wide]  # y, z
    for layer in reversed(range(layers)):
        steps += [2 * wide if level == KEEP_INPUT else 0]  # g, u again
        steps += [wide]  # ∂L/∂z, later z
        steps += [2 * wide if level == KEEP_8BIT else 0]  # ∂L/∂g, ∂L/∂u; elsewhere they are over g and u
        steps += [weight, -wide]  # ∂L/∂U, z
        steps += [2 * weight, narrow]  # ∂L/∂W and ∂L/∂V, ∂L/∂x
        steps += [-2 * wide if level in (KEEP_INPUT, KEEP_8BIT) else 0]  # ∂L/∂g, ∂L/∂u
        steps += [-saved - 3 * weight]  # what was saved; the weights' gradients, once they are added up
        steps += [-narrow if layer > 0 else 0]  # x, the output of the layer below
        steps += [-narrow if layer < layers - 1 else 0]  # ∂L/∂y, which the layer above had made
    return max(accumulate(steps))


def _saved_hidden(level: int, elements: int, itemsize: int) -> int:
    """What a level keeps besides x, from so many elements of xW."""
    return {
        KEEP_ALL: 3 * elements * itemsize,
        KEEP_INPUT: 0,
        KEEP_TWO: 2 * elements * itemsize,
        KEEP_8BIT: 2 * (elements + 4 * groups(elements)),
    }[level]


# Numbers

WIDTH, INTERMEDIATE = 2048, 8192  # Llama-3.2-1B's
PRINTED = pd.DataFrame(  # in the task: peaks of levels 0 and 1 in GiB, backward in seconds
    [
        (16, 128, 2048, 2, 0.305, 0.258, 0.0093, 0.0120),
        (32, 128, 2048, 2, 0.535, 0.442, 0.018, 0.023),
        (8, 512, 4096, 3, 1.469, 1.094, 0.092, 0.119),
        (16, 512, 4096, 3, 2.594, 1.844, 0.180, 0.233),
        (4, 1024, 16384, 5, 14.391, 11.391, 2.016, 2.668),
    ],
    columns=["batch", "sequence", "I", "layers", "peak_0", "peak_1", "backward_0", "backward_1"],
)


def costs() -> pd.DataFrame:
    """Bytes a token and matrix products of each variant whose cost is known without measuring, in 16 bits."""
    known = {name: derived(name, WIDTH, INTERMEDIATE, 2) for name in SAVES}
    return pd.DataFrame(
        {
            "variant": name,
            "saves": SAVES[name],
            "saved, KiB/token": cost.saved_per_token / 1024,
            "share of plain module": cost.saved_ratio,
            "matrix products": cost.products,
        }
        for name, cost in known.items()
    )


def printed() -> SimpleNamespace:
    """The task's own table: level 1 against level 0, and the reduction that its allocations give.

    Level 0 holds three tensors of T·I in fp32 for each of L layers when backward starts; level 1 holds the three of the
    layer that it is computing again, and none for the other L − 1.
    """
    table = PRINTED[["batch", "sequence", "I", "layers"]].assign(reduction_gib=PRINTED["peak_0"] - PRINTED["peak_1"])
    tensors = 3 * (table["layers"] - 1)
    table["derived_gib"] = tensors * table["batch"] * table["sequence"] * table["I"] * 4 / GIB
    table["share of peak"] = table["reduction_gib"] / PRINTED["peak_0"]
    table["backward longer by"] = PRINTED["backward_1"] / PRINTED["backward_0"] - 1
    return SimpleNamespace(
        table=table, lower=least_and_most(table["share of peak"]), longer=least_and_most(table["backward longer by"])
    )


def least_and_most(shares: pd.Series) -> SimpleNamespace:
    """The least and the largest of some shares."""
    share = partial(Number, unit=PERCENT, missing="stacks in fp32 at both levels", decimals=0)
    return SimpleNamespace(least=share(shares.min()), most=share(shares.max()))
