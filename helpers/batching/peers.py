"""What others use for the same, to compare with: torchtext's BucketIterator and transformers' padding-free collator.

The collator joins the samples of a random batch, so that each batch has another length; our packs have one length,
which one compiled graph serves. Both feed the same model, transformers' Llama. On a GPU its attention is torch's varlen
kernel, FlashAttention-2, for both. Functions here raise ImportError where the peer is missing.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from operator import itemgetter
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

from helpers.lab import device
from helpers.lab.timing import relative_error
from helpers.text import SyntheticText

from .attention import block_mask, causal_attention, packed_attention
from .datasets import StandardDataset
from .documents import documents_attention
from .packed import Packed, PackedLayout
from .sequenced import SequencedDataset
from .steps import Steps, compute_dtype, training_step
from .steps import text as steps_text

Inputs = dict[str, Any]
ATTENTION, SDPA = "varlen", "sdpa"  # ours, registered with transformers, and what transformers has on a CPU
IGNORED = -100  # a label that counts for nothing
COLLATOR, PACKED = "flattening collator", "packs of one length"


def bucket_iterator(lengths: np.ndarray, batch_size: int) -> Callable[[], Iterator[list[tuple[int, int]]]]:
    """torchtext's BucketIterator: a call begins an epoch of batches of (length, index).

    It shuffles all samples when an epoch begins, then sorts 100 batches' worth at a time.
    """
    from torchtext.data import BucketIterator

    pairs = list(zip(lengths.tolist(), range(len(lengths)), strict=True))
    iterator = BucketIterator(pairs, batch_size, sort_key=itemgetter(0), sort_within_batch=True)

    def epoch() -> Iterator[list[tuple[int, int]]]:
        iterator.create_batches()
        return iterator.batches

    return epoch


def packed(variant: str, layout: PackedLayout) -> Callable[..., Tensor]:
    """Our variant; on a CPU `flex` is torch's own, as ours computes it as `dense` does."""
    if variant == "flex" and device().type == "cpu":
        return partial(flex_attention, block_mask=block_mask(layout.documents, "cpu"))
    return packed_attention(layout, variant, device(), compute_dtype())


def per_document(layout: PackedLayout) -> Callable[..., Tensor]:
    """SDPA for each document, written with torch alone."""
    sizes = layout.lengths[layout.lengths > 0].tolist()

    def attend(*inputs: Tensor) -> Tensor:
        parts = zip(*(part.split(sizes, dim=2) for part in inputs), strict=True)
        return torch.cat([F.scaled_dot_product_attention(*part, is_causal=True) for part in parts], dim=2)

    return attend


