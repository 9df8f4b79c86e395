"""What chapter 4 measures. Each function takes one configuration and returns one row, or a row for each variant."""

import itertools
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from ...lab import Worth, compare, device, experiment, half_dtype, multiplies_half, peak_memory, phases
from ...lab.ceilings import copy, launch, product_rate, to_device
from ...lab.device_share import as_column, share
from ...lab.machine import missing_because
from ...lab.memory import OUT_OF_MEMORY, is_out_of_memory
from ...lab.records import STATUS, Row
from ...lab.records.experiment import FAILED, free_memory
from ...lab.timing import Timing, queue_far_ahead, relative_error
from ...models.llama import PRESETS, Llama
from ...swiglu import LEVELS, MemoryOptimizedSwigluMLP, SwigluMLP
from ...text import SyntheticText
from .layer_variants import COMPILED, NEEDS, OURS, PLAIN, VARIANTS
from .training_steps import check_layer, check_variant, train_step

TIMES = ("median_ms", "p20_ms", "p80_ms", "n")
GRADIENTS = ("output", "grad_x", "grad_W", "grad_V", "grad_U")
BASELINES = {"ratio_to_plain": PLAIN, "ratio_to_compiled": COMPILED}


def _shapes(names: str, *values: tuple) -> list[Row]:
    return [dict(zip(names.split(), value, strict=True)) for value in values]


def _at_each_level(configs: list[Row]) -> list[Row]:
    return [config | {"checkpoint_level": level} for config in configs for level in LEVELS]


def _limits(dtypes: Sequence[str], sizes: Sequence[int], copies: Sequence[int]) -> list[Row]:
    products = [{"ceiling": "matmul", "dtype": dtype, "size": size} for dtype in dtypes for size in sizes]
    return products + [{"ceiling": "copy", "dtype": "", "size": mib} for mib in copies]


PINNED, PAGEABLE, LAUNCH, TF32 = "copy from pinned memory", "copy from pageable memory", "launch", "tf32"
FLOAT8 = "float8_e4m3fn"
IN_PRODUCTS = ["float32", TF32, "bfloat16", "float16", FLOAT8]
BY_HOST = [{"ceiling": name, "dtype": "", "size": 512} for name in (PINNED, PAGEABLE, LAUNCH)]


def _missing(dtype: str, **_: object) -> str:
    needs = {TF32: ("CUDA", "compute capability 8.0"), FLOAT8: ("CUDA", "compute capability 8.9")}
    return missing_because(*needs.get(dtype, ()))


@experiment(
    small=_limits(["float32"], [512], [64]),
    cpu=_limits(["bfloat16", "float32"], [1024, 2048, 4096], [512]),
    gpu=_limits(IN_PRODUCTS, [2048, 4096], [1024]) + BY_HOST,
    big_gpu=_limits(IN_PRODUCTS, [4096, 8192], [4096]) + BY_HOST,
    missing=_missing,
    version=2,
    columns=(*TIMES, "tflops?", "p20_tflops?", "library?", "gb_per_s?"),
    worth=Worth(20, "the limits that results are compared with", cpu=2.2, gpu=2, big_gpu=0.8),
)
def ceilings(ceiling: str, dtype: str, size: int) -> Row:
    """The limits of this machine: products of size × size, copies of `size` MiB, a launch among `size` of them."""
    if ceiling == "matmul":
        product = product_rate(dtype, size)
        tflops = {"tflops": product.tflops, "p20_tflops": product.p20_tflops, "library": product.library}
        return product.timing.row() | tflops
    if ceiling == LAUNCH:
        return launch(size).row()
    timing, rate = copy(size) if ceiling == "copy" else to_device(size, pinned=ceiling == PINNED)
    return timing.row() | {"gb_per_s": rate}


LAYER = "batch seq_len hidden_dim intermediate_size dtype"


