"""Memory of a training step of anybody's model, counted on fake tensors: transformers' classes or a function's module.

    fit_model("path/config.json", 24.0, batch=8, sequence=512)
    fit_model("BertForMaskedLM", 24.0)                     # its default configuration
    fit_model("package.module:function", 24.0, batch=8)    # function(batch) returns a module and its example batch

The batch is a mapping or sequence of the module's arguments. The loss is the output's `loss`, else the mean of its
first floating-point tensor. Nothing is computed or allocated; a model of 7B parameters takes some 10 s.
"""

import contextlib
import importlib
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from helpers.lab.arguments import check_choice
from helpers.lab.memory import GIB

from .estimate import read_config
from .ledger import Ledger, Peak
from .plan import answer, checked_memory_gib

PRECISIONS = ("fp32", "amp-bf16", "bf16")
CHECKPOINTING = ("none", "full")
COUNTED = ("model", "batch", "sequence", "precision", "checkpointing")  # of a `Plan`

Built = tuple[nn.Module, Any]  # a module and the batch that it is called with


def fit_model(
    model: str,
    memory_gib: float | None = None,
    batch: int = 8,
    sequence: int = 512,
    precision: str = "amp-bf16",
    checkpointing: str = "none",
) -> dict[str, Any]:
    """Parts, peak, whether it fits in `memory_gib` (by default this machine's device), the largest batch, switches."""
    check_choice(PRECISIONS, precision=precision)
    check_choice(CHECKPOINTING, checkpointing=checkpointing)
    memory_gib = checked_memory_gib(memory_gib)
    chosen = {"batch": batch, "sequence": sequence, "precision": precision, "checkpointing": checkpointing}
    needed = count_model(model, **chosen)
    switches = []
    for change in ({"checkpointing": "full"}, {"precision": "bf16"}):
        if not change.items() <= chosen.items():
            with contextlib.suppress(NoCheckpointing):
                switches.append((change, count_model(model, **chosen | change).bytes))
    more = count_model(model, **chosen | {"batch": 2 * batch}).bytes - needed.bytes  # for as many samples again
    largest = max(0, batch + int((memory_gib * GIB - needed.bytes) * batch / max(more, 1)))
    chosen |= {"model": model, "strategy": "single", "ranks": 1, "head": "full"}
    return chosen | answer(needed, memory_gib, largest, switches)


class NoCheckpointing(ValueError):
    """The model can't checkpoint its blocks."""


class UnknownModel(ValueError):
    """A configuration of which no model can be made here."""


def count_model(
    name: str, batch: int = 8, sequence: int = 512, precision: str = "amp-bf16", checkpointing: str = "none"
) -> Peak:
    """The peak of a training step, after the first, with fused AdamW, by part."""
    make, ledger = builder(name), Ledger()
    with _told(name, batch, sequence), FakeTensorMode(allow_non_fake_inputs=True), _without_values(), ledger:
        model, inputs = make(batch, sequence)
        optimizer, step = trainer(model, inputs, precision, checkpointing)
        ledger.begin_step(model, optimizer, tree_leaves(inputs))
        step()
    return ledger.peak


@contextlib.contextmanager
def _told(name: str, batch: int, sequence: int) -> Iterator[None]:
    """What a model raises, in a line: the tokens are more than its positions, or a function takes other arguments."""
    try:
        with warnings.catch_warnings(), contextlib.ExitStack() as silenced:
            for source in ("torch._subclasses.fake_tensor", "transformers"):
                silenced.enter_context(mock.patch.object(logging.getLogger(source), "disabled", True))
            warnings.simplefilter("ignore")
            yield
    except NoCheckpointing:
        raise
    except Exception as error:
        chosen = f"batch {batch}" if ":" in name else f"batch {batch}, sequence {sequence}"
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{name} can't do a step at {chosen}: {type(error).__name__}: {reason}") from error


def _without_values() -> contextlib.AbstractContextManager:
    """Leave the weights of transformers' models as they are made: fake ones have no values to draw."""
    kind = getattr(sys.modules.get("transformers"), "PreTrainedModel", None)
    if not hasattr(kind, "_initialize_weights"):
        return contextlib.nullcontext()
    return mock.patch.object(kind, "_initialize_weights", lambda *_: None)


def trainer(
    model: nn.Module, inputs: Any, precision: str, checkpointing: str
) -> tuple[torch.optim.Optimizer, Callable[[], None]]:
    """An optimizer and a step of it, as `count_model` counts it and tests measure it."""
    model.train()
    if checkpointing == "full":
        if not getattr(model, "supports_gradient_checkpointing", False):
            raise NoCheckpointing(f"{type(model).__name__} has no gradient checkpointing")
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if precision == "bf16":
        model, inputs = _in_bf16(model), tree_map(_half, inputs)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
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
            raise UnknownModel(f"{name} names no model: it has neither architectures nor model_type")
        cls = (config.get("architectures") or ["AutoModelForCausalLM"])[0]
    try:
        import transformers
    except ImportError as error:
        raise UnknownModel(f"{name} needs transformers: pip install transformers") from error
    kind = getattr(transformers, cls, None)
    if kind is None:
        raise ValueError(f"{cls!r} is no class of transformers {transformers.__version__}")
    if cls.startswith("Auto"):
        settings = transformers.AutoConfig.for_model(**config)
        return lambda batch, sequence: (model := kind.from_config(settings), example(model, batch, sequence))
    settings = kind.config_class(**config)
    return lambda batch, sequence: (model := kind(settings), example(model, batch, sequence))


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
