"""The models whose latency and training steps are measured, with random weights, inputs and targets."""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

from ...lab import Row
from ...lab.arguments import check_choice
from ...models import Bert, Llama, ResNet
from ...models.bert import PRESETS as BERTS
from ...models.bert import Classifier
from ...models.llama import PRESETS as LLAMAS
from ...models.resnet import PRESETS as RESNETS

TINY_RESNET, TINY_BERT = "tiny ResNet", "tiny BERT"
RESNET_18, BERT_BASE, LLAMA = "ResNet-18, 224 px", "BERT-base, 128 tokens", "Llama 32M, 256 tokens"

# name -> class, preset, side of a picture or length of a sequence
MODELS: dict[str, tuple[type[nn.Module], str, int]] = {
    TINY_RESNET: (ResNet, "tiny", 32),
    TINY_BERT: (Bert, "tiny", 16),
    RESNET_18: (ResNet, "resnet-18", 224),
    BERT_BASE: (Bert, "bert-base", 128),
    LLAMA: (Llama, "llama-60m", 256),
}
CHANGES = {name: {"dropout": 0.0} for name in (TINY_BERT, BERT_BASE)}
CHANGES |= {LLAMA: {"layers": 4}}  # half of the preset's, so that it compiles in half the time
RESNET_MODELS = (TINY_RESNET, RESNET_18)
TINY = (TINY_RESNET, TINY_BERT)


def each(models: Iterable[str], precision: str, batches: Iterable[int]) -> list[Row]:
    """Configurations of a table."""
    return [{"model": model, "precision": precision, "batch": batch} for model in models for batch in batches]


def network(model: str) -> nn.Module:
    """A model by its name, in fp32 on the CPU, in evaluation mode, with fixed weights and without dropout."""
    of, preset, size = MODELS[model]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = of.from_name(preset, **CHANGES.get(model, {}))
        for module in net.modules():  # with the initial 1 and 0, a backend that drops norms would go unnoticed
            if isinstance(module, (nn.BatchNorm2d, nn.LayerNorm)):
                nn.init.uniform_(module.weight, 0.8, 1.2)
                nn.init.normal_(module.bias, std=0.1)
        if of is ResNet:
            update_bn([torch.rand(4, 3, size, size)], net)
    return net.eval()


def example(model: str, batch: int) -> tuple[Tensor, ...]:
    """Inputs of a model: pictures (B, 3, S, S), or tokens (B, T)."""
    check_choice(MODELS, model=model)
    of, preset, size = MODELS[model]
    generator = torch.Generator().manual_seed(1)
    if of is ResNet:
        return (torch.rand(batch, 3, size, size, generator=generator),)
    vocabulary = (BERTS if of is Bert else LLAMAS)[preset]["vocab_size"]
    return (torch.randint(vocabulary, (batch, size), generator=generator),)


def targets(model: str, batch: int) -> Tensor:
    """Random labels (B,); of a language model the next tokens (B, T), its inputs shifted."""
    of, preset, _ = MODELS[model]
    if of is Llama:
        return example(model, batch)[0].roll(-1, dims=1)
    classes = RESNETS[preset]["classes"] if of is ResNet else 2
    return torch.randint(classes, (batch,), generator=torch.Generator().manual_seed(2))


class Loss(nn.Module):
    """Inputs and targets to the mean cross-entropy: what a compiler of training gets."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self.net(x).float()  # (B, classes) or (B, T, vocabulary)
        return F.cross_entropy(logits.flatten(0, -2), y.flatten())


def trainable(model: str) -> Loss:
    """A model with its loss, in training mode."""
    net = network(model)
    if isinstance(net, Bert):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            net = Classifier(net, 2)
    return Loss(net).train()