@experiment(
    small=_shapes(LAYER, (2, 64, 64, 256, "float32")),
    cpu=_shapes(LAYER, (1, 1024, 2048, 8192, "bfloat16"), (1, 512, 2048, 8192, "float32")),
    gpu=_shapes(
        LAYER,
        *((4, 1024, 1024, 4096, dtype) for dtype in ("float16", "bfloat16")),
        *((4, 1024, 2048, 8192, dtype) for dtype in ("float16", "bfloat16")),  # Llama-3.2-1B
    ),
    big_gpu=_shapes(
        LAYER,
        (4, 1024, 1024, 4096, "bfloat16"),
        (4, 2048, 2048, 8192, "bfloat16"),  # Llama-3.2-1B
        (4, 2048, 4096, 14336, "bfloat16"),  # Llama-3.1-8B
    ),
    columns=(
        *("variant", "error", "saved_mib", "saved_ratio", "peak_added_mib", *TIMES),
        *(f"{ratio}{spread}?" for ratio in BASELINES for spread in ("", "_p20", "_p80")),
    ),
    version=2,
    worth=Worth(40, "the levels beside torch.compile, checkpoint and Liger", cpu=60.1, gpu=8, big_gpu=24),
)
def peers(batch: int, seq_len: int, hidden_dim: int, intermediate_size: int, dtype: str) -> list[Row]:
    """One layer, forward + backward: others beside each level, from one interleaved run. The host is ahead of a GPU."""
    factory = {"device": device(), "dtype": getattr(torch, dtype)}
    plain = SwigluMLP(hidden_dim, intermediate_size, **factory)
    x = torch.randn(batch, seq_len, hidden_dim, **factory, requires_grad=True)
    l = torch.randn(batch, seq_len, hidden_dim, **factory)
    steps: dict[str, Callable[[], list[Tensor]]] = {}
    rows: dict[str, Row] = {}
    for name, build in VARIANTS.items():
        rows[name] = {"variant": name}
        if missing := missing_because(*NEEDS.get(name, ())):
            rows[name][STATUS] = missing
            continue
        try:
            forward, owner = build(plain)
            rows[name] |= check_variant(name, forward, owner, plain, x, l)
        except Exception as error:  # a peer that fails must not cost the others their rows
            if name.startswith(OURS) and not is_out_of_memory(error):
                raise
            failure = f"{FAILED}{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"[:200]
            rows[name][STATUS] = OUT_OF_MEMORY if is_out_of_memory(error) else failure
            continue
        finally:
            free_memory()
        steps[name] = train_step(forward, owner, x, l)
    rounds = 20 if device().type == "cuda" else 10
    timed = compare(steps, check=False, warmup=2, rounds=rounds, before=queue_far_ahead)
    for name in steps:
        rows[name] |= timed.timing(name).row()
        for column, baseline in BASELINES.items():
            if baseline in steps:
                spread = (column, f"{column}_p20", f"{column}_p80")
                rows[name] |= dict(zip(spread, timed.ratio(name, baseline), strict=True))
        rows[name]["saved_ratio"] = rows[name]["saved_mib"] / rows[PLAIN]["saved_mib"]
    return list(rows.values())


@experiment(
    small=_at_each_level([{"dtype": "float32"}]),
    cpu=_at_each_level([{"dtype": dtype} for dtype in ("float32", "bfloat16")]),
    big_gpu=_at_each_level([{"dtype": dtype} for dtype in ("float32", "bfloat16", "float16")]),
    columns=[f"{layer}{tensor}_error" for layer in ("", "plain_") for tensor in GRADIENTS],
    timed=False,
    worth=Worth(2, "the error of each level in each type", cpu=0.6, gpu=1, big_gpu=0.8),
)
def accuracy(dtype: str, checkpoint_level: int) -> Row:
    """Relative error of the output and of each gradient against fp64, and the plain module's in the same type."""
    torch.manual_seed(0)  # the same data for every level
    hidden, intermediate, tokens = (1024, 4096, 2048) if device().type == "cuda" else (64, 256, 128)
    exact = SwigluMLP(hidden, intermediate, device=device(), dtype=torch.float64)
    x = torch.randn(tokens, hidden, device=device(), dtype=torch.float64, requires_grad=True)
    l = torch.randn(tokens, hidden, device=device(), dtype=torch.float64)
    expected = train_step(exact, exact, x, l)()
    low = {"device": device(), "dtype": getattr(torch, dtype)}
    x_low, l_low = x.detach().to(**low).requires_grad_(), l.to(**low)
    plain = SwigluMLP(hidden, intermediate, **low)
    plain.load_state_dict(exact.state_dict())
    ours = MemoryOptimizedSwigluMLP.from_plain(plain, checkpoint_level)
    row: Row = {}
    for name, layer in (("", ours), ("plain_", plain)):
        computed = train_step(layer, layer, x_low, l_low)()
        for tensor, a, b in zip(GRADIENTS, computed, expected, strict=True):
            row[f"{name}{tensor}_error"] = relative_error(a, b)
    return row


