"""Which samples can be left out: those that a network never forgets, any, or those that it forgets most?

For a data set and a seed, one training counts forgetting. Then a share of the samples is left out and a new network,
from another seed, trains on the rest; what that loses is told against the same new network on everything. As many
epochs on fewer samples are fewer steps; with `budget="steps"` the steps are as many as for everything.

A training on digits is 570 steps, about a second of one core; on garments 1,250 steps, about 20 s. Same seed, same
figures on the same machine: orders are drawn on the CPU, and cuDNN is held to its deterministic kernels.
"""

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from helpers.lab.machine import device

from .choice_data import DIGITS, Split, chance, derived, split
from .choice_training import Recipe, Trained, train
from .forgetting import ForgettingTracker

LEAST, RANDOM, MOST = WAYS = ("least forgotten", "random", "most forgotten")
BUDGETS = ("epochs", "steps")
SHARES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)

ON_DIGITS = Recipe(epochs=30, batch=64, learning_rate=0.1, width=128)
ON_PHOTOS = Recipe(epochs=10, batch=64, learning_rate=0.05, width=16)


def measure_choice(
    data: str | Path, way: str, share: float, seed: int = 0, *, budget: str = "epochs", epochs: int | None = None
) -> dict[str, Any]:
    """Accuracy after `share` of the training samples was left out in a `way`, in a row.

    `data` is "digits", "garments" or a folder of photos. `seed` decides the split, both trainings and what chance
    chooses. `lost_points` is against the same network trained on everything: below 0 if leaving out helped. The first
    call for (data, seed) costs two trainings more, which later calls reuse.
    """
    _among("way", way, WAYS)
    _among("budget", budget, BUDGETS)
    if not 0 <= share < 1:
        raise ValueError(f"share is {share!r}; it must be 0 or more and below 1")
    recipe = _recipe(data, epochs)
    parts, _ = _parts(str(data), seed)
    tracker = _tracked(str(data), seed, recipe)
    whole = _on_everything(str(data), seed, recipe)
    kept = chosen(tracker, way, share, seed)
    steps = whole.steps if budget == "steps" else None
    trained = train(parts, recipe, derived(seed, "second training"), kept=kept, steps=steps) if share else whole
    return {
        "data": str(data),
        "way": way,
        "share": share,
        "seed": seed,
        "budget": budget,
        "test_accuracy": trained.accuracy,
        "lost_points": 100 * (whole.accuracy - trained.accuracy),
        "samples": len(parts),
        "samples_kept": len(kept),
        "test_samples": len(parts.test_labels),
        "unforgettable_share": len(tracker.unforgettable()) / len(parts),
        "train_s": trained.seconds,
        "epochs": recipe.epochs,
        "steps": trained.steps,
        "source": parts.source,
    }


def distribution(data: str | Path, seed: int = 0, *, epochs: int | None = None) -> list[dict[str, Any]]:
    """How many samples were forgotten how often: a row for each count, and one for those that were never learned."""
    tracker = _tracked(str(data), seed, _recipe(data, epochs))
    learned = tracker.learned()
    sizes = torch.bincount(tracker.counts()[learned]).tolist()
    rows = [{"forgotten": str(times), "samples": size} for times, size in enumerate(sizes)]
    rows.append({"forgotten": "never learned", "samples": int((~learned).sum())})
    about = {"data": str(data), "seed": seed}
    return [about | row | {"share": row["samples"] / len(learned)} for row in rows]


