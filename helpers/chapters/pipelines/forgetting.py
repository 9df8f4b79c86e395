"""Which samples can be left out: the least forgotten, random ones, or the most forgotten?

For a data set and a seed, a first training counts forgetting. Then a share of the samples is left out and a new
network, from another seed, is trained on the rest; its lost accuracy is against the same network trained on all
samples. The same number of epochs on fewer samples has fewer steps; with `budget="steps"` the number of steps is that
for all samples.

The data are scikit-learn's digits. They are pooled and split by seed, so that results can be averaged over seeds, as a
test set has only a few hundred samples. All data is on the device, 0.3 MB. A training has 570 steps, about a second of
one core. Results are reproducible on a machine by the seed: orders are drawn on the CPU.
"""

import functools
import hashlib
from types import SimpleNamespace
from typing import NamedTuple

import pandas as pd
import torch
from torch import Tensor, nn

from ...book.table import Worth, table
from ...book.values import PERCENT, Number, mean_of
from ...lab import Row
from ...lab.machine import device, missing_because
from ...pipelines.forgetting import ForgettingTracker, is_correct
from ...training import Trainer

LEAST, RANDOM, MOST = VARIANTS = ("least forgotten", "random", "most forgotten")
SHARES = (0.0, 0.3, 0.5, 0.7)
SOURCE, CLASSES = "digits of scikit-learn, 8×8", 10
TEST_EVERY = 3  # every third sample of each class is for the test
EPOCHS, BATCH, WIDTH = 30, 64, 128
LEARNING_RATE, MOMENTUM, WEIGHT_DECAY = 0.1, 0.9, 5e-4
WARM_UP = 0.1  # share of the steps
COLUMNS = "test_accuracy lost_points unforgettable_share steps source"


class Split(NamedTuple):
    """Images (N, C, H, W) fp32 of mean 0 and deviation 1 in each channel, labels (N,) int64."""

    images: Tensor
    labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def _selections() -> list[Row]:
    """Each variant at each share, and at 0.3 with as many steps as for all samples."""
    return [
        {"budget": "epochs", "variant": variant, "share": share, "seed": seed} | change
        for seed in range(5)
        for variant in VARIANTS
        for share in SHARES
        if share or variant == RANDOM
        for change in ({}, {"budget": "steps"})
        if not change or (share == 0.3 and variant != MOST)
    ]


