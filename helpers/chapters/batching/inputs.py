"""What chapter 2 measures on: WikiText's lengths, a text, and a model of it."""

import functools
from pathlib import Path

import numpy as np
import torch
from torch import nn

from ...lab import device, half_dtype
from ...models import GPT2LikeModel
from ...text import Samples, SyntheticText, WikiText, local_wikitext
from ...text.synthetic import SIZE, draw_lengths

MAX_LENGTH = 640  # the task's
WIKITEXT_SAMPLES = 2461  # in its validation split


def compute_dtype() -> torch.dtype:
    """A GPU's 16-bit type; bf16 on a CPU that multiplies it, where it is faster; else fp32."""
    if device().type == "cuda":
        return half_dtype()
    multiplies = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if multiplies else torch.float32


def dtype_name() -> str:
    return str(compute_dtype()).removeprefix("torch.")


def wikitext_of(samples: int) -> Path | None:
    """WikiText's folder, where it is on the machine and its validation split has so many samples."""
    return local_wikitext() if samples <= WIKITEXT_SAMPLES else None


@functools.lru_cache(maxsize=1)
def text(samples: int, width: int) -> Samples:
    """The text that is batched, the last one kept: WikiText's validation split where that is on the machine and has so
    many samples, else text with its lengths. A small model gets a small vocabulary, 8 words for each of its width."""
    words = min(8 * width, SIZE)
    if path := wikitext_of(samples):
        return WikiText("validation", path, max_size=words, max_samples=samples)
    return SyntheticText(samples, seed=0, vocab_size=words)


def language_model(text: Samples, width: int, layers: int, head: bool = True) -> GPT2LikeModel:
    """A model of the text on the device. `head=False` leaves out the product with the vocabulary, as the task does."""
    shape = {"d_model": width, "num_heads": min(8, width // 8), "num_layers": layers, "max_length": MAX_LENGTH + 1}
    model = GPT2LikeModel(len(text.vocab), **shape, dropout=0.0)
    if not head:
        model.head = nn.Identity()
    return model.to(device=device(), dtype=compute_dtype())


def wikitext_lengths(samples: int) -> np.ndarray:
    """Lengths as WikiText's samples have them, cut to `MAX_LENGTH`."""
    return np.minimum(draw_lengths(samples, seed=0), MAX_LENGTH)


def packed_offsets(tokens: int) -> np.ndarray:
    """Where documents of WikiText's lengths begin that fill `tokens`; the last one is cut."""
    ends = np.cumsum(wikitext_lengths(tokens))
    return np.concatenate([[0], ends[ends < tokens], [tokens]])
