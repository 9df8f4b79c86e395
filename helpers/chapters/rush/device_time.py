"""Where a step's time goes: products, attention, elementwise work, loss, optimizer, copies, and idle.

One step is profiled. On a GPU the kernels of an uncaptured step are counted, as a replayed graph has no operators and
so no shapes; what the unprofiled step takes beyond them is idle. On a CPU it is each operator's own time.

Beside each kind stands the least time that it could take: products at the rate of their type (`product_rate`),
attention's at that, too, with the causal half of the scores and seven products for two and five, all else the bytes
that it must at least read and write at the bandwidth of a large copy.
"""

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from unittest import mock

import pandas as pd
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from ...book.table import Worth, table
from ...book.values import PERCENT, Number, is_noisy
from ...findings.trace import COPY, FILL, OP, Event, Trace
from ...findings.trace_file import read_trace
from ...lab import Row, device, each
from ...lab.ceilings import copy, large_copy, product_rate
from ...lab.memory import free_memory
from ...lab.timing import Timing, synchronize
from ...models import Llama
from ...models.llama import preset
from ...rush import Setup, trainer
from ...rush.measurement import SEQUENCES, text_tokens
from ...rush.rates import FLOAT8, product_type
from ...rush.setup import START
from ...training.trainer import WARM_UP
from .setups import BEST, FULL, MEDIUM, ON_CPU, SMALL, apart, missing, setup_of

PRODUCTS, ELEMENTWISE, LOSS, OPTIMIZER = "matrix products", "norms and elementwise", "loss", "optimizer"
FORWARD, BACKWARD, COPIES, IDLE = "attention forward", "attention backward", "copies", "idle"
KINDS = (PRODUCTS, FORWARD, BACKWARD, ELEMENTWISE, LOSS, OPTIMIZER, COPIES, IDLE)
MULTIPLIES = {f"aten::{name}" for name in ("mm", "addmm", "_scaled_mm", "mkldnn_linear", "linear_backward")}
IN_ATTENTION = ("scaled_dot_product", "_flash_attention", "_efficient_attention", "_cudnn_attention", "blocked")
BY_HAND = ("aten::bmm", "aten::_softmax", "aten::softmax", "aten::_softmax_backward_data", "aten::masked_fill")
IN_LOSS = ("NllLoss", "LogSoftmax", "CrossEntropy", "_Chunked")
COMPILED = "cpp_fused"  # a kernel of the compiler on a CPU
ADAM_BYTES = 28  # per fp32 parameter: weight, gradient and moments are read, all but the gradient written


def _sizes(sizes: Row, kind: str) -> list[Row]:
    return [sizes | {"step": step} for step in (START, BEST[kind])]


@table(
    small=[SMALL | {"step": START}],
    cpu=_sizes(ON_CPU, "cpu"),
    gpu=_sizes(MEDIUM, "cuda"),
    big_gpu=_sizes(FULL, "cuda"),
    missing=missing,
    columns="kind ms share least_ms step_ms p20_ms p80_ms n batch",
    worth=Worth(
        90, "where the time of the best step goes, and of the plain loop's", cpu=40, gpu=20, big_gpu=20, on_gpu=4
    ),
)
def device_time(model: str, sequence: int, step: str) -> list[Row]:
    """The time of a step by kind; `share` is of the unprofiled step."""
    setup = setup_of(model, sequence, step)
    return apart(setup, profiled, setup)


def profiled(setup: Setup) -> list[Row]:
    """A setup's step, timed as it is and then profiled once, as rows."""
    steps = 3 if device().type == "cpu" else 20
    timing = Timing.of(each(text_tokens(setup, steps), _warm(setup)))
    free_memory()  # a trainer refers to itself, and a graph's pool is as large as a step
    spent: dict[str, float] = defaultdict(float)
    products: set[Event] = set()  # what a product calls inside is the same product
    for event, ms in _pieces(_trace(dataclasses.replace(setup, cuda_graph=False))):
        spent[kind := kind_of(event)] += ms
        if kind == PRODUCTS and (product := _product(event)):
            products.add(product)
    spent[IDLE] = max(timing.median_ms - sum(spent.values()), 0.0)
    least = _least_ms(setup, sum(map(_flops, products)))
    about = {"step_ms": timing.median_ms, "p20_ms": timing.p20_ms, "p80_ms": timing.p80_ms, "n": timing.n}
    about |= {"batch": setup.batch}
    return [
        {"kind": kind, "ms": ms, "share": ms / timing.median_ms, "least_ms": least.get(kind, 0.0)} | about
        for kind, ms in sorted(spent.items(), key=lambda item: -item[1])
    ]


def _warm(setup: Setup) -> Callable[[torch.Tensor], torch.Tensor]:
    """A step that is compiled and captured."""
    head = trainer.head(setup)

    def named(*inputs: torch.Tensor) -> torch.Tensor:
        with record_function(LOSS):
            return head(*inputs)

    with mock.patch.object(trainer, "head", lambda _: named):
        step = trainer.build_trainer(setup).step
    for tokens in itertools.islice(itertools.cycle(text_tokens(setup, SEQUENCES)), WARM_UP + 1):
        step(tokens)
    synchronize()
    return step


def _trace(setup: Setup) -> Trace:
    """One profiled step, with shapes; on a CPU the compiler's kernels have a name, too."""
    from torch._inductor import config

    on_gpu = device().type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with config.patch({"cpp.enable_kernel_profile": not on_gpu}):
        step, (tokens,) = _warm(setup), text_tokens(setup, 1)
        with profile(activities=activities, record_shapes=True) as recorded:
            step(tokens)
            synchronize()
    return read_trace(recorded)


