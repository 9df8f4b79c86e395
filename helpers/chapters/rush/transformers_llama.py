"""Baselines: transformers' Llama, by default and with the usual additions (liger-kernel, FlashAttention-2, ...)."""

import contextlib
import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from ...lab import compare, missing_because, peak_memory
from ...lab import device as this_device
from ...lab.memory import GIB, free_memory
from ...models import Llama
from ...models.llama import RopeScaling, preset
from ...rush import Setup, build_trainer
from ...rush.measurement import ON_CPU_LOSS_STEPS, SEQUENCES, fixed_tokens, stream, text_tokens

FLASH, OURS = "flash_attention_2", "ours"
ALIKE = "; ours without what theirs lacks"
# What transformers has no switch for; its loss is in chunks with liger-kernel alone.
THEIRS_LACKS = {"cuda_graph": False, "fused": False, "residual": "weights", "mlp": "plain"}

# variant -> changes to transformers' defaults, which are SDPA and torch's default AdamW (foreach on a GPU)
VARIANTS: dict[str, dict[str, Any]] = {
    "transformers, eager attention": {"attention": "eager"},
    "transformers": {},
    "transformers, FlashAttention-2": {"attention": FLASH},
    "transformers, fused AdamW": {"fused": True},
    "transformers, fused AdamW, compile": {"fused": True, "compile": True},
    "transformers, liger-kernel, fused AdamW": {"fused": True, "liger": True},
    "transformers, liger-kernel, FlashAttention-2, fused AdamW": {"fused": True, "liger": True, "attention": FLASH},
    "transformers, liger-kernel, fused AdamW, compile": {"fused": True, "liger": True, "compile": True},
}
VARIANTS |= {
    f"{name}{ALIKE}": VARIANTS[name]
    for name in ("transformers, fused AdamW, compile", "transformers, liger-kernel, fused AdamW, compile")
}


def needs(variant: str) -> tuple[str, ...]:
    """What a variant needs, for `lab.machine.missing_because`."""
    parts = VARIANTS[variant]
    flash = ("flash_attn", "CUDA") if parts.get("attention") == FLASH else ()
    liger = ("liger-kernel", "CUDA") if parts.get("liger") else ()
    return ("transformers", *flash, *liger)


def against(variant: str, setup: Setup) -> dict[str, Any]:
    """A variant's row beside ours, in this process: losses of some steps on the same tokens, then steps in turn.

    Ours is the setup, for variants named so without what transformers lacks: then both have the same features.
    Of the setup the variant uses model, precision, batch, sequence, learning rate and seed; the initial weights are
    those of our Llama. There are 10 rounds; on slow machines a minute's, but at least 5.
    """
    if variant.endswith(ALIKE):
        head = "chunked" if VARIANTS[variant].get("liger") else "full"
        setup = dataclasses.replace(setup, **THEIRS_LACKS, head=head)
    ours, losses, began = build_trainer(setup).step, {}, time.perf_counter()
    both = {variant: training_step(variant, setup), OURS: ours}
    for name, step in both.items():
        curve = [float(step(tokens)) for tokens in itertools.islice(fixed_tokens(setup), ON_CPU_LOSS_STEPS)]
        losses[name] = statistics.fmean(curve[-SEQUENCES:])
    once = (time.perf_counter() - began) / ON_CPU_LOSS_STEPS  # compilation included: no more than an upper bound
    batches = itertools.cycle(text_tokens(setup, SEQUENCES))
    timed = compare(
        {name: (lambda step=step: step(next(batches))) for name, step in both.items()},
        check=False,
        rounds=max(min(10, int(60 / once)), 5),
        warmup=1,
    )
    theirs_gib = peak_memory(lambda: both[variant](next(batches))).added_bytes / GIB
    if setup.cuda_graph:  # a graph's memory is its own from the capture on: replayed, it adds none
        del ours, step
        both.clear()
        free_memory()  # else three trainers would be there at once
        both[OURS] = build_trainer(dataclasses.replace(setup, cuda_graph=False)).step
        both[OURS](next(batches))
    ours_gib = peak_memory(lambda: both[OURS](next(batches))).added_bytes / GIB
    return timed.row(variant, OURS) | {
        "step_gib": theirs_gib,
        "ours_step_gib": ours_gib,
        "loss": losses[variant],
        "ours_loss": losses[OURS],
        "text": stream(setup.model)[1],
    }


