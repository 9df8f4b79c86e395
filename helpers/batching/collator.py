"""The peer of packed training: transformers' padding-free collator, feeding its own model. Needs transformers.

The model is transformers' Llama with FlashAttention for documents of different lengths, torch's own kernel, which is
FlashAttention-2. Only how it is fed differs: the collator joins the samples of a random batch, so that each batch has
another length; ours are packs of one length, which one compiled graph serves.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .attention import HALVES, packed_attention
from .datasets import StandardDataset
from .documents import Packed
from .packed_layout import PackedLayout

Inputs = dict[str, Any]
ATTENTION = "torch-varlen"
IGNORED = -100  # a label that counts for nothing


def llama(vocab_size: int, width: int, layers: int, heads: int) -> nn.Module:
    """A Llama of transformers, random weights. ImportError where transformers isn't installed."""
    from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

    AttentionInterface.register(ATTENTION, _attention)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        attn_implementation=ATTENTION,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def flattened(dataset: StandardDataset, batch_size: int, seed: int) -> Iterator[Inputs]:
    """Random batches as transformers' collator joins them."""
    from transformers import DataCollatorWithFlattening

    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    order = np.random.default_rng(seed).permutation(len(dataset))
    for begin in range(0, len(order) - batch_size + 1, batch_size):
        yield dict(collate([{"input_ids": dataset[int(i)].tolist()} for i in order[begin : begin + batch_size]]))


def as_inputs(packed: Packed, longest: int) -> Inputs:
    """A packed sequence as the same model takes it. `longest` is a bound, the same for all batches."""
    offsets = torch.from_numpy(packed.layout().offsets.copy())
    labels = packed.tokens.clone()
    labels[packed.positions == 0] = IGNORED  # a document's first token follows from nothing; nor does padding
    lengths = {"max_length_q": longest, "max_length_k": longest}
    return {
        "input_ids": packed.tokens[None],
        "labels": labels[None],
        "position_ids": packed.positions[None],
        "cu_seq_lens_q": offsets,
        "cu_seq_lens_k": offsets,
    } | lengths


def trainer(model: nn.Module) -> Callable[[Inputs], Tensor]:
    """A step of training: forward, backward and AdamW. Returns the loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)

    def step(inputs: Inputs) -> Tensor:
        loss = model(**inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


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
    if q.dtype not in HALVES or not q.is_cuda:  # so that the same code can be tried without a GPU
        out = packed_attention(PackedLayout(cu_seq_lens_q), "dense", q.device)(q, k, v)
        return out.transpose(1, 2), None
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = (part[0].transpose(0, 1) for part in (q, k, v))  # (T, heads, head_dim)
    bounds = (cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q)
    return varlen_attn(q, k, v, *bounds, scale=scaling, window_size=(-1, 0))[None], None