def nested(layout: PackedLayout) -> Callable[..., Tensor]:
    """SDPA over nested tensors, torch's own type for rows of different lengths."""
    offsets = torch.tensor(layout.offsets, device=device())

    def attend(*inputs: Tensor) -> Tensor:
        q, k, v = (
            torch.nested.nested_tensor_from_jagged(part[0].transpose(0, 1).contiguous(), offsets).transpose(1, 2)
            for part in inputs
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.transpose(1, 2).values().transpose(0, 1)[None]

    return attend


def llama(vocab_size: int, width: int, layers: int, heads: int, attention: str = ATTENTION) -> nn.Module:
    """A Llama of transformers with random weights, the same in each call."""
    from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

    AttentionInterface.register(ATTENTION, _attention)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        attn_implementation=attention,
        use_cache=False,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def llama_steps(width: int, layers: int, batch_size: int, max_length: int, count: int) -> dict[str, Steps]:
    """Training steps of a Llama, eager and compiled, on `count` batches of the collator and on as many packs.

    On a CPU transformers has no FlashAttention: SDPA gets the mask that it makes of the collator's position_ids.
    """
    text = steps_text(24 * batch_size, width)
    dataset = StandardDataset(text, max_length)
    own = ATTENTION if device().type == "cuda" else SDPA

    def model(attention: str) -> nn.Module:
        return llama(len(text.vocab), width, layers, 8, attention).to(device=device(), dtype=compute_dtype())

    joined = list(islice(flattened(dataset, batch_size, 0, flash=own != SDPA), count))
    capacity = max(round(batch_size * float(dataset.lengths.mean())), max_length)
    sequences = SequencedDataset(dataset, None, capacity, strategy="best-fit", fixed=True)
    packs = [as_inputs(packed, max_length) for packed in islice(sequences, count)]
    theirs, ours = model(own), model(ATTENTION)
    fed = {COLLATOR: (theirs, joined), PACKED: (ours, packs)}
    fed[f"{COLLATOR}, compiled"] = (torch.compile(theirs, dynamic=True), joined)
    fed[f"{PACKED}, compiled"] = (torch.compile(ours), packs)
    return {name: _steps(*what) for name, what in fed.items()}


def leak(attention: str) -> float:
    """The relative error of a small Llama's logits for joined samples, against each sample by itself; fp32."""
    dataset = StandardDataset(SyntheticText(8, vocab_size=500), 64)
    model = llama(500, 64, 2, 2, attention).to(device())
    (inputs,) = flattened(dataset, len(dataset), 0, flash=attention == ATTENTION)
    bounds = (inputs["position_ids"][0] == 0).nonzero()[:, 0].tolist()
    with torch.no_grad():
        joined = model(**_on_device(inputs)).logits[0]
        alone = [model(part[None].to(device())).logits[0] for part in inputs["input_ids"][0].tensor_split(bounds[1:])]
    return relative_error(joined, torch.cat(alone))


def _steps(model: nn.Module, batches: list[Inputs]) -> Steps:
    real = float(np.mean([int((inputs["labels"] != IGNORED).sum()) for inputs in batches]))
    there = [_on_device(inputs) for inputs in batches]
    return Steps(training_step(model.parameters(), lambda inputs: model(**inputs).loss), there, real)


def _on_device(inputs: Inputs) -> Inputs:
    return {name: value.to(device()) if isinstance(value, Tensor) else value for name, value in inputs.items()}


def flattened(dataset: StandardDataset, batch_size: int, seed: int, flash: bool) -> Iterator[Inputs]:
    """Random batches as transformers' collator joins them; `flash` adds the offsets that FlashAttention takes."""
    from transformers import DataCollatorWithFlattening

    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=flash)
    order = np.random.default_rng(seed).permutation(len(dataset))
    for begin in range(0, len(order) - batch_size + 1, batch_size):
        yield dict(collate([{"input_ids": dataset[int(i)].tolist()} for i in order[begin : begin + batch_size]]))


def as_inputs(packed: Packed, longest: int) -> Inputs:
    """A packed sequence as the same model takes it. `longest` is a bound, the same for all batches."""
    offsets = torch.from_numpy(packed.layout().offsets.copy())
    labels = packed.tokens.clone()
    labels[packed.positions == 0] = IGNORED  # a document's first token follows from nothing; nor does padding
    return {
        "input_ids": packed.tokens[None],
        "labels": labels[None],
        "position_ids": packed.positions[None],
        "cu_seq_lens_q": offsets,
        "cu_seq_lens_k": offsets,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def _attention(
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scaling: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int = 0,
    **_: Any,
) -> tuple[Tensor, None]:
    """What transformers calls for q, k and v of (1, heads, T, head_dim); the result is (1, T, heads, head_dim)."""
    if cu_seq_lens_q is None:
        return causal_attention(q, k, v).transpose(1, 2), None
    if not q.is_cuda:
        return documents_attention(q, k, v, cu_seq_lens_q, scaling).transpose(1, 2), None
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = (part[0].transpose(0, 1) for part in (q, k, v))  # (T, heads, head_dim)
    bounds = (cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q)
    return varlen_attn(q, k, v, *bounds, scale=scaling, window_size=(-1, 0))[None], None
