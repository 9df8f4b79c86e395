"""A step of a `Setup` on a GPU that isn't there, counted on fake tensors: `count` its memory, `step_time` its time.

    count(Setup(model="llama-3.2-1b", compile="regional", precision="amp-bf16")).bytes
    step_time(setup, card("h200"))["tokens_per_s"]

The training code runs with two layers and with three, its compiled parts as `fused` says; all layers follow from the
difference. What a CPU can't run is counted as what needs the same bytes: TF32 as fp32, cuDNN's attention as torch's.

The time of the device is a sum over kernels. Products take their operations at the card's sustained rate of their type,
or their bytes at the rate of a copy; attention its products and then its exponentials, or, by cuDNN's kernels of
Hopper, which overlap them, the longer of the two; all other kernels their bytes. The host takes its time for each
operator that it dispatches and each compiled kernel that it launches, unless a CUDA graph does. A step takes the longer
of the two. No constant is fitted to a ladder: each is a measurement of something smaller.
"""

import functools
import math
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ..lab.cards import LAUNCH_US, Card
from ..models.llama import preset
from ..rush import Setup, trainer
from ..rush.rates import flops_per_token
from .fused import Compiler
from .ledger import COUNTED_LAYERS, Ledger, Peak, deepened, split_step
from .meter import Kernel, Meter
from .speed import BAND

# Shares of a copy's rate, measured on an H200: of plain RMSNorms, forward and backward, by the bytes that `Meter`
# counts, and of compiled ones by the least bytes (rush/norms, medians); of fused AdamW with 10⁹ parameters (rush/adam).
SHARES = {"eager": 0.74, "fused": 0.73, "optimizer": 0.81}
# Two measurements whose tables are no longer among the records, as the host's time was in other rows (commit 40ccffb).
# Each of attention's scores takes the time of so many exponentials, forward and backward: FlashAttention-2 takes 24 ms
# for 32768 tokens with 8 heads of 128, of which its products are 11 (batching/attention, "causal, leaking").
EXPONENTIALS = 5.8
# An operator of a model costs the host so many bare launches, with Python, autocast and autograd's node: four decoder
# layers, 512 × 64 × 256, take 22.3 ms for a step's 1133 operators, views included (rush/lecture, "AMP + fused Adam").
OPERATOR_LAUNCHES = 2.7
# Precisions and attentions that only a GPU has -> those of the same bytes
SAME_BYTES = {
    "precision": {"tf32": "fp32", "fp32-onednn": "fp32"},
    "attention": {"cudnn": "flash"},
    "norm": {"triton": "torch", "triton residual": "torch"},
}
TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "bf16", torch.float8_e4m3fn: "fp8"}


@dataclass(frozen=True)
class Count:
    """What a step does: the peaks of its phases, its kernels, and how many operators the host dispatches."""

    peaks: list[Peak]
    kernels: list[Kernel]
    operators: int


def count(setup: Setup) -> Peak:
    """The peak of a training step, after the first, by part. It takes a second or two, if compiled some five."""
    return deepened(lambda layers: counted(setup)[layers].peaks, _layers(setup))


def step_time(setup: Setup, card: Card) -> dict[str, Any]:
    """Tokens/s and milliseconds of a step on a card, the band that published runs showed, and seconds by part."""
    by_layers = {layers: seconds(setup, card, one) for layers, one in counted(setup).items()}
    (least, fewer), (most, more) = min(by_layers.items()), max(by_layers.items())
    deeper = (_layers(setup) - least) / max(most - least, 1)
    parts = {part: fewer[part] + deeper * (more[part] - fewer[part]) for part in more}
    host = parts.pop("host")
    waits = 0.0 if setup.cuda_graph else max(host - sum(parts.values()), 0.0)  # of the device for the host
    parts["launches"] = waits
    tokens_per_s = setup.batch * setup.sequence / sum(parts.values())
    low, high = (tokens_per_s * math.exp(side) for side in BAND)
    mfu = tokens_per_s * flops_per_token(setup.model, setup.sequence) / (1e12 * card.bf16_tflops)
    step_ms = 1e3 * sum(parts.values())
    return {"tokens_per_s": tokens_per_s, "low": low, "high": high, "step_ms": step_ms, "mfu": mfu, "parts": parts}