@experiment(
    small=[{"seed": 0, "checkpoint_level": level, "steps": 20} for level in (0, 3)],
    cpu=[{"seed": seed, "checkpoint_level": level, "steps": 400} for seed in range(3) for level in (0, 3)],
    version=2,
    columns=("first_loss", "final_loss", "dtype", "source"),
    worth=Worth(6, "a training with each level", cpu=21.3, gpu=8, big_gpu=6),
)
def training(seed: int, checkpoint_level: int, steps: int) -> Row:
    """Validation loss of a small Llama after training on generated text: what 8-bit activations cost.

    The weights are in fp32; where the machine multiplies 16-bit numbers fast, products are under autocast.
    """
    torch.manual_seed(seed)
    model = Llama.from_name("tiny", mlp=partial(MemoryOptimizedSwigluMLP, checkpoint_level=checkpoint_level))
    model, half = model.to(device()), multiplies_half()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    words, text = PRESETS["tiny"]["vocab_size"], SyntheticText(20_000, 2 * seed, PRESETS["tiny"]["vocab_size"])
    new = _windows(SyntheticText(1_000, 1, words))

    def loss(windows: Tensor) -> Tensor:
        with torch.autocast(device().type, half_dtype(), enabled=half):
            logits = model(windows[:, :-1])
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())

    def validation() -> float:
        with torch.no_grad():
            return float(sum(loss(part) for part in new.split(32)) / len(new.split(32)))

    first, windows = validation(), _windows(text)
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(seed))
    for indices in order[: 16 * steps].split(16):
        optimizer.zero_grad()
        loss(windows[indices]).backward()
        optimizer.step()
    dtype = str(half_dtype() if half else torch.float32).removeprefix("torch.")
    return {"first_loss": first, "final_loss": validation(), "dtype": dtype, "source": text.source}


def _windows(text: SyntheticText, length: int = 129) -> Tensor:
    """(N, length) All of its tokens on the device, one after the other."""
    whole = len(text.ids) // length * length
    return torch.from_numpy(text.ids[:whole].astype("int64")).view(-1, length).to(device())


LONG = 5e11  # operations of a pass
STACK = "batch seq_len hidden_dim intermediate_size num_layers dtype"
SWEEP_TASK = _shapes(  # the task's shapes, in the task's fp32
    STACK,
    (16, 128, 512, 2048, 2, "float32"),
    (32, 128, 512, 2048, 2, "float32"),
    (8, 512, 1024, 4096, 3, "float32"),
    (16, 512, 1024, 4096, 3, "float32"),
    (4, 1024, 4096, 16384, 5, "float32"),
)
SWEEP_CPU = SWEEP_TASK + _shapes(  # the task's third with a quarter of the batch, too; then one thing grows at a time
    STACK,
    (2, 512, 1024, 4096, 3, "float32"),
    *((2, seq_len, 512, 2048, 4, "bfloat16") for seq_len in (128, 256, 1024)),
    *((2, 256, hidden, 4 * hidden, 4, "bfloat16") for hidden in (256, 1024)),
    *((2, 256, 512, 2048, layers, "bfloat16") for layers in (2, 8)),
)
SWEEP_GPU = SWEEP_TASK[:3] + _shapes(  # one thing grows at a time, within 8 GB; fp16, as not each has bf16 units
    STACK,
    *((4, seq_len, 1024, 4096, 8, "float16") for seq_len in (512, 1024, 2048)),
    *((4, 1024, hidden, 4 * hidden, 8, "float16") for hidden in (512, 2048)),
    *((4, 1024, 1024, 4096, layers, "float16") for layers in (2, 4, 16)),
)
SWEEP_BIG_GPU = SWEEP_TASK + _shapes(  # one thing grows at a time
    STACK,
    *((8, seq_len, 2048, 8192, 8, "bfloat16") for seq_len in (512, 1024, 2048, 4096, 8192)),
    *((8, 2048, hidden, 4 * hidden, 8, "bfloat16") for hidden in (512, 1024, 4096)),
    *((8, 2048, 2048, 8192, layers, "bfloat16") for layers in (2, 4, 16)),
    *((16, 4096, 2048, 8192, layers, "bfloat16") for layers in (48, 80)),  # more than an H200 holds at level 0, then 2
)