@table(
    small=[{"variant": variant, "share": 0.3, "budget": "epochs", "seed": 0} for variant in (LEAST, RANDOM)],
    cpu=_selections(),
    gpu=[],
    missing=lambda **_: missing_because("scikit-learn"),
    columns=COLUMNS,
    timed=False,
    worth=Worth(1, "which samples can go", cpu=0.8),
)
def forgetting(variant: str, share: float, budget: str, seed: int) -> Row:
    """Test accuracy after leaving out a `share` of the training samples: the least forgotten, random ones, or the most.

    `seed` determines the split, both trainings and the random selection. `lost_points` is against the same network
    trained on all samples; negative if leaving out helped. The first call for a seed costs two more trainings, which
    later calls reuse.
    """
    parts = _parts(seed)
    tracker = _tracked(seed)
    trained = baseline = _on_everything(seed)
    remaining = selected(tracker, variant, share, seed)
    if share:
        steps = baseline["steps"] if budget == "steps" else None
        trained = train(parts, derived(seed, "second training"), remaining=remaining, steps=steps)
    return trained | {
        "lost_points": 100 * (baseline["test_accuracy"] - trained["test_accuracy"]),
        "unforgettable_share": len(tracker.unforgettable()) / len(parts.labels),
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
    """A separate seed for each purpose: with a common one, draws would be correlated."""
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
    tensors = (train - mean) / deviation, labels[~for_test], (test - mean) / deviation, labels[for_test]
    return Split(*(tensor.to(device) for tensor in tensors))


def train(
    parts: Split,
    seed: int,
    *,
    remaining: Tensor | None = None,
    steps: int | None = None,
    tracker: ForgettingTracker | None = None,
) -> Row:
    """Train a new network on the samples `remaining` (all by default) and test it.

    It trains for `EPOCHS`, or for `steps` steps, by SGD with momentum; the learning rate rises linearly, then falls to
    0. The data is on the device; only each epoch's order is copied to it. An epoch's last batch may be smaller.
    """
    where = parts.images.device
    remaining = torch.arange(len(parts.labels)) if remaining is None else remaining
    steps = EPOCHS * -(-len(remaining) // BATCH) if steps is None else steps
    model = network(seed).to(where)
    sgd = torch.optim.SGD(
        model.parameters(), LEARNING_RATE, fused=True, momentum=MOMENTUM, nesterov=True, weight_decay=WEIGHT_DECAY
    )

    def loss(indices: Tensor) -> tuple[Tensor]:
        logits, labels = model(parts.images[indices]), parts.labels[indices]
        if tracker is not None:
            tracker.update(indices, is_correct(logits, labels))
        return (nn.functional.cross_entropy(logits, labels),)

    trainer, shuffler, done = Trainer(model, loss, sgd), torch.Generator().manual_seed(seed), 0
    while done < steps:
        order = remaining[torch.randperm(len(remaining), generator=shuffler)].to(where)
        for indices in order.split(BATCH)[: steps - done]:
            done += 1
            progress = done / (steps + 1)
            sgd.param_groups[0]["lr"] = LEARNING_RATE * min(progress / WARM_UP, (1 - progress) / (1 - WARM_UP))
            trainer.step(indices)
    with torch.no_grad():
        right = int((model(parts.test_images).argmax(1) == parts.test_labels).sum())
    return {"test_accuracy": right / len(parts.test_labels), "steps": steps}


def network(seed: int) -> nn.Module:
    """An MLP with two hidden layers."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        first, second, last = nn.Linear(64, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
    return nn.Sequential(nn.Flatten(), first, nn.ReLU(), second, nn.ReLU(), last)


@functools.lru_cache(maxsize=256)
def _tracked(seed: int) -> ForgettingTracker:
    """The forgetting counts of a first training."""
    parts = _parts(seed)
    tracker = ForgettingTracker(len(parts.labels), parts.images.device)
    train(parts, derived(seed, "first training"), tracker=tracker)
    return tracker


@functools.lru_cache(maxsize=256)
def _on_everything(seed: int) -> Row:
    return train(_parts(seed), derived(seed, "second training"))


@functools.lru_cache(maxsize=2)
def _parts(seed: int) -> Split:
    return split(seed, device())


# Numbers

REMOVED = 0.3  # the share of samples whose removal is quoted


@forgetting.numbers()
def _(rows: pd.DataFrame) -> SimpleNamespace:
    """Accuracy lost without a share of the samples, means over seeds; `least`, `random`, `most` at `REMOVED`."""
    removed = rows[rows["share"] > 0]
    lost = removed.groupby(["budget", "share", "variant"], sort=False)["lost_points"].agg(["mean", "sem"])
    texts = [f"{mean:.2f} ± {error:.2f}" for mean, error in zip(lost["mean"], lost["sem"], strict=True)]
    shown = lost.assign(text=texts)["text"].unstack("variant").reset_index().sort_values(["budget", "share"])
    quoted = removed[removed["share"] == REMOVED]

    def points(variant: str, budget: str = "epochs") -> Number:
        chosen = (quoted["budget"] == budget) & (quoted["variant"] == variant)
        return mean_of(quoted.loc[chosen, "lost_points"], "points", variant)

    return SimpleNamespace(
        table=shown.assign(share=shown["share"].map("{:.0%}".format)).rename(
            columns={"budget": "equal", "share": "removed"}
        ),
        seeds=int(rows["seed"].nunique()),
        unforgettable=Number(rows["unforgettable_share"].mean(), PERCENT, decimals=0),
        least=points("least forgotten"),
        random=points("random"),
        most=points("most forgotten"),
        least_by_steps=points("least forgotten", "steps"),
        random_by_steps=points("random", "steps"),
    )
