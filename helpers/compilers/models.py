"""The models whose latency and training steps are measured, ResNet and BERT, with random weights and inputs."""

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

from helpers.lab import device
from helpers.lab.arguments import check_choice, check_positive
from helpers.lab.precision import fp32_products
from helpers.models import Bert, ResNet
from helpers.models.bert import PRESETS as BERTS
from helpers.models.resnet import PRESETS as RESNETS

TINY_RESNET, TINY_BERT, RESNET_18, BERT_BASE = "tiny resnet", "tiny bert", "resnet-18", "bert-base"

# name -> preset of the model, side of a picture or length of a sequence
MODELS: dict[str, tuple[str, int]] = {
    TINY_RESNET: ("tiny", 32),
    TINY_BERT: ("tiny", 16),
    RESNET_18: ("resnet-18", 224),
    BERT_BASE: ("bert-base", 128),
}
RESNET_MODELS = (TINY_RESNET, RESNET_18)

# precision -> dtype in inference; tf32: fp32 tensors, products in TF32
PRECISIONS = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def network(model: str, **changes: Any) -> nn.Module:
    """A model by its name, in fp32 on the CPU, with fixed weights."""
    preset, size = _named(model)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if model in RESNET_MODELS:
            net: nn.Module = ResNet.from_name(preset, **changes)
            _randomise_norms(net)
            _set_running_statistics(net, size)
        else:
            net = Bert.from_name(preset, **changes)
            _randomise_norms(net)
    return net


def example(model: str, batch: int, *, length: int | None = None, seed: int = 1) -> tuple[Tensor, ...]:
    """Inputs of a model: pictures (B, 3, S, S), or tokens (B, T) with T = `length` or the model's default."""
    preset, size = _named(model)
    check_positive(batch=batch)
    generator = torch.Generator().manual_seed(seed)
    if model in RESNET_MODELS:
        if length is not None:
            raise ValueError(f"length is {length}; {model} reads pictures, which have none")
        return (torch.rand(batch, 3, size, size, generator=generator),)
    length = size if length is None else length
    limit = BERTS[preset].get("max_length", 512)
    check_positive(length=length)
    if length > limit:
        raise ValueError(f"length is {length}; {model} reads {limit} tokens at most")
    vocabulary = BERTS[preset]["vocab_size"]
    return (torch.randint(vocabulary, (batch, length), generator=generator),)


def labels(classes: int, batch: int) -> Tensor:
    """Random labels (B,)."""
    return torch.randint(classes, (batch,), generator=torch.Generator().manual_seed(2))


def classes_of(model: str) -> int:
    """The number of classes of a model's logits: pictures' classes, or 2 for pairs of sentences."""
    return RESNETS[_named(model)[0]]["classes"] if model in RESNET_MODELS else 2


def products(precision: str) -> contextlib.AbstractContextManager[None]:
    """A context that sets the precision of fp32 products and convolutions on a GPU. The CPU has no TF32."""
    check_choice(PRECISIONS, precision=precision)
    if precision == "tf32" and device().type != "cuda":
        raise ValueError("precision is 'tf32', which needs CUDA; valid on the CPU: 'fp32', 'fp16', 'bf16'")
    return fp32_products(tf32=precision == "tf32")


def _randomise_norms(net: nn.Module) -> None:
    """Randomise norms' weights and biases: with the initial 1 and 0, a backend that drops them would go unnoticed."""
    for module in net.modules():
        if isinstance(module, (nn.BatchNorm2d, nn.LayerNorm)):
            nn.init.uniform_(module.weight, 0.8, 1.2)
            nn.init.normal_(module.bias, std=0.1)


def _set_running_statistics(net: ResNet, size: int) -> None:
    """Set batch norms' running statistics from random pictures, for the same reason."""
    norms = [module for module in net.modules() if isinstance(module, nn.BatchNorm2d)]
    with torch.no_grad():
        for norm in norms:
            norm.momentum = None  # cumulative mean
        net.train()(torch.rand(4, 3, size, size))
        for norm in norms:
            norm.momentum = 0.1


def _named(model: str) -> tuple[str, int]:
    check_choice(MODELS, model=model)
    return MODELS[model]
