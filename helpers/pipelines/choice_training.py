"""One training on data that lies on the device as a whole: a small network, and the same figures for the same seed."""

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from helpers.lab.timing import synchronize

from .choice_data import Split
from .forgetting import ForgettingTracker, is_correct

WARM_UP = 0.1  # of the steps
MOMENTUM, WEIGHT_DECAY = 0.9, 5e-4


@dataclass(frozen=True)
class Recipe:
    epochs: int
    batch: int
    learning_rate: float
    width: int


@dataclass(frozen=True)
class Trained:
    accuracy: float
    seconds: float
    steps: int


def train(
    parts: Split,
    recipe: Recipe,
    seed: int,
    *,
    kept: Tensor | None = None,
    steps: int | None = None,
    tracker: ForgettingTracker | None = None,
) -> Trained:
    """Train a new network on the samples `kept` (all by default) and test it.

    For the recipe's epochs, or as many `steps`. SGD with momentum; the learning rate rises, then falls to 0. All of the
    data lies on the device, so the host waits for it at the end, and to send the order of an epoch.
    """
    place = parts.images.device
    kept = torch.arange(len(parts)) if kept is None else kept
    steps = recipe.epochs * -(-len(kept) // recipe.batch) if steps is None else steps
    model = network(parts, recipe.width, seed).to(place)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.0, momentum=MOMENTUM, nesterov=True, weight_decay=WEIGHT_DECAY, fused=True
    )
    synchronize()
    began = time.perf_counter()
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True):
        for step, indices in enumerate(_batches(kept, recipe.batch, steps, seed, place)):
            optimizer.param_groups[0]["lr"] = recipe.learning_rate * _slope(step, steps)
            labels = parts.labels[indices]
            logits = model(parts.images[indices])
            if tracker is not None:
                tracker.update(indices, logits=logits, labels=labels)
            nn.functional.cross_entropy(logits, labels).backward()
            optimizer.step()
            optimizer.zero_grad()
        synchronize()
        return Trained(accuracy(model, parts), time.perf_counter() - began, steps)


@torch.no_grad()
def accuracy(model: nn.Module, parts: Split, batch: int = 2000) -> float:
    """The share of test samples that are right. Waits for the device once."""
    batches = zip(parts.test_images.split(batch), parts.test_labels.split(batch), strict=True)
    return float(torch.cat([is_correct(model(images), labels) for images, labels in batches]).double().mean())


def network(parts: Split, width: int, seed: int) -> nn.Module:
    """Two hidden layers for digits; three convolutions, each halving the sides, for photos."""
    channels, side = parts.images.shape[1:3]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if side == 8:
            sizes = [channels * side * side, width, width]
            layers = [layer for a, b in itertools.pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
            return nn.Sequential(nn.Flatten(), *layers, nn.Linear(width, parts.classes))
        sizes = [channels, width, 2 * width, 4 * width]
        pairs = itertools.pairwise(sizes)
        layers = [layer for a, b in pairs for layer in (nn.Conv2d(a, b, 4, stride=2, padding=1), nn.ReLU())]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * width * (side // 8) ** 2, parts.classes))


def _batches(kept: Tensor, size: int, steps: int, seed: int, place: torch.device) -> Iterator[Tensor]:
    """So many batches of indices: epoch after epoch in a new order, the last batch of each smaller."""
    generator = torch.Generator().manual_seed(seed)
    done = 0
    while done < steps:
        order = kept[torch.randperm(len(kept), generator=generator)].to(place)
        batches = order.split(size)[: steps - done]
        done += len(batches)
        yield from batches


def _slope(step: int, steps: int) -> float:
    """The learning rate's share of its peak: up to it in a straight line, then down to 0."""
    at = (step + 1) / (steps + 1)
    return min(at / WARM_UP, (1 - at) / (1 - WARM_UP))