def measure_noise(
    data: str | Path, way: str, noise: float = 0.1, seed: int = 0, *, epochs: int | None = None
) -> dict[str, Any]:
    """Whether forgetting finds wrong labels: `noise` of the training labels are wrong, and as many samples left out.

    `precision` is the share of wrong labels among those left out: by chance it is `noise`. `test_accuracy` is that of a
    new network on the rest, `noisy_accuracy` that of the same network on everything, wrong labels included.
    """
    _among("way", way, WAYS)
    if not 0 < noise < 1:
        raise ValueError(f"noise is {noise!r}; it must be above 0 and below 1")
    recipe = _recipe(data, epochs)
    parts, wrong = _parts(str(data), seed, noise)
    tracker = _tracked(str(data), seed, recipe, noise)
    share = float(wrong.sum()) / len(wrong)
    kept = chosen(tracker, way, share, seed)
    whole = _on_everything(str(data), seed, recipe, noise)
    trained = train(parts, recipe, derived(seed, "second training"), kept=kept)
    found = int(wrong.sum() - wrong[kept].sum())
    return {
        "data": str(data),
        "way": way,
        "noise": share,
        "seed": seed,
        "precision": found / max(len(parts) - len(kept), 1),
        "test_accuracy": trained.accuracy,
        "noisy_accuracy": whole.accuracy,
        "gained_points": 100 * (trained.accuracy - whole.accuracy),
        "samples": len(parts),
        "samples_kept": len(kept),
        "train_s": trained.seconds,
        "epochs": recipe.epochs,
        "source": parts.source,
    }


def summary(rows: Sequence[dict[str, Any]], column: str = "lost_points") -> pd.DataFrame:
    """A column over seeds, by data set, budget, way and share: mean, standard deviation, standard error of the mean."""
    table = pd.DataFrame(rows)
    by = [name for name in ("data", "budget", "way", "share", "noise") if name in table]
    found = table.groupby(by, sort=False)[column].agg(["mean", "std", "sem", "count"])
    names = {"mean": column, "std": f"{column}_std", "sem": f"{column}_error", "count": "seeds"}
    return found.rename(columns=names).reset_index()


def chosen(tracker: ForgettingTracker, way: str, share: float, seed: int) -> Tensor:
    """The indices that are left when a share of the samples is left out, ascending."""
    ties = derived(seed, "ties")
    if way == LEAST:
        kept = tracker.keep(1 - share, ties)
    else:
        shuffled = torch.randperm(tracker.samples, generator=chance(seed, "left out"))
        order = shuffled if way == RANDOM else tracker.ranking(ties)
        kept = order[: len(tracker.keep(1 - share, ties))]
    return kept.sort().values


@functools.lru_cache(maxsize=256)
def _tracked(data: str, seed: int, recipe: Recipe, noise: float = 0.0) -> ForgettingTracker:
    """What a first training forgot."""
    parts, _ = _parts(data, seed, noise)
    tracker = ForgettingTracker(len(parts), parts.images.device)
    train(parts, recipe, derived(seed, "first training"), tracker=tracker)
    return tracker


@functools.lru_cache(maxsize=256)
def _on_everything(data: str, seed: int, recipe: Recipe, noise: float = 0.0) -> Trained:
    return train(_parts(data, seed, noise)[0], recipe, derived(seed, "second training"))


@functools.lru_cache(maxsize=2)
def _parts(data: str, seed: int, noise: float = 0.0) -> tuple[Split, Tensor]:
    """The data, with a share of the training labels moved to any other class; and which those are, (N,) bool."""
    parts = split(data, seed, device())
    generator = chance(seed, "wrong labels")
    wrong = torch.zeros(len(parts), dtype=torch.bool)
    wrong[torch.randperm(len(parts), generator=generator)[: round(noise * len(parts))]] = True
    by = torch.randint(1, parts.classes, (len(parts),), generator=generator) * wrong
    labels = (parts.labels + by.to(parts.labels.device)) % parts.classes
    return dataclasses.replace(parts, labels=labels), wrong


def _recipe(data: str | Path, epochs: int | None) -> Recipe:
    recipe = ON_DIGITS if str(data) == DIGITS else ON_PHOTOS
    if epochs is None:
        return recipe
    if isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 1:
        raise ValueError(f"epochs is {epochs!r}; it must be a whole number, 1 or more")
    return dataclasses.replace(recipe, epochs=epochs)


def _among(name: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; it must be one of: {', '.join(allowed)}")
