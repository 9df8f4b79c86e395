"""Memory of a training step of anybody's model, counted on fake tensors: transformers' classes or a function's module.

    count_model("path/config.json", batch=8, sequence=512)
    count_model("BertForMaskedLM", 8, 512)             # its default configuration
    count_model("package.module:function", 8, 512)     # function(batch) returns a module and its example batch

The batch is a mapping or sequence of the module's arguments. The loss is the output's `loss`, else the mean of its
first floating-point tensor. Nothing is computed or allocated; a model of 7B parameters takes some 10 s.
"""

import contextlib
import importlib
import json
import logging
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import AdamW
from torch.utils._pytree import tree_leaves, tree_map

from .ledger import Ledger, Peak

Built = tuple[nn.Module, Any]  # a module and the batch that it is called with


def count_model(name: str, batch: int, sequence: int, precision: str = "amp-bf16", checkpointing: str = "none") -> Peak:
    """The peak of a training step, after the first, with fused AdamW, by part.

    What a model raises is a `ValueError` of one line: the tokens may be more than its positions, say.
    """
    make, ledger = builder(name), Ledger()
    logging.disable()  # of fake tensors and transformers
    try:
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        with warnings.catch_warnings(action="ignore"), fake, _without_values(), ledger:
            model, inputs = make(batch, sequence)
            optimizer, step = trainer(model, inputs, precision, checkpointing)
            ledger.begin_step(model, optimizer, tree_leaves(inputs))
            step()
    except Exception as error:
        chosen = f"batch {batch}" if ":" in name else f"batch {batch}, sequence {sequence}"
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{name} can't do a step at {chosen}: {type(error).__name__}: {reason}") from error
    finally:
        logging.disable(logging.NOTSET)
    return ledger.peak


def _without_values() -> contextlib.AbstractContextManager:
    """Leave the weights of transformers' models as they are made: fake ones have no values to draw."""
    kind = getattr(sys.modules.get("transformers"), "PreTrainedModel", None)
    if not hasattr(kind, "_initialize_weights"):
        return contextlib.nullcontext()
    return mock.patch.object(kind, "_initialize_weights", lambda *_: None)


def trainer(model: nn.Module, inputs: Any, precision: str, checkpointing: str) -> tuple[AdamW, Callable[[], None]]:
    """An optimizer and a step of it, as `count_model` counts it and tests measure it."""
    model.train()
    if checkpointing == "full":
        if not getattr(model, "supports_gradient_checkpointing", False):
            raise ValueError(f"{type(model).__name__} has no gradient checkpointing")
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if precision == "bf16":
        model, inputs = _in_bf16(model), tree_map(_half, inputs)
    optimizer = AdamW(model.parameters(), lr=1e-4, fused=True)
    half = torch.autocast("cpu", torch.bfloat16) if precision == "amp-bf16" else contextlib.nullcontext()

    def step() -> None:
        with half:
            output = model(**inputs) if isinstance(inputs, Mapping) else model(*inputs)
        loss = getattr(output, "loss", None)
        if loss is None:
            loss = next(leaf for leaf in tree_leaves(output) if leaf.is_floating_point()).float().mean()
        del output
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return optimizer, step


def _half(value: Any) -> Any:
    return value.bfloat16() if isinstance(value, Tensor) and value.is_floating_point() else value


def _in_bf16(model: nn.Module) -> nn.Module:
    """As `model.bfloat16()`, which fake weights refuse."""
    made: dict[Tensor, nn.Parameter] = {}
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None and weight.is_floating_point():
                made.setdefault(weight, nn.Parameter(weight.detach().bfloat16(), weight.requires_grad))
                module._parameters[name] = made[weight]
        for name, buffer in module._buffers.items():
            module._buffers[name] = _half(buffer)
    return model


def builder(name: str) -> Callable[[int, int], Built]:
    """From a name to what builds its module and a batch of so many samples of so many tokens."""
    module, colon, function = name.partition(":")
    if colon:
        try:
            make = getattr(importlib.import_module(module), function)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"{name}: {error}") from error
        return lambda batch, _sequence: make(batch)
    config, cls = {}, name
    if name.endswith(".json"):
        config = read_config(Path(name))
        if "architectures" not in config and "model_type" not in config:
            raise ValueError(f"{name} names no model: it has neither architectures nor model_type")
        named = config.get("architectures")
        cls = named[0] if isinstance(named, list) and named else "AutoModelForCausalLM"
    try:
        import transformers
    except ImportError as error:
        raise ValueError(f"{name} needs transformers: pip install transformers") from error
    kind = getattr(transformers, cls, None) if isinstance(cls, str) else None
    if kind is None:
        raise ValueError(f"{cls!r} is no class of transformers {transformers.__version__}")

    def make_of_transformers(batch: int, sequence: int) -> Built:
        if cls.startswith("Auto"):
            model = kind.from_config(transformers.AutoConfig.for_model(**config))
        else:
            model = kind(kind.config_class(**config))
        return model, example(model, batch, sequence)

    return make_of_transformers


def read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} can't be read as JSON: {error}") from error
    return config if isinstance(config, dict) else {}


def example(model: nn.Module, batch: int, sequence: int) -> dict[str, Tensor]:
    """A batch for one of transformers' models, by what it is called with: tokens, pictures or spectrograms."""
    config, first = model.config, getattr(model, "main_input_name", "input_ids")
    tokens = torch.zeros(batch, sequence, dtype=torch.long)
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0
    if first == "pixel_values":
        size, channels = getattr(config, "image_size", 224), config.num_channels
        pictures = torch.zeros(batch, channels, size, size)
        return {first: pictures, "labels": torch.zeros(batch, dtype=torch.long)}
    if first == "input_features":
        return {first: torch.zeros(batch, config.num_mel_bins, 2 * config.max_source_positions), "labels": tokens}
    return {first: tokens, "labels": tokens}