def training_step(variant: str, setup: Setup) -> Callable[[Tensor], Tensor]:
    """`step(tokens)`: one training step of a variant on tokens (B, T + 1); returns the loss without a sync."""
    if reason := missing_because(*needs(variant)):
        raise ValueError(reason)
    from transformers.models.llama import modeling_llama

    device, parts = this_device(), VARIANTS[variant]
    model = transformers_llama(setup, device, parts.get("attention", "sdpa"))
    patched = apply_liger(model) if parts.get("liger") else {}
    options = {"fused": True} if parts.get("fused") else {}
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=setup.learning_rate, betas=(0.9, 0.95), weight_decay=0.1, **options
    )
    forward = torch.compile(model, dynamic=False) if parts.get("compile") else model

    def step(tokens: Tensor) -> Tensor:
        inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        with patch.multiple(modeling_llama, **patched) if patched else contextlib.nullcontext():
            with torch.autocast(device.type, torch.bfloat16, enabled=setup.precision == "amp-bf16"):
                loss = forward(input_ids=inputs, labels=targets, shift_labels=targets, use_cache=False).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def transformers_llama(setup: Setup, device: torch.device, attention: str) -> nn.Module:
    """transformers' model of a setup's size, in training mode, with the initial weights of our Llama."""
    from transformers import LlamaForCausalLM

    with torch.device(device):
        ours = Llama.from_name(setup.model)
        ours.reset_parameters(torch.Generator(device).manual_seed(setup.seed))
        model = LlamaForCausalLM(config(setup.model, attention))
    loaded = model.load_state_dict(ours.weights(), strict=False)
    if loaded.unexpected_keys or set(loaded.missing_keys) - {"lm_head.weight"}:
        raise ValueError(f"transformers' names are others than ours: {loaded}")
    return model.to(torch.bfloat16 if setup.precision == "bf16" else torch.float32).train()


def config(model: str, attention: str = "sdpa"):
    """transformers' configuration of a preset."""
    from transformers import LlamaConfig

    size = preset(model)
    return LlamaConfig(
        vocab_size=size["vocab_size"],
        hidden_size=size["width"],
        intermediate_size=size["feedforward_size"],
        num_hidden_layers=size["layers"],
        num_attention_heads=size["heads"],
        num_key_value_heads=size["kv_heads"],
        max_position_embeddings=size.get("max_length", 131072),
        tie_word_embeddings=size.get("tied", True),
        rms_norm_eps=size.get("epsilon", 1e-5),
        attn_implementation=attention,
        use_cache=False,
        rope_theta=size.get("theta", 500000.0),
        rope_scaling=_scaling(size["scaling"]) if "scaling" in size else None,
    )


def apply_liger(model: nn.Module) -> dict[str, Any]:
    """Patch a model with liger-kernel; returns the names that liger replaced in transformers' module, with new values.

    The module itself is restored at once, so that other models aren't patched; a step of this model patches it again
    while it runs.
    """
    from liger_kernel.transformers import apply_liger_kernel_to_llama
    from transformers.models.llama import modeling_llama as module

    before = dict(vars(module))
    apply_liger_kernel_to_llama(model=model)
    patched = {name: value for name, value in vars(module).items() if value is not before.get(name)}
    for name in patched:
        setattr(module, name, before[name])
    return patched


def _scaling(scaling: RopeScaling) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low,
        "high_freq_factor": scaling.high,
        "original_max_position_embeddings": scaling.original_length,
    }
