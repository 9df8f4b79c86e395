"""The same layer by others and by each level, which `experiments.swiglu.peers` compares.

Each variant is built from a plain module, with its weights, and returned with the module that owns them.
"""

import copy
from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from ...lab.compiling import compiled_apart
from ...swiglu import LEVELS, MemoryOptimizedSwigluMLP, SwigluMLP

Built = tuple[Callable[[Tensor], Tensor], nn.Module]

PLAIN, CHECKPOINT = "plain module", "torch.utils.checkpoint"
COMPILED, BUDGET, LIGER = "torch.compile", "torch.compile, memory budget 0.5", "liger-kernel"
OURS = "level "


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
