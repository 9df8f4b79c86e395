"""`LADDER`: the optimization rush step by step, each setup one change from the one it stands on."""

from dataclasses import replace

from .setup import Setup

START = "no optimisation"

# step -> what it changes; written in the order in which it is climbed
STEPS = {
    "TF32": {"precision": "tf32"},
    "mixed precision": {"precision": "amp-bf16"},
    "fused AdamW": {"optimizer": "fused"},
    "FlashAttention": {"attention": "flash"},
    "cuDNN attention": {"attention": "cudnn"},
    "compile": {"compile": "default"},
    "bf16 residual stream": {"residual": "bf16"},
    "fused projections": {"fused": True},
    "chunked cross-entropy": {"head": "chunked"},
    "CUDA graph": {"cuda_graph": True},
    "batch 2": {"batch": 2},
    "batch 4": {"batch": 4},
    "batch 8": {"batch": 8},
    "batch 16": {"batch": 16},
    "max-autotune": {"compile": "max-autotune"},
    "F.linear_cross_entropy": {"head": "torch"},
    "bf16 optimizer state": {"optimizer": "bf16-state"},
    "8-bit optimizer state": {"optimizer": "8-bit"},
    "float8": {"float8": "tensorwise"},
    "Triton RMSNorm": {"norm": "triton"},
    "Triton RoPE": {"rope": "triton"},
    "Triton cross-entropy": {"head": "triton"},
    "Triton AdamW": {"optimizer": "triton"},
    "Triton SwiGLU": {"mlp": "level 2"},
}

# Steps that the next one doesn't stand on, with the reason. A step that gains nothing stays in the table all the same.
LEFT = {
    "max-autotune": "each product is tuned anew for each shape, for a minute or more that every later step would pay",
    "F.linear_cross_entropy": "another way of doing what chunked cross-entropy does",
    "bf16 optimizer state": "8 bits do the same in less memory",
    "8-bit optimizer state": "memory isn't short at this batch, and it changes what is computed",
    "float8": "it changes what is computed; the kernels are compared in bf16",
    "Triton RMSNorm": "each of our kernels is compared with what the compiler makes",
    "Triton RoPE": "as above",
    "Triton cross-entropy": "as above",
    "Triton AdamW": "as above",
    "Triton SwiGLU": "as above",
}


def stands_on(name: str) -> str:
    """The step that a step changes: the last before it that wasn't left."""
    before = START
    for step in STEPS:
        if step == name:
            return before
        if step not in LEFT:
            before = step
    raise ValueError(f"no step {name!r}; valid: {', '.join(STEPS)}")


def climb(start: Setup) -> dict[str, Setup]:
    """The ladder from another start: another model, sequence or batch."""
    found = {START: start}
    for name, change in STEPS.items():
        found[name] = replace(found[stands_on(name)], **change)
    return found


LADDER: dict[str, Setup] = climb(Setup())
