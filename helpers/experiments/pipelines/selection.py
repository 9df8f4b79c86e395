"""Which samples can be left out: the least forgotten, random ones, or the most forgotten?

For a data set and a seed, a first training counts forgetting. Then a share of the samples is left out and a new
network, from another seed, is trained on the rest; its lost accuracy is against the same network trained on all
samples. The same number of epochs on fewer samples has fewer steps; with `budget="steps"` the number of steps is that
for all samples.

The data are scikit-learn's digits. They are pooled and split by seed, so that results can be averaged over seeds, as a
test set has only a few hundred samples. All data is on the device, 0.3 MB. A training has 570 steps, about a second of
one core. Results are reproducible on a machine by the seed: orders are drawn on the CPU.
"""

import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from helpers.lab.machine import device
from helpers.lab.records import Row
from helpers.metrics import LMAccuracy
from helpers.pipelines.forgetting import ForgettingTracker
from helpers.training import Batch, Step, Task, Trainer, fit

LEAST, RANDOM, MOST = VARIANTS = ("least forgotten", "random", "most forgotten")
TEST_EVERY = 3  # every third sample of each class is for the test
WARM_UP = 0.1  # share of the steps
MOMENTUM, WEIGHT_DECAY = 0.9, 5e-4


@dataclass(frozen=True)
class Recipe:
    epochs: int
    batch: int
    learning_rate: float
    width: int


ON_DIGITS = Recipe(epochs=30, batch=64, learning_rate=0.1, width=128)
SOURCE = "digits of scikit-learn, 8×8"


@dataclass(frozen=True)
class Split:
    """Images (N, C, H, W) fp32 of mean 0 and deviation 1 in each channel, labels (N,) int64."""

    images: Tensor
    labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    classes: int

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Trained:
    accuracy: float
    seconds: float
    steps: int


@dataclass(frozen=True)
class Picked(Batch):
    """A batch that knows which samples it has."""

    indices: Tensor | None = None


def measure_selection(
    variant: str,
    share: float,
    seed: int = 0,
    *,
    budget: str = "epochs",
    wrong: float = 0.0,
    epochs: int | None = None,
) -> Row:
    """Test accuracy after leaving out a `share` of the training samples, selected by `variant`; one row.

    `seed` determines the split, both trainings and the random selection. `lost_points` is against the same network
    trained on all samples; negative if leaving out helped. A share `wrong` of the training labels is changed first, and
    `wrong_share` is the share of wrong labels among the samples left out. The first call for a seed costs two
    more trainings, which later calls reuse.
    """
    recipe = dataclasses.replace(ON_DIGITS, epochs=epochs or ON_DIGITS.epochs)
    parts, mask = _parts(seed, wrong)
    tracker = _tracked(seed, recipe, wrong)
    baseline = _on_everything(seed, recipe, wrong)
    remaining = selected(tracker, variant, share, seed)
    steps = baseline.steps if budget == "steps" else None
    trained = (
        train(parts, recipe, derived(seed, "second training"), remaining=remaining, steps=steps) if share else baseline
    )
    return {
        "test_accuracy": trained.accuracy,
        "lost_points": 100 * (baseline.accuracy - trained.accuracy),
        "wrong_share": int(mask.sum() - mask[remaining].sum()) / max(len(parts) - len(remaining), 1),
        "samples": len(parts),
        "samples_kept": len(remaining),
        "test_samples": len(parts.test_labels),
        "unforgettable_share": len(tracker.unforgettable()) / len(parts),
        "train_s": trained.seconds,
        "epochs": recipe.epochs,
        "steps": trained.steps,
        "source": SOURCE,
    }


def selected(tracker: ForgettingTracker, variant: str, share: float, seed: int) -> Tensor:
    """The indices of the samples that remain when a share is left out, ascending."""
    ties = derived(seed, "ties")
    if variant == LEAST:
        remaining = tracker.keep(1 - share, ties)
    else:
        shuffled = torch.randperm(tracker.samples, generator=generator(seed, "left out"))
        order = shuffled if variant == RANDOM else tracker.ranking(ties)
        remaining = order[: len(tracker.keep(1 - share, ties))]
    return remaining.sort().values


def derived(seed: int, purpose: str) -> int:
    """A separate seed for each purpose. With a common one, draws would be correlated: the wrong labels and the random
    selection would be the same samples.
    """
    return int.from_bytes(hashlib.sha256(f"{seed} {purpose}".encode()).digest()[:6])


def generator(seed: int, purpose: str) -> torch.Generator:
    return torch.Generator().manual_seed(derived(seed, purpose))