@experiment(
    small=_at_each_level(_shapes(STACK, *((2, 32, 64, 256, layers, "float32") for layers in (2, 4)))),
    cpu=_at_each_level(SWEEP_CPU),
    gpu=_at_each_level(SWEEP_GPU),
    big_gpu=_at_each_level(SWEEP_BIG_GPU),
    columns=(
        *(f"{part}{spread}_s" for part in ("forward", "backward") for spread in ("", "_p20", "_p80")),
        *("n", "peak_gib"),
    ),
    worth=Worth(
        4,
        "time and stored bytes of each level by size",
        cpu=6.6,
        gpu=2,
        big_gpu=2,
        headline={"dtype": ("float32",)},
        on_gpu=9,
    ),
)
def sweep(
    batch: int,
    seq_len: int,
    hidden_dim: int,
    intermediate_size: int,
    num_layers: int,
    dtype: str,
    checkpoint_level: int,
) -> Row:
    """Forward and backward time and peak memory of a stack of layers, for each level.

    Gradients persist between steps, as in the task; the loss's gradient is a random tensor. A stack that takes a CPU
    seconds gets one pass, in which its memory is measured, too.
    """
    check_layer(hidden_dim, intermediate_size, dtype, checkpoint_level)
    factory = {"device": device(), "dtype": getattr(torch, dtype)}
    layer = partial(MemoryOptimizedSwigluMLP, hidden_dim, intermediate_size, checkpoint_level, **factory)
    stack = nn.Sequential(*(layer() for _ in range(num_layers)))
    x = torch.randn(batch, seq_len, hidden_dim, **factory, requires_grad=True)
    l = torch.randn(batch, seq_len, hidden_dim, **factory)

    def step():
        y = stack(x)
        yield "forward"
        y.backward(l)
        yield "backward"

    on_gpu, operations = device().type == "cuda", 18 * x.numel() * intermediate_size * num_layers
    if not on_gpu and operations > LONG:
        for weight in (x, *stack.parameters()):
            weight.grad = torch.zeros_like(weight)
        marks = [time.perf_counter()]
        peak = peak_memory(lambda: marks.extend(time.perf_counter() for _ in step()))
        passes = zip(("forward", "backward"), itertools.pairwise(marks), strict=True)
        times = {name: Timing.of([1e3 * (end - begin)]) for name, (begin, end) in passes}
    else:
        times = phases(step, warmup=2, repeat=8 if on_gpu else 20)
        peak = peak_memory(lambda: list(step()))
    row: Row = {"n": times["forward"].n, "peak_gib": peak.peak_gib}
    for name, timing in times.items():
        row |= {f"{name}_s": timing.median_ms / 1e3}
        row |= {f"{name}_p20_s": timing.p20_ms / 1e3, f"{name}_p80_s": timing.p80_ms / 1e3}
    busy_ms = [timing.median_ms * timing.device_share for timing in times.values() if timing.device_share]
    if busy_ms:
        row |= as_column(share(sum(busy_ms), sum(timing.median_ms for timing in times.values())))
    return row
