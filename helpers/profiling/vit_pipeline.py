"""Training a Vision Transformer on photos of clothes, slowly on purpose; any subset of the fixes can be run.

    from helpers.profiling.vit_pipeline import FIXED, run
    slow, fast = run(frozenset()), run(FIXED)

`SWITCHES` says what each fix is. Those that are "speed only" leave the loss and every gradient as they are, but for
rounding, if `dropout` is 0 (else the kernels draw other masks from the same distribution). The weights at the start,
the order of photos and their random parts follow from the seed alone, whatever is fixed.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import record_function

from helpers.lab import device
from helpers.lab.arguments import check_positive
from helpers.models import ViT
from helpers.pictures import cores, photo_files
from helpers.pictures.files import PhotoFiles

from . import loop, switches
from .epoch_metrics import CollectedMetrics, StreamingMetrics
from .switches import Fixes
from .vit_data import Feed, HeldBatches, LoadedBatches, class_weights, open_batches
from .vit_slow import with_twins
from .vit_switches import SWITCHES

FIXED = switches.fixed(SWITCHES)  # all that was slow on purpose
ALL = frozenset(switch.name for switch in SWITCHES)  # and what can be done beyond that

# Presets as plain data; `small` is for a CPU and for tests. `classes` and the three below are of generated photos. An
# epoch goes over all photos `passes` times.
PRESETS: dict[str, dict[str, Any]] = {
    "small": {
        "classes": 4,
        "samples": 64,
        "validation_samples": 32,
        "photo_size": (100, 133),
        "passes": 1,
        "model": {"image_size": 32, "patch_size": 8, "depth": 2, "heads": 2, "head_dim": 16, "mlp_size": 64},
        "width": (31, 32),  # slow, fixed
        "dropout": 0.1,
        "batch_size": 16,
        "workers": 1,
        "kept_side": 40,
        "learning_rate": 1e-3,
    },
    "full": {
        "classes": 10,
        "samples": 5120,
        "validation_samples": 1024,
        "photo_size": (400, 533),
        "passes": 1,
        "model": {"image_size": 224, "patch_size": 32, "depth": 12, "heads": 4, "head_dim": 64, "mlp_size": 1024},
        "width": (255, 256),
        "dropout": 0.1,
        "batch_size": 256,
        "workers": 8,
        "kept_side": 256,
        "learning_rate": 5e-4,
    },
}


def alone() -> list[Fixes]:
    """The slow pipeline, then each fix on its own."""
    return switches.alone(SWITCHES)


def cumulative() -> list[Fixes]:
    """The slow pipeline, then one fix more each time, in the order of `SWITCHES`."""
    return switches.cumulative(SWITCHES)


def run(
    fixes: Iterable[str] = FIXED,
    *,
    preset: str = "small",
    epochs: int = 1,
    path: str | Path | None = None,
    steps: int | loop.Excerpt | None = None,
    seed: int = 0,
    on_step: loop.OnStep | None = None,
    profile: loop.Profile | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """Train with these fixes and no others, on `device()`; returns a row of what it took and what was learned.

    `path` is the folder of the clothing dataset; without it the photos are generated. `changes` replace values of the
    preset. `steps`, `on_step` and `profile`, and what the times mean: see `loop.train`. `prepare_s` is what was spent
    once, before the first epoch, to decode photos. `validation_accuracy` is over the whole validation split.
    """
    check_positive(epochs=epochs)
    steps = loop.Excerpt.of(steps)
    training = prepare(fixes, preset=preset, path=path, seed=seed, **changes)
    with training.settings():
        found = loop.train(
            training.model,
            training.epoch,
            training.step,
            training.validate,
            epochs=epochs,
            steps=steps,
            on_step=on_step,
            profile=profile,
        )
    skipped = training.batches.skipped
    if skipped:
        some = ", ".join(list(skipped)[:3]) + (", …" if len(skipped) > 3 else "")
        warnings.warn(f"{len(skipped)} image files could not be read and were skipped: {some}", stacklevel=2)
    mean_ms = found["iteration_mean_ms"]
    return {
        "preset": preset,
        "source": training.photos.source,
        **found,
        "images_per_s": None if mean_ms is None else training.batches.batch_size / mean_ms * 1e3,
        "prepare_s": training.batches.prepare_s,
        **training.sums(),
        "train_macro_f1": training.metrics.compute()["macro_f1"],
        "skipped_files": len(skipped),
    }


def prepare(
    fixes: Iterable[str] = FIXED,
    *,
    preset: str = "small",
    path: str | Path | None = None,
    seed: int = 0,
    **changes: Any,
) -> "Training":
    """Model, optimizer and batches of a set of fixes, before the first step."""
    fixes = switches.check_fixes(fixes, SWITCHES)
    chosen = switches.choose(PRESETS, preset, changes)
    counts = {name: chosen[name] for name in ("classes", "samples", "validation_samples")}
    train, validation = photo_files(path, **counts, size=chosen["photo_size"], seed=seed)
    where = device()
    feed = Feed(
        side=chosen["model"]["image_size"],
        batch_size=chosen["batch_size"],
        workers=min(chosen["workers"], cores()),
        kept_side=chosen["kept_side"],
        passes=chosen["passes"],
        seed=seed,
        device=where,
    )
    model = build_model(fixes, len(train.classes), chosen, seed).to(where)
    return Training(fixes, model, chosen["learning_rate"], train, open_batches(fixes, train, validation, feed))


def build_model(fixes: Fixes, classes: int, chosen: dict[str, Any], seed: int) -> ViT:
    """The ViT with a slow twin for each part that is not fixed."""
    torch.manual_seed(seed)
    width = chosen["width"]["width_256" in fixes]
    return with_twins(ViT(classes, width=width, dropout=chosen["dropout"], **chosen["model"]), fixes)


@dataclass
class Training:
    """A pipeline that is ready to run: what a step and a validation do, given the fixes."""

    fixes: Fixes
    model: nn.Module
    learning_rate: float
    photos: PhotoFiles
    batches: LoadedBatches | HeldBatches

    def __post_init__(self) -> None:
        self.device = next(self.model.parameters()).device
        graphed = "cuda_graph" in self.fixes and self.device.type == "cuda"
        fused = "fused_optimizer" in self.fixes
        options = {"fused": True} if fused else {"foreach": False}
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=self.learning_rate, weight_decay=0.05, capturable=graphed, **options
        )
        self.forward = torch.compile(self.model) if "compile" in self.fixes else self.model
        make = StreamingMetrics if "streaming_metrics" in self.fixes else CollectedMetrics
        self.metrics, self.validation_metrics = make(len(self.photos.classes)), make(len(self.photos.classes))
        self._recorded = loop.RecordedStep(self._update) if graphed else None
        self._start_sums()

    def epoch(self, number: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of an epoch, whose metrics start anew."""
        self._start_sums()
        self.metrics.reset()
        return self.batches.train(number)

    def step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """A training step on a batch (images, labels); its loss, on the device."""
        images, labels = batch
        weights = self._class_weights if "constants_once" in self.fixes else self._count_class_weights()
        if self._recorded is not None:
            loss, logits = self._recorded(images, labels, weights)
            self._add_up(loss, logits, labels)
        else:
            loss, logits = self._update(images, labels, weights, before_backward=self._add_up)
        with record_function("metrics"):
            self.metrics.update(logits, labels)
            if "streaming_metrics" not in self.fixes:
                self.metrics.compute()
        if "keep_memory" not in self.fixes and self.device.type == "cuda":
            torch.cuda.empty_cache()
        return loss

    def validate(self) -> dict[str, float]:
        """Accuracy and F1 over the whole validation split, in the precision of training."""
        self.model.eval()
        self.validation_metrics.reset()
        with torch.inference_mode() if "inference_mode" in self.fixes else contextlib.nullcontext():
            for images, labels in self.batches.validation():
                with self._autocast():
                    logits = self.model(images)
                self.validation_metrics.update(logits, labels)
        self.model.train()
        return self.validation_metrics.compute()

    def sums(self) -> dict[str, float]:
        """The mean loss and accuracy of the epoch's steps so far. Waits for the device."""
        steps = max(self._steps, 1)
        return {"train_loss": float(self._loss) / steps, "train_accuracy": float(self._right) / steps}

    @contextlib.contextmanager
    def settings(self) -> Iterator[None]:
        """The settings of torch that are part of the pipeline, as long as it runs."""
        cudnn, fast = torch.backends.cudnn, "cudnn_benchmark" in self.fixes
        with cudnn.flags(enabled=True, benchmark=fast, deterministic=not fast, allow_tf32=cudnn.allow_tf32):
            yield

    def _update(
        self,
        images: Tensor,
        labels: Tensor,
        weights: Tensor,
        before_backward: Callable[[Tensor, Tensor, Tensor], Any] = lambda *_: None,
    ) -> tuple[Tensor, Tensor]:
        """One update of the weights; loss and logits. All of it can be recorded, if nothing is read before backward."""
        self.optimizer.zero_grad(set_to_none="set_to_none" in self.fixes)
        with record_function("forward"), self._autocast():
            logits = self.forward(images)  # (B, classes)
        with record_function("loss"):
            loss = F.cross_entropy(logits.float(), labels, weights)
        before_backward(loss, logits, labels)
        with record_function("backward"):
            loss.backward()
        with record_function("optimizer"):
            self.optimizer.step()
        return loss.detach(), logits.detach()

    def _add_up(self, loss: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Running loss and accuracy, for a progress bar: read here, or left on the device."""
        with record_function("metrics"):
            right = (logits.detach().argmax(dim=1) == labels).float().mean()
            read = (lambda value: value.detach()) if "no_item" in self.fixes else Tensor.item
            self._loss = self._loss + read(loss)
            self._right = self._right + read(right)
            self._steps += 1

    def _start_sums(self) -> None:
        self._steps, self._loss, self._right = 0, 0.0, 0.0

    def _autocast(self) -> contextlib.AbstractContextManager:
        return torch.autocast(self.device.type, torch.bfloat16, enabled="bf16" in self.fixes)

    def _count_class_weights(self) -> Tensor:
        return class_weights(self.photos.labels, len(self.photos.classes), self.device)

    _class_weights = cached_property(_count_class_weights)
