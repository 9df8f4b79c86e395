"""Language modelling: a GPT-2-like model that predicts each next token, and its text."""

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..batching import StandardDataset
from ..metrics import LMAccuracy, LMCrossEntropyLoss
from ..models import GPT2LikeModel
from ..text import Samples, SyntheticText, Vocab, WikiText, tokenize
from ..text.vocab import SPECIALS
from .sizes import sizes_of
from .slow_parts import HostAccuracy, SpelledOutLoss, with_slow_gpt_parts
from .switches import NO_FAULTS, Faults
from .task import Batch, Task
from .text_batches import FEEDS, batches_in_order, packed_batches, packed_variant, random_batches

SIZES, SWITCHED_SIZES = sizes_of("language"), sizes_of("switched_language")  # of chapters 1 and 2; of 0 and 3
MULTIPLE = {"cuda": 64, "cpu": 16}  # a pack's length is a multiple of it, for the kernels of chapters 0 and 3


def language_task(
    preset: str, path: Path | None, device: torch.device, seed: int, data: str, dtype: torch.dtype
) -> Task:
    """The language model and its text, with nothing slow on purpose. `dtype` is the one that attention will compute in.

    The model is trained on WikiText's validation split and evaluated on its test split.
    """
    sizes = SIZES[preset]
    counts = sizes["samples"], sizes["validation_samples"], sizes["vocab_size"]
    texts = _cached_texts(path, *counts, sizes.get("limited", False))
    return text_task(sizes, texts, device, seed, data, dtype)


def text_task(
    sizes: dict[str, Any],
    texts: tuple[Samples, Samples],
    device: torch.device,
    seed: int,
    data: str,
    dtype: torch.dtype,
) -> Task:
    """The language model of these sizes, trained on the first text and evaluated on the second."""
    pad_id, batch_size = texts[0].vocab.pad_id, sizes["batch_size"]
    model = build_gpt(sizes, len(texts[0].vocab), pad_id, seed).to(device)
    trained, evaluated = (StandardDataset(text, sizes["max_length"] + 1, pad_id=pad_id) for text in texts)
    batches, steps = FEEDS[data](trained, batch_size, device, dtype, seed)
    return Task(
        source=texts[0].source,
        model=model,
        loss=_ignoring_padding(LMCrossEntropyLoss(pad_id)),
        validation_metric=LMAccuracy(pad_id),
        batches=batches,
        steps=steps,
        validation=batches_in_order(evaluated, batch_size, device),
        learning_rate=sizes["learning_rate"],
        micro_batches=sizes.get("micro_batches", 1),
    )