def _pieces(trace: Trace) -> Iterator[tuple[Event, float]]:
    """A GPU's kernels and copies with their milliseconds, or a CPU's operators with their own."""
    if trace.on_gpu:
        yield from ((event, event.us / 1e3) for event in trace.device)
        return
    for event in trace.host:
        if event.kind == OP or event.name.startswith(COMPILED):
            inner = sum(child.us for child in event.children)
            if (own := event.us - inner) > 0:
                yield event, own / 1e3


def kind_of(event: Event) -> str:
    """What an operator, or the kernel that it launched, is for."""
    if event.kind in (COPY, FILL):
        return COPIES
    around = [event, *event.outer()]
    names = [outer.name for outer in around]
    if OPTIMIZER in names or any(name.startswith("Optimizer.step#") for name in names):
        return OPTIMIZER
    if any(part in name for name in names for part in IN_ATTENTION) or any(name in BY_HAND for name in names):
        return BACKWARD if any("backward" in name.lower() for name in names) else FORWARD
    if any(name in MULTIPLIES for name in names):
        return PRODUCTS
    if LOSS in names or any(part in name for name in names for part in IN_LOSS):
        return LOSS
    return COPIES if "aten::copy_" in names and "aten::_to_copy" not in names else ELEMENTWISE


def _product(event: Event) -> Event | None:
    """The product that an event is, is part of or was launched by."""
    return next((outer for outer in (event, *event.outer()) if outer.name in MULTIPLIES), None)


def _flops(product: Event) -> float:
    """Operations of a product, M × K × N twice; 0 if its shapes aren't known."""
    matrices = [dims for dims in product.dims if len(dims) == 2 and all(isinstance(size, int) for size in dims)]
    if len(matrices) < 2:
        return 0.0
    (rows, inner), (_, columns) = matrices[:2] if product.name != "aten::addmm" else matrices[-2:]
    return 2.0 * rows * inner * columns


def _least_ms(setup: Setup, flops: float) -> dict[str, float]:
    """The least milliseconds of each kind, of the products of so many operations."""
    size, tokens = preset(setup.model), setup.batch * setup.sequence
    heads, layers, width, inner = (size[name] for name in ("heads", "layers", "width", "feedforward_size"))
    head_dim = size.get("head_dim", width // heads)
    rotated = head_dim * (heads + size["kv_heads"])
    rate = product_rate(FLOAT8 if setup.float8 != "none" else product_type(setup.precision)).tflops * 1e9
    bandwidth = copy(large_copy(512))[1] * 1e6  # bytes a millisecond
    item = 4 if setup.precision in ("fp32", "fp32-onednn", "tf32") else 2
    scores = 2 * heads * head_dim * setup.sequence * tokens * layers / 2  # operations of one causal product
    # A layer's forward reads and writes two norms with their residual sums, the rotated heads and the gate; backward
    # reads and writes twice as much.
    numbers = 3 * layers * tokens * (8 * width + 2 * rotated + 3 * inner)
    with torch.device("meta"):
        weights = sum(weight.numel() for weight in Llama.from_name(setup.model).parameters())
    return {
        PRODUCTS: flops / rate,
        FORWARD: 2 * scores / rate,
        BACKWARD: 5 * scores / rate,
        ELEMENTWISE: item * numbers / bandwidth,
        LOSS: 2 * item * tokens * size["vocab_size"] / bandwidth,  # logits are read, their gradient is written
        OPTIMIZER: ADAM_BYTES * weights / bandwidth,
    }


@dataclass(frozen=True)
class DeviceTime:
    """`kinds`: those of the best step and of the plain loop's, with their shares."""

    job: str
    kinds: pd.DataFrame
    products: Number
    largest_other: str
    largest_share: Number


@device_time.numbers()
def _(rows: pd.DataFrame) -> DeviceTime:
    """By kind, for the best step and the plain loop, each with how near it is to the least that it could take."""
    best_name = next((name for name in rows["step"] if name != START), START)
    best, plain = (rows[rows["step"] == name] for name in (best_name, START))
    kinds, first = _by_kind(best), best.iloc[0]
    others = kinds[~kinds["kind"].isin((PRODUCTS, IDLE))].sort_values("ms", ascending=False)
    both = [_by_kind(of).set_index("kind").add_prefix(f"{name}: ") for name, of in (("best", best), ("plain", plain))]
    return DeviceTime(
        job=f"{first['model']}, {int(first['batch'])} × {int(first['sequence'])} tokens, {best_name}",
        kinds=both[0].join(both[1], how="outer").reindex(KINDS).dropna(how="all").reset_index(),
        products=replace(kinds.set_index("kind").loc[PRODUCTS, "share of step"], noisy=is_noisy(first)),
        largest_other=others["kind"].iloc[0],
        largest_share=replace(others["share of step"].iloc[0], noisy=is_noisy(first)),
    )


def _by_kind(rows: pd.DataFrame) -> pd.DataFrame:
    sums = rows.groupby("kind")[["ms", "least_ms"]].sum()
    sums = sums.reindex([kind for kind in KINDS if kind in sums.index]).reset_index()
    step_ms = max(rows["step_ms"].iloc[0], sums["ms"].sum())  # the profiled step may be longer than the timed one
    shares = [_share(ms, step_ms) for ms in sums["ms"]]
    # what took less than its bound found some of its bytes in a cache, or writes in place what a copy reads, too
    bounds = [
        _share(least, ms) if least <= ms else None for least, ms in zip(sums["least_ms"], sums["ms"], strict=True)
    ]
    return sums.assign(**{"share of step": shares, "least / measured": bounds})[
        ["kind", "ms", "share of step", "least / measured"]
    ]


def _share(part: float, whole: float) -> Number | None:
    return Number(part / whole, PERCENT, decimals=0) if whole and part else None
