"""Training a GPT-2-like language model, slowly on purpose; any subset of the fixes can be run.

    from helpers.profiling.gpt_pipeline import FIXED, run
    slow, fast = run(frozenset()), run(FIXED)

`SWITCHES` says what each fix is. Those that are "speed only" leave the loss and every gradient as they are, but for
rounding, if `dropout` is 0 (else the kernels draw other masks from the same distribution). The weights at the start and
the order of samples follow from the seed alone, whatever is fixed.

A CUDA graph, as the ViT's last step, is none of the fixes: each pack holds another number of documents.
"""

import contextlib
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from helpers.amp import DynamicGradScaler
from helpers.batching.attention import causal_attention, packed_attention, without_cudnn_attention
from helpers.lab import device
from helpers.lab.arguments import check_positive
from helpers.metrics import LMAccuracy, LMCrossEntropyLoss
from helpers.models import GPT2LikeModel
from helpers.pictures import cores
from helpers.tasks.language import packed_way

from . import loop, switches
from .gpt_data import Batch, Feed, Loader, open_texts
from .gpt_slow import HostAccuracy, SpelledOutLoss, hidden_keys, materialised_attention, with_twins
from .gpt_switches import SWITCHES
from .switches import Fixes

FIXED = switches.fixed(SWITCHES)  # all that was slow on purpose
ALL = frozenset(switch.name for switch in SWITCHES)  # and what can be done beyond that

