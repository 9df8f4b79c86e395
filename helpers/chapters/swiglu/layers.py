"""The same layer by others and by each level, its training step, and the check that precedes its timing.

Each variant is built from a plain module, with its weights, and returned with the module that owns them.
"""

import copy
from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from ...lab import Row, device, peak_memory
from ...lab.compiling import compiled_apart
from ...lab.memory import MIB
from ...lab.timing import check_agreement
from ...swiglu import LEVELS, MemoryOptimizedSwigluMLP, SwigluMLP
from ...swiglu.steps import KEEP_8BIT

Built = tuple[Callable[[Tensor], Tensor], nn.Module]

PLAIN, CHECKPOINT = "plain module", "torch.utils.checkpoint"
COMPILED, BUDGET, LIGER = "torch.compile", "torch.compile, memory budget 0.5", "liger-kernel"
OURS = "level "
TOLERANCE_8BIT = 3e-2  # level 3's gradients come from rounded activations


def plain(module: SwigluMLP) -> Built:
    return module, module


def checkpointed(module: SwigluMLP) -> Built:
    """Keeps x only and runs the whole forward again."""
    return lambda x: torch.utils.checkpoint.checkpoint(module, x, use_reentrant=False), module


def compiled(module: SwigluMLP) -> Built:
    copied = copy.deepcopy(module)
    return compiled_apart(copied), copied


def compiled_on_a_budget(module: SwigluMLP) -> Built:
    """The compiler may keep half of what it would keep by default, and chooses what to compute again."""
    import torch._functorch.config as compiler

    copied = copy.deepcopy(module)
    run = compiled_apart(copied)

    def forward(x: Tensor) -> Tensor:
        with compiler.patch(activation_memory_budget=0.5):
            return run(x)

    return forward, copied


def liger(module: SwigluMLP) -> Built:
    from liger_kernel.transformers.swiglu import LigerSwiGLUMLP

    hidden, intermediate = module.W.in_features, module.W.out_features
    config = SimpleNamespace(hidden_size=hidden, intermediate_size=intermediate, hidden_act="silu")
    layer = LigerSwiGLUMLP(config).to(module.W.weight)
    # The same weights under the names of the plain module, so that gradients have one name.
    names = {"W": "gate_proj", "V": "up_proj", "U": "down_proj"}
    for ours, theirs in names.items():
        getattr(layer, theirs).weight.data.copy_(getattr(module, ours).weight.data)
    owner = nn.ModuleDict({ours: getattr(layer, theirs) for ours, theirs in names.items()})
    return layer, owner


def at_level(level: int) -> Callable[[SwigluMLP], Built]:
    def layer_of(module: SwigluMLP) -> Built:
        layer = MemoryOptimizedSwigluMLP.from_plain(module, level)
        return layer, layer

    return layer_of


VARIANTS: dict[str, Callable[[SwigluMLP], Built]] = {
    PLAIN: plain,
    CHECKPOINT: checkpointed,
    COMPILED: compiled,
    BUDGET: compiled_on_a_budget,
    LIGER: liger,
    **{f"{OURS}{level}": at_level(level) for level in LEVELS},
}
NEEDS = {COMPILED: ("C++ compiler",), BUDGET: ("C++ compiler",), LIGER: (LIGER, "CUDA")}

# What a variant saves for backward, where it is known without looking.
SAVES = {
    PLAIN: "x, xW, SiLU(xW), xV, their product",
    CHECKPOINT: "x",
    LIGER: "x, xW, xV, their product",
    **{f"{OURS}{level}": saved for level, saved in LEVELS.items()},
}


def weight_gradients(owner: nn.Module) -> list[Tensor]:
    """The gradients of W, V, U as (out, in), like a Linear's, whichever module owns the weights."""
    weights = [owner[name] if isinstance(owner, nn.ModuleDict) else getattr(owner, name) for name in "WVU"]
    return [w.weight.grad if isinstance(w, nn.Linear) else w.grad.t() for w in weights]


def check_layer(hidden: int, intermediate: int, dtype: str, level: int, tokens: int = 256) -> None:
    """Raise `Disagreement` unless a level computes what the plain module computes, in this type and width."""
    factory = {"device": device(), "dtype": getattr(torch, dtype)}
    plain = SwigluMLP(hidden, intermediate, **factory)
    ours = MemoryOptimizedSwigluMLP.from_plain(plain, level)
    x, l = (torch.randn(tokens, hidden, **factory) for _ in range(2))
    x.requires_grad_()
    variants = {PLAIN: train_step(plain, plain, x, l), f"{OURS}{level}": train_step(ours, ours, x, l)}
    check_agreement(variants, TOLERANCE_8BIT if level == KEEP_8BIT else None)


def train_step(
    forward: Callable[[Tensor], Tensor], owner: nn.Module, x: Tensor, l: Tensor
) -> Callable[[], list[Tensor]]:
    """Forward and backward from fresh gradients; returns the output and the gradients of x, W, V, U."""

    def step() -> list[Tensor]:
        x.grad = None
        owner.zero_grad(set_to_none=True)
        y = forward(x)
        y.backward(l)
        return [y, x.grad, *weight_gradients(owner)]

    return step


def check_variant(
    name: str, forward: Callable[[Tensor], Tensor], owner: nn.Module, plain: nn.Module, x: Tensor, l: Tensor
) -> Row:
    """Check a variant against the plain module and weigh it. Runs it often enough that compiling is over."""
    step = train_step(forward, owner, x, l)
    tolerance = TOLERANCE_8BIT if name == f"{OURS}{KEEP_8BIT}" else None
    errors = check_agreement({PLAIN: train_step(plain, plain, x, l), name: step}, tolerance)
    step()
    x.grad = None
    owner.zero_grad(set_to_none=True)
    # What forward leaves behind is its output and what it saves but for x, which is as large as the output.
    saved = peak_memory(lambda: forward(x)).kept_bytes
    peak = peak_memory(step).added_bytes
    return {"error": errors[name], "saved_mib": saved / MIB, "peak_added_mib": peak / MIB}