def switched_language_task(
    sizes: dict[str, Any], path: str | Path | None, device: torch.device, seed: int, dtype: torch.dtype, faults: Faults
) -> Task:
    """The language model and lines of text, with the `faults` of `switches.LANGUAGE`."""
    texts = open_texts(path, sizes["samples"], sizes["validation_samples"], sizes["vocab_size"])
    if sizes["words"]:
        texts = frequent_words(texts, sizes["words"])
    pad_id, longest, batch_size = texts[0].vocab.pad_id, sizes["max_length"] + 1, sizes["batch_size"]
    lines: list[Any] = [Lines(text) for text in texts]
    began = time.perf_counter()
    if not faults.text_split_again:
        lines = [list(split) for split in lines]
    prepare_s = 0.0 if faults.text_split_again else time.perf_counter() - began
    words = len(texts[0].vocab) if faults.odd_vocabulary else -(-len(texts[0].vocab) // 64) * 64
    model = with_slow_gpt_parts(build_gpt(sizes, words, pad_id, seed, faults), faults).to(device)
    loading = {"workers": 0 if faults.no_workers else sizes["workers"], "pinned": not faults.pageable_batches}
    loading["materialised"] = faults.materialised_attention
    trained, evaluated = (StandardDataset(split, longest, pad_id=pad_id) for split in lines)
    to_maximum = faults.padded_to_maximum
    if faults.unpacked:
        batches, steps = random_batches(trained, batch_size, device, dtype, seed, to_maximum, **loading)
    else:
        # A GPU's FlashAttention needs 16-bit types and heads of a multiple of 8 channels; a dense mask works with any.
        shape = sizes["shape"][not faults.odd_width]
        flash = dtype != torch.float32 and shape["d_model"] // shape["num_heads"] % 8 == 0
        variant = packed_variant(device, dtype) if flash or device.type == "cpu" else "dense"
        packing = {"multiple": MULTIPLE[device.type], "strategy": sizes["strategy"]}
        batches, steps = packed_batches(trained, batch_size, device, dtype, seed, variant, **packing, **loading)
    metric = HostAccuracy if faults.accuracy_on_host else LMAccuracy
    return Task(
        source=texts[0].source,
        model=model,
        loss=_ignoring_padding(SpelledOutLoss(pad_id) if faults.loss_spelled_out else LMCrossEntropyLoss(pad_id)),
        metric=metric(pad_id),
        validation_metric=metric(pad_id),
        batches=batches,
        steps=steps,
        validation=batches_in_order(evaluated, batch_size, device, to_maximum, **loading),
        learning_rate=sizes["learning_rate"],
        weight_decay=0.1,
        prepare_s=prepare_s,
    )


def guess_scores(task: Task) -> dict[str, float]:
    """The accuracy of always guessing validation's most frequent token, and the loss of its tokens' frequencies."""
    targets = torch.cat([batch.targets.flatten().cpu() for batch in task.validation()])
    counts = torch.bincount(targets[targets != task.validation_metric.pad_id])
    shares = counts[counts > 0].double() / counts.sum()
    return {"guess_accuracy": float(shares.max()), "guess_loss": float(-(shares * shares.log()).sum())}


def build_gpt(sizes: dict[str, Any], words: int, pad_id: int, seed: int, faults: Faults = NO_FAULTS) -> GPT2LikeModel:
    """The model of these sizes; its weights follow from the seed."""
    torch.manual_seed(seed)
    return GPT2LikeModel(
        words,
        **sizes["shape"][not faults.odd_width],
        num_layers=sizes["layers"],
        max_length=sizes["max_length"] + 1,  # a packed sample keeps its last token, which has no target
        dropout=sizes["dropout"],
        attention_dropout=0.0,  # kernels for packed samples have none
        pad_id=pad_id,
        tied=sizes["tied"],
    )


# Text


def open_texts(
    path: str | Path | None, samples: int, validation_samples: int, vocab_size: int, limited: bool = True
) -> tuple[Samples, Samples]:
    """Training and validation text: generated without a `path`, else WikiText's validation and test split.

    `vocab_size` is that of generated text; WikiText's is that of its training text. If `limited`, the numbers of
    samples limit what is taken of WikiText, too.
    """
    if path is None:
        return SyntheticText(samples, 0, vocab_size), SyntheticText(validation_samples, 1, vocab_size)
    limits = (samples, validation_samples) if limited else (None, None)
    train = WikiText("validation", path, max_samples=limits[0])
    return train, WikiText("test", path, vocab=train.vocab, max_samples=limits[1])


# Kept for the next run: making text takes longer than a small run.
_cached_texts = functools.lru_cache(maxsize=1)(open_texts)


def frequent_words(texts: tuple[Samples, Samples], words: int) -> tuple[Samples, Samples]:
    """Both texts without the words that are not among the first one's `words` most frequent, nor samples that are then
    shorter than two words.

    Kept as one token `<unk>`, they would be the most frequent token by far, and predicting it the best guess.
    """
    tokens = texts[0].vocab.tokens[len(SPECIALS) : words + len(SPECIALS)]
    vocab = Vocab({token: len(tokens) - rank for rank, token in enumerate(tokens)})
    source = f"{{}}, its {words:,} most frequent words"
    short = []
    for text in texts:
        frequent = [sample[(sample != vocab.unk_id) & (sample < len(vocab))] for sample in text]
        frequent = [sample for sample in frequent if len(sample) > 1]
        offsets = np.cumsum([0, *map(len, frequent)])
        short.append(Samples(np.concatenate(frequent), offsets, vocab, source.format(text.source)))
    return short[0], short[1]


class Lines:
    """Samples as lines of text: each access splits the line and looks up its words, 0.7 µs a token."""

    def __init__(self, samples: Samples) -> None:
        self.vocab: Vocab = samples.vocab
        self.lengths = samples.lengths
        self.lines = [" ".join(self.vocab.decode(sample)) for sample in samples]
        tokenize("")  # a missing package is an error here, in one line, rather than a traceback from a worker

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.vocab.encode(tokenize(self.lines[index]))


def _ignoring_padding(loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Batch], Tensor]:
    return lambda logits, batch: loss(logits, batch.targets)