def seconds(setup: Setup, card: Card, step: Count) -> dict[str, float]:
    """Seconds that a counted step takes the device, by part, and the host."""
    parts = dict.fromkeys(("products", "attention", "memory", "optimizer", "host"), 0.0)
    copied = card.copy_gb_per_s * 1e9
    for kernel in step.kernels:
        precision = setup.precision if kernel.dtype == torch.float32 else TYPES[kernel.dtype]
        rate = 1e12 * card.sustained(precision if precision in ("fp32", "tf32", "fp8") else "bf16")
        if kernel.kind == "product":
            parts["products"] += max(kernel.flops / rate, kernel.bytes / copied)
        elif kernel.kind == "attention":
            multiplied = kernel.flops / rate
            exponentials = EXPONENTIALS * kernel.exponentials / (1e12 * card.special_tops)
            overlaps = setup.attention == "cudnn"
            parts["attention"] += max(multiplied, exponentials) if overlaps else multiplied + exponentials
        else:
            part = "optimizer" if kernel.kind == "optimizer" else "memory"
            parts[part] += kernel.bytes / copied / SHARES[kernel.kind]
    compiled = sum(kernel.kind == "fused" for kernel in step.kernels)
    parts["host"] = 1e-6 * LAUNCH_US * (OPERATOR_LAUNCHES * step.operators + compiled)
    return parts


def _layers(setup: Setup) -> int:
    return setup.layers or preset(setup.model)["layers"]


@functools.lru_cache(maxsize=64)
def counted(setup: Setup) -> dict[int, Count]:
    """Number of layers -> the count of a step: with two and three, or all where there are fewer."""
    layers, fake, compiler = _layers(setup), FakeTensorMode(), Compiler()
    chosen = COUNTED_LAYERS if layers > max(COUNTED_LAYERS) else (layers,)
    return {number: count_step(replace(setup, layers=number), fake, compiler) for number in chosen}


def count_step(setup: Setup, fake: FakeTensorMode, compiler: Compiler) -> Count:
    """The count of a step with all layers of the setup."""
    same = {name: values.get(getattr(setup, name), getattr(setup, name)) for name, values in SAME_BYTES.items()}
    same |= {"cuda_graph": False, "float8": "none", "allocator": "default"}
    ledger, meter = Ledger(setup.batch * setup.sequence), Meter()
    with fake, ledger, mock.patch.object(trainer, "compiled_apart", compiler.compiled):
        training = trainer.build_trainer(replace(setup, **same), torch.device("cpu"))
        tokens = torch.zeros(setup.batch, setup.sequence + 1, dtype=torch.long)
        if setup.float8 != "none":
            for module in training.model.layers.modules():
                if isinstance(module, nn.Linear):
                    module.forward = functools.partial(_float8_linear, module)
        for weight in training.model.parameters():
            weight.register_post_accumulate_grad_hook(lambda weight: ledger.name("gradients", [weight.grad]))
        split_step(ledger, training.model, training.optimizer)
        training.optimizer.register_step_pre_hook(lambda *_: setattr(meter, "kind", "optimizer"))
        training.optimizer.register_step_post_hook(lambda *_: setattr(meter, "kind", "eager"))  # backward may go on
        ledger.begin_step(training.model, training.optimizer, [tokens])
        meter.kind = "eager"
        with meter:
            training.step(tokens)
    return Count(ledger.peaks, meter.kernels, meter.operators)


def _float8_linear(linear: nn.Linear, x: Tensor) -> Tensor:
    return _Float8.apply(linear.weight, x)


class _Float8(torch.autograd.Function):
    """torchao's product with one scale a tensor, in operators that fake tensors on a CPU know."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, x: Tensor) -> Tensor:
        weight, x = weight.bfloat16(), x.bfloat16()
        ctx.save_for_backward(weight, x)
        return _float8_product(x.flatten(0, -2), weight.t()).unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        weight, x = ctx.saved_tensors
        flat = gradient.flatten(0, -2)
        of_weight = _float8_product(flat.t(), x.flatten(0, -2))
        return of_weight.float(), _float8_product(flat, weight).unflatten(0, x.shape[:-1])


def _float8_product(left: Tensor, right: Tensor) -> Tensor:
    (left, left_scale), (right, right_scale) = _in_float8(left), _in_float8(right.t())  # right is read by columns
    return torch._scaled_mm(left, right.t(), left_scale, right_scale, out_dtype=torch.bfloat16)


def _in_float8(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().max().float() / torch.finfo(torch.float8_e4m3fn).max
    return (x / scale).to(torch.float8_e4m3fn).contiguous(), scale