# Presets as plain data; `small` is for tests, `reduced` is what a CPU trains in a minute. `vocab_size` is of made-up
# text; of WikiText, `samples` and `validation_samples` are the most that are taken. `full` takes some 50 GiB while
# nothing is fixed.
PRESETS: dict[str, dict[str, Any]] = {
    "small": {
        "samples": 24,
        "validation_samples": 8,
        "vocab_size": 499,
        "shape": ({"d_model": 30, "num_heads": 2}, {"d_model": 32, "num_heads": 2}),  # slow, fixed
        "layers": 2,
        "max_length": 192,
        "dropout": 0.1,
        "batch_size": 4,
        "workers": 1,
        "learning_rate": 3e-3,
    },
    "reduced": {
        "samples": 256,
        "validation_samples": 64,
        "vocab_size": 4000,
        "shape": ({"d_model": 255, "num_heads": 5}, {"d_model": 256, "num_heads": 4}),
        "layers": 2,
        "max_length": 256,
        "dropout": 0.1,
        "batch_size": 16,
        "workers": 1,
        "learning_rate": 1e-3,
    },
    "full": {
        "samples": 4096,
        "validation_samples": 1024,
        "vocab_size": 24_725,
        "shape": ({"d_model": 1023, "num_heads": 11}, {"d_model": 1024, "num_heads": 16}),
        "layers": 6,
        "max_length": 640,
        "dropout": 0.1,
        "batch_size": 48,
        "workers": 4,
        "learning_rate": 3e-4,
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

    `path` is WikiText-103's folder; without it the text is made up. `changes` replace values of the preset. `steps`,
    `on_step` and `profile`, and what the times mean: see `loop.train`. `real_tokens_per_s` counts what was predicted,
    not the padding, whose share of the last epoch's positions is `padding_share`. `prepare_s` is what was spent once,
    before the first epoch, to tokenise. Validation is over the whole of its split, the loss in nats a token.
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
    counted, mean_ms = training.counts, found["iteration_mean_ms"]
    real_a_step = counted.real / max(counted.steps, 1)
    return {
        "preset": preset,
        "source": training.source,
        **found,
        "real_tokens_per_s": None if mean_ms is None else real_a_step / mean_ms * 1e3,
        "padding_share": 1 - counted.real / max(counted.positions, 1),
        "prepare_s": training.batches.prepare_s,
        "train_loss": float(training.loss_sum) / max(counted.steps, 1),
        "train_accuracy": training.accuracy.compute(),
    }


def prepare(
    fixes: Iterable[str] = FIXED,
    *,
    preset: str = "small",
    path: str | Path | None = None,
    seed: int = 0,
    fp16: bool = False,
    **changes: Any,
) -> "Training":
    """Model, optimizer and batches of a set of fixes, before the first step; `fp16` is mixed precision."""
    fixes = switches.check_fixes(fixes, SWITCHES)
    chosen = switches.choose(PRESETS, preset, changes)
    train, validation = open_texts(path, *(chosen[name] for name in ("samples", "validation_samples", "vocab_size")))
    feed = Feed(
        batch_size=chosen["batch_size"],
        max_length=chosen["max_length"] + 1,
        workers=min(chosen["workers"], cores()),
        seed=seed,
        device=device(),
    )
    model = build_model(fixes, len(train.vocab), train.vocab.pad_id, chosen, seed).to(device())
    mixed = {"half": torch.float16, "scaler": DynamicGradScaler()} if fp16 else {}
    return Training(
        fixes, model, chosen["learning_rate"], train.source, Loader(fixes, train, validation, feed), **mixed
    )


def build_model(fixes: Fixes, words: int, pad_id: int, chosen: dict[str, Any], seed: int) -> GPT2LikeModel:
    """The model with a slow twin for each part that is not fixed."""
    torch.manual_seed(seed)
    model = GPT2LikeModel(
        -(-words // 64) * 64 if "vocabulary_64" in fixes else words,
        **chosen["shape"]["width_1024" in fixes],
        num_layers=chosen["layers"],
        max_length=chosen["max_length"] + 1,  # a packed sample keeps its last token, which has no target
        dropout=chosen["dropout"],
        attention_dropout=0.0,  # kernels for packed samples have none
        pad_id=pad_id,
    )
    return with_twins(model, fixes)


@dataclass
class Counts:
    """What the steps of an epoch so far consisted of, known to the host."""

    steps: int = 0
    real: int = 0  # tokens that were predicted
    positions: int = 0  # and with the padding


@dataclass
class Training:
    """A pipeline that is ready to run: what a step and a validation do, given the fixes.

    `half` is the type of autocast, bf16 or none by the fixes; fp16 wants a `scaler`.
    """

    fixes: Fixes
    model: GPT2LikeModel
    learning_rate: float
    source: str
    batches: Loader
    half: torch.dtype | None = None
    scaler: DynamicGradScaler | None = None

    def __post_init__(self) -> None:
        self.half = torch.bfloat16 if "bf16" in self.fixes else self.half
        self.device = next(self.model.parameters()).device
        options = {"fused": True} if "fused_optimizer" in self.fixes else {"foreach": False}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.learning_rate, weight_decay=0.1, **options)
        self.forward = torch.compile(self.model) if "compile" in self.fixes else self.model
        pad_id = self.model.pad_id
        self.loss = LMCrossEntropyLoss(pad_id) if "fused_loss" in self.fixes else SpelledOutLoss(pad_id)
        make = LMAccuracy if "streaming_accuracy" in self.fixes else HostAccuracy
        self.accuracy, self.validation_accuracy = make(pad_id), make(pad_id)
        self._start_sums()

    def epoch(self, number: int) -> Iterator[Batch]:
        """The batches of an epoch, whose sums start anew."""
        self._start_sums()
        return self.batches.train(number)

    def step(self, batch: Batch) -> Tensor:
        """A training step on a batch; its loss, on the device."""
        self.optimizer.zero_grad(set_to_none="set_to_none" in self.fixes)
        with record_function("forward"):
            logits = self._logits(self.forward, batch)  # (B, T, V)
        with record_function("loss"):
            loss = self.loss(logits, batch.targets)
        with record_function("metrics"):
            self.loss_sum = self.loss_sum + (loss.detach() if "no_item" in self.fixes else loss.item())
        with record_function("backward"):
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        with record_function("optimizer"):
            self._update()
        with record_function("metrics"):
            self.accuracy.update(logits.detach(), batch.targets)
            self.counts.steps += 1
            self.counts.real += batch.real
            self.counts.positions += batch.tokens.numel()
        return loss.detach()

    def _update(self) -> None:
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def validate(self) -> dict[str, float]:
        """Loss and accuracy over the whole validation split, in the precision of training."""
        self.model.eval()
        self.validation_accuracy.reset()
        total, real = 0.0, 0
        with torch.inference_mode() if "inference_mode" in self.fixes else contextlib.nullcontext():
            for batch in self.batches.validation():
                total = total + self._judge(batch) * batch.real
                real += batch.real
        self.model.train()
        return {"loss": float(total) / max(real, 1), "accuracy": self.validation_accuracy.compute()}

    def _judge(self, batch: Batch) -> Tensor:
        """The loss of a validation batch. If there is a graph it ends here, or two would be held at once."""
        logits = self._logits(self.model, batch)
        self.validation_accuracy.update(logits.detach(), batch.targets)
        return self.loss(logits, batch.targets).detach()

    @contextlib.contextmanager
    def settings(self) -> Iterator[None]:
        """The settings of torch that are part of the pipeline, as long as it runs."""
        before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        with _cublas_workspace(), without_cudnn_attention(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*deterministic")  # of what has no such algorithm
            torch.use_deterministic_algorithms("any_algorithm" not in self.fixes, warn_only=True)
            try:
                yield
            finally:
                torch.use_deterministic_algorithms(before[0], warn_only=before[1])

    def _logits(self, model: Callable[..., Tensor] | nn.Module, batch: Batch) -> Tensor:
        with torch.autocast(self.device.type, self.half or torch.bfloat16, enabled=self.half is not None):
            return model(batch.tokens, batch.positions, attend=self._attention(batch))

    def _attention(self, batch: Batch) -> Callable[..., Tensor]:
        """What the model calls for attention in this batch."""
        if "fused_attention" not in self.fixes:
            return materialised_attention(hidden_keys(batch.tokens, batch.positions))
        if batch.layout is None:
            return causal_attention
        # FlashAttention's kernel takes halves and heads of a multiple of 8; a mask of all pairs goes with anything.
        fits = self.half is not None and self.model.embedding.embedding_dim // self.model.num_heads % 8 == 0
        return packed_attention(batch.layout, packed_way(self.device, self.half) if fits else "dense", self.device)

    def _start_sums(self) -> None:
        self.counts, self.loss_sum = Counts(), 0.0
        self.accuracy.reset()


@contextlib.contextmanager
def _cublas_workspace(name: str = "CUBLAS_WORKSPACE_CONFIG", size: str = ":4096:8") -> Iterator[None]:
    """The variable without which torch calls no product deterministic, if it isn't set."""
    unset = name not in os.environ
    if unset:
        os.environ[name] = size
    try:
        yield
    finally:
        if unset:
            os.environ.pop(name, None)