def split(seed: int, device: torch.device) -> Split:
    """Training and test data; `seed` determines the split."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images, labels = torch.from_numpy(digits.images)[:, None], torch.from_numpy(digits.target).long()
    shuffled = torch.randperm(len(labels), generator=generator(seed, "split"))
    by_class = shuffled[labels[shuffled].argsort(stable=True)]
    for_test = torch.zeros(len(labels), dtype=torch.bool)
    for_test[by_class[::TEST_EVERY]] = True
    train, test = (images[mask].float() for mask in (~for_test, for_test))
    mean, deviation = (moment(train, dim=(0, 2, 3), keepdim=True) for moment in (torch.mean, torch.std))
    return Split(
        ((train - mean) / deviation).to(device),
        labels[~for_test].to(device),
        ((test - mean) / deviation).to(device),
        labels[for_test].to(device),
        int(labels.max()) + 1,
    )


def train(
    parts: Split,
    recipe: Recipe,
    seed: int,
    *,
    remaining: Tensor | None = None,
    steps: int | None = None,
    tracker: ForgettingTracker | None = None,
) -> Trained:
    """Train a new network on the samples `remaining` (all by default) and test it.

    It trains for the recipe's epochs, or for `steps` steps, by SGD with momentum; the learning rate rises linearly,
    then falls to 0. The data is on the device; only each epoch's order is copied to it.
    """
    where = parts.images.device
    remaining = torch.arange(len(parts)) if remaining is None else remaining
    steps = recipe.epochs * -(-len(remaining) // recipe.batch) if steps is None else steps
    momentum = {"momentum": MOMENTUM, "nesterov": True, "weight_decay": WEIGHT_DECAY}

    def batches(epoch: int) -> Iterator[Batch]:
        for indices in _batches(remaining, recipe.batch, steps, seed, where):
            yield Picked(parts.images[indices], parts.labels[indices], indices=indices)

    def loss(logits: Tensor, batch: Batch) -> Tensor:
        if isinstance(batch, Picked) and tracker is not None:
            tracker.update(batch.indices, logits=logits, labels=batch.targets)
        return nn.functional.cross_entropy(logits, batch.targets)

    def validation() -> Iterator[Batch]:
        for images, labels in zip(parts.test_images.split(2000), parts.test_labels.split(2000), strict=True):
            yield Batch(images, labels, real=len(labels))

    def set_rate(step: Step) -> None:
        progress = (step.number + 1) / (steps + 1)
        scale = min(progress / WARM_UP, (1 - progress) / (1 - WARM_UP))
        trainer.optimizer.param_groups[0]["lr"] = recipe.learning_rate * scale

    task = Task(
        source=SOURCE,
        model=network(parts, recipe.width, seed).to(where),
        loss=loss,
        validation_metric=LMAccuracy(pad_id=-1),  # of classes, none of which is padding
        batches=batches,
        steps=lambda epoch: steps,
        validation=validation,
        learning_rate=recipe.learning_rate,
        optimizer=functools.partial(torch.optim.SGD, lr=0.0, fused=True, **momentum),
    )
    trainer = Trainer(task)
    run = fit(trainer, epochs=1, on_step=set_rate)
    return Trained(run["validation_accuracy"], run["epoch_s"], steps)


def network(parts: Split, width: int, seed: int) -> nn.Module:
    """An MLP with two hidden layers."""
    sizes = [parts.images[0].numel(), width, width]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = [layer for a, b in itertools.pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
        return nn.Sequential(nn.Flatten(), *layers, nn.Linear(width, parts.classes))


def _batches(remaining: Tensor, size: int, steps: int, seed: int, where: torch.device) -> Iterator[Tensor]:
    """`steps` batches of indices (B,), each epoch in a new order; an epoch's last batch may be smaller."""
    shuffler = torch.Generator().manual_seed(seed)
    done = 0
    while done < steps:
        order = remaining[torch.randperm(len(remaining), generator=shuffler)].to(where)
        batches = order.split(size)[: steps - done]
        done += len(batches)
        yield from batches


@functools.lru_cache(maxsize=256)
def _tracked(seed: int, recipe: Recipe, noise: float = 0.0) -> ForgettingTracker:
    """The forgetting counts of a first training."""
    parts, _ = _parts(seed, noise)
    tracker = ForgettingTracker(len(parts), parts.images.device)
    train(parts, recipe, derived(seed, "first training"), tracker=tracker)
    return tracker


@functools.lru_cache(maxsize=256)
def _on_everything(seed: int, recipe: Recipe, noise: float = 0.0) -> Trained:
    return train(_parts(seed, noise)[0], recipe, derived(seed, "second training"))


@functools.lru_cache(maxsize=2)
def _parts(seed: int, noise: float = 0.0) -> tuple[Split, Tensor]:
    """The data, with a share `noise` of the training labels changed to a random other class; and their mask (N,)."""
    parts = split(seed, device())
    label_generator = generator(seed, "wrong labels")
    wrong = torch.zeros(len(parts), dtype=torch.bool)
    wrong[torch.randperm(len(parts), generator=label_generator)[: round(noise * len(parts))]] = True
    offsets = torch.randint(1, parts.classes, (len(parts),), generator=label_generator) * wrong
    labels = (parts.labels + offsets.to(parts.labels.device)) % parts.classes
    return dataclasses.replace(parts, labels=labels), wrong
