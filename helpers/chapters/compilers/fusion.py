"""Vertical and horizontal fusion: number of kernels, memory traffic and time of each variant.

Vertical: one operation's result is the next one's input, and stays in registers instead of memory. Horizontal:
independent operations share a kernel; they move as many bytes as before (fewer if they share an input), but with one
launch instead of one for each.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor

from ...book.table import Worth, table
from ...book.values import NOISY, PERCENT, TIMES, Number, derived, is_noisy, lacking, of_kernels, speedup
from ...compilers import backends, capture, kernels
from ...lab import STATUS, Row, compare
from ...lab.machine import device
from ...lab.timing import check_agreement, queue_far_ahead, tensors
from .side_by_side import TIMED

EAGER, COMPILED = "eager", "torch.compile"
FOREACH, FUSED, ONE_PRODUCT, BY_HAND = "foreach", "fused", "one product", "by hand"
LABELS = dict.fromkeys((BY_HAND, FOREACH, FUSED, ONE_PRODUCT), "by hand or library")
LABELS |= {EAGER: EAGER, COMPILED: COMPILED}
SAME = 1.03  # a smaller speedup counts as no difference
WIDTH, MANY, ROWS = 1024, 16, 128  # numbers in a row, tensors in a list, rows in a block


@dataclass
class Job:
    """The variants of one computation, each a call that returns its outputs, and the tensors that it must read."""

    variants: dict[str, Callable[[], Any]]
    reads: list[Tensor]
    before: Callable[[], Any] = lambda: None  # restores the tensors that a call changes
    compiles: Callable[[], Any] | None = None  # the function for torch.compile; None: the eager variant


def _tensors(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator(device()).manual_seed(0)
    dtype = torch.bfloat16 if device().type == "cuda" else torch.float32
    return [torch.randn(shape, generator=generator, device=device(), dtype=dtype) for shape in shapes]


def in_blocks(x: Tensor, w: Tensor, b: Tensor, residual: Tensor, rows: int = ROWS) -> Tensor:
    """gelu(x·w + b) + residual by blocks of rows, each as long as it is in the cache; `addcmul` saves a pass."""
    out = torch.empty_like(x)
    for h, r, o in zip(x.split(rows), residual.split(rows), out.split(rows), strict=True):
        torch.add(F.gelu(torch.addcmul(b, h, w)), r, out=o)
    return out


def pointwise_chain(size: int) -> Job:
    """gelu(x·w + b) + residual: four operations; by hand all of them block by block on a CPU, at once on a GPU."""
    x, residual, w, b = _tensors((size // WIDTH, WIDTH), (size // WIDTH, WIDTH), (WIDTH,), (WIDTH,))
    rows = ROWS if device().type == "cpu" else len(x)
    by_hand = functools.partial(in_blocks, x, w, b, residual, rows)
    return Job({EAGER: lambda: F.gelu(x * w + b) + residual, BY_HAND: by_hand}, [x, w, b, residual])


def softmax(size: int) -> Job:
    """Softmax of rows from its parts; by hand torch's own kernel."""
    (x,) = _tensors((size // WIDTH, WIDTH))

    def parts() -> Tensor:
        e = torch.exp(x - x.amax(-1, keepdim=True))  # (rows, WIDTH)
        return e / e.sum(-1, keepdim=True)

    return Job({EAGER: parts, BY_HAND: lambda: F.softmax(x, -1)}, [x])


def layer_norm(size: int) -> Job:
    """LayerNorm of rows from its parts; by hand torch's own kernel."""
    x, gain, shift = _tensors((size // WIDTH, WIDTH), (WIDTH,), (WIDTH,))

    def parts() -> Tensor:
        centred = x - x.mean(-1, keepdim=True)  # (rows, WIDTH)
        variance = (centred * centred).mean(-1, keepdim=True)
        return centred * torch.rsqrt(variance + 1e-5) * gain + shift

    return Job({EAGER: parts, BY_HAND: lambda: F.layer_norm(x, (WIDTH,), gain, shift)}, [x, gain, shift])


def many_pointwise(size: int) -> Job:
    """tanh(x)·2 of sixteen independent tensors."""
    xs = _tensors(*[(size // MANY,)] * MANY)
    variants = {
        EAGER: lambda: [torch.tanh(x) * 2 for x in xs],
        FOREACH: lambda: torch._foreach_mul(torch._foreach_tanh(xs), 2),
    }
    return Job(variants, xs)


def three_linears(size: int) -> Job:
    """Queries, keys and values: three products of one input; by hand one product with concatenated weights."""
    width = WIDTH // 4
    x, *weights = _tensors((size // width, width), *[(width, width)] * 3)
    together = torch.cat(weights)  # (3·width, width), once, before

    variants = {
        EAGER: lambda: [F.linear(x, w) for w in weights],
        ONE_PRODUCT: lambda: list(F.linear(x, together).chunk(3, -1)),
    }
    return Job(variants, [x, *weights])


def adamw(size: int) -> Job:
    """A step of AdamW over sixteen fp32 parameters: for-loop, foreach, torch's fused kernel, compiled."""
    generator = torch.Generator(device()).manual_seed(0)
    values, gradients = torch.randn(2, MANY, size // MANY, generator=generator, device=device())
    variants, states = {}, []
    for variant, flags in _ADAMW.items():
        parameters = [torch.nn.Parameter(value.clone()) for value in values]
        # capturable: the step count is on the GPU, so that no variant synchronizes
        optimizer = torch.optim.AdamW(parameters, capturable=device().type == "cuda", **flags)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
        moments = [optimizer.state[p][name] for name in ("exp_avg", "exp_avg_sq") for p in parameters]
        changed = [p.data for p in parameters] + moments
        states.append(changed + [optimizer.state[p]["step"] for p in parameters])
        variants[variant] = functools.partial(_step, optimizer, changed)
    initial = [[t.clone() for t in state] for state in states]

    def before() -> None:
        for state, first in zip(states, initial, strict=True):
            torch._foreach_copy_(state, first)

    return Job(variants, [*states[0], *gradients], before, compiles=variants.pop(COMPILED))


# torch.compile gets the foreach variant: from the for-loop it would generate a kernel for each parameter.
_ADAMW = {EAGER: {"foreach": False}, FOREACH: {"foreach": True}, FUSED: {"fused": True}, COMPILED: {"foreach": True}}


def _step(optimizer: torch.optim.Optimizer, changed: list[Tensor]) -> list[Tensor]:
    optimizer.step()
    return changed


CASES: dict[str, Callable[[int], Job]] = {
    "pointwise chain": pointwise_chain,
    "softmax": softmax,
    "LayerNorm": layer_norm,
    "many pointwise": many_pointwise,
    "three Linears": three_linears,
    "AdamW": adamw,
}


@table(
    small=[{"case": "softmax", "size": 2**14}],
    cpu=[{"case": case, "size": 2**23} for case in CASES],
    # at least 200 MB read and written, four times the L2 of 50 MB; AdamW moves seven times as many bytes
    gpu=[{"case": case, "size": 2**24 if case == "AdamW" else 2**26} for case in CASES],
    version=3,
    columns=TIMED + "variant kernels kernel_names bytes_moved bytes_least",
    worth=Worth(30, "bytes and kernels of a fused chain", cpu=3.6, gpu=4, big_gpu=7, on_gpu=6),
)
def fusion(case: str, size: int) -> list[Row]:
    """Kernels, bytes moved and time of eager and of the other variants of a case, as a row each, from one comparison.

    `size` is a number of elements, a multiple of 16,384. `kernels` and `bytes_moved` are counted as in `kernels.py`;
    `bytes_least` is the lower bound: every input read once and every output written once. All variants are compiled
    first, must agree with eager's outputs and then run in turn; `ratio` is to eager's time, `baseline_ms`. The host is
    10 ms ahead of a GPU, so that kernels are timed and not their launches. Compiling costs seconds, of the optimizer 20
    on a CPU, and clears torch.compile's cache.
    """
    job = CASES[case](size)
    rows: dict[str, Row] = {name: {"variant": name} for name in (*job.variants, COMPILED)}
    runs = {}
    with torch.no_grad():
        try:
            for variant, row in rows.items():
                if variant == COMPILED and (reason := backends.missing_because(backends.COMPILE)):
                    row[STATUS] = reason
                    continue
                run, names, moved = _compiled(job) if variant == COMPILED else _plain(job, variant)
                runs[variant] = run
                least = kernels.nbytes(job.reads) + kernels.nbytes(tensors(run()))
                row |= {"kernels": len(names), "kernel_names": ", ".join(dict.fromkeys(names))}
                row |= {"bytes_moved": moved, "bytes_least": least}
            check_agreement(runs, before=job.before)
            # Time doesn't depend on values: nothing is restored.
            compared = compare(runs, check=False, before=queue_far_ahead)
        finally:
            capture.forget_compiled()
    for variant in runs:
        rows[variant] |= compared.row(variant, EAGER)
    return list(rows.values())


def _plain(job: Job, variant: str) -> tuple[Callable[[], Any], list[str], int]:
    run = job.variants[variant]
    run()
    job.before()
    names = kernels.kernel_names(run)
    job.before()
    return run, names, kernels.eager_bytes(run)


def _compiled(job: Job) -> tuple[Callable[[], Any], list[str], int]:
    with kernels.inductor_schedule() as scheduled:
        run = torch.compile(job.compiles or job.variants[EAGER])
        job.before()
        run()
    job.before()
    return run, kernels.kernel_names(run), sum(scheduled)


# Numbers


@fusion.numbers()
def _(rows: pd.DataFrame) -> SimpleNamespace:
    """Kernels, bytes against the lower bound and time of each case at its largest size: eager, by hand, compiled.

    A speedup whose time or whose eager time is host-bound is that of no kernel, and not measured.
    """
    large = rows[rows["size"] == rows.groupby("case")["size"].transform("max")]
    eager = {row["case"]: row for row in large[large["variant"] == EAGER].to_dict("records")}
    large = large.assign(label=large["variant"].map(LABELS)).dropna(subset="label")
    fastest = large.loc[large.groupby(["case", "label"], sort=False)["median_ms"].idxmin()]
    fastest = fastest.assign(
        bytes=fastest["bytes_moved"] / fastest["bytes_least"],
        mark=[NOISY * is_noisy(row) for row in fastest.to_dict("records")],
        speedup=[
            of_kernels(speedup(row, 2), f"the speedup of {row['case']}", row, eager.get(row["case"], {}))
            for row in fastest.to_dict("records")
        ],
    )
    compiled = fastest[fastest["label"] == COMPILED].set_index("case").sort_values("ratio")
    chain = compiled["speedup"].get("pointwise chain", lacking("the pointwise chain", TIMES))
    compiled = compiled.loc[[gain.measured for gain in compiled["speedup"]]]
    eager_bytes = fastest[fastest["label"] == EAGER].set_index("case")["bytes_moved"]
    compiled = compiled.assign(share=compiled["bytes_moved"] / eager_bytes.reindex(compiled.index))
    return SimpleNamespace(
        bars=fastest.loc[[gain.measured for gain in fastest["speedup"]]],
        cases=derived(len(compiled), "counted", "", 0),
        faster=derived((compiled["ratio"] < 1 / SAME).sum(), "counted", "", 0),
        median=_median(compiled["speedup"]),
        largest=_at_place(compiled, 0),
        smallest=_at_place(compiled, -1),
        chain=chain,
        chain_predicted=derived(9 / 3, "nine large tensors read or written, and three", decimals=0),
    )


def _at_place(compiled: pd.DataFrame, place: int) -> SimpleNamespace:
    """The speedup of a case by torch.compile, and the bytes that it moves, as a share of eager's."""
    if not len(compiled):
        absent = lacking("fusion by torch.compile", TIMES)
        return SimpleNamespace(speedup=absent, case="", bytes=absent)
    row = compiled.iloc[place]
    share = derived(row["share"], "counted bytes", PERCENT, 0)
    return SimpleNamespace(speedup=row["speedup"], case=row.name, bytes=share)


def _median(speedups: pd.Series) -> Number:
    if not len(speedups):
        return lacking("fusion by torch.compile", TIMES)
    return derived(speedups.map(float).median(), "median of the cases", decimals=2)
