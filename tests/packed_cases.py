"""Packed documents for tests, and what each of them gives alone."""

import numpy as np
import torch
import torch.nn.functional as F
from hypothesis import strategies as st

from helpers.batching import PackedLayout

VOCABULARY = 50
MAX_LENGTH = 20  # of a sequence
LENGTH_LISTS = st.one_of(
    st.lists(st.integers(0, MAX_LENGTH), min_size=1, max_size=60),
    st.builds(lambda length, count: [length] * count, st.integers(0, MAX_LENGTH), st.integers(1, 40)),
    st.lists(st.integers(0, 10).map(lambda halvings: MAX_LENGTH >> halvings), min_size=1, max_size=60),  # heavy tail
)


def layout_of(lengths):
    return PackedLayout(np.cumsum([0, *lengths]))


def one_by_one(q, k, v, lengths):
    """The reference for attention: each document alone through torch's causal attention."""
    parts = [
        F.scaled_dot_product_attention(*part, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        for part in zip(*(x.split(list(lengths), dim=2) for x in (q, k, v)), strict=True)
        if part[0].shape[2]
    ]
    return torch.cat(parts, dim=2)


def documents(lengths):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, VOCABULARY, (length,), generator=generator) for length in lengths]


def shifted(document):
    """What is to be predicted after each token; 0, which the loss ignores, after the last."""
    return F.pad(document[1:], (0, min(len(document), 1)))


def packed(texts, padding=0):
    """Tokens, targets (1, T), positions (T,) and the layout; the padding is a document of zeros at the end."""
    texts = texts + [torch.zeros(padding, dtype=torch.long)] * (padding > 0)
    layout = layout_of(map(len, texts))
    targets = torch.cat([shifted(text) for text in texts])
    return torch.cat(texts)[None], targets[None], torch.from_numpy(layout.positions), layout


def summed_loss(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=0, reduction="sum")


def gradients(network, loss):
    return dict(zip(dict(network.named_parameters()), torch.autograd.grad(loss, network.parameters()), strict=True))


def alone(network, texts):
    """Loss and gradients, added up over the documents, of which each is run by itself on the model's usual path."""
    loss = sum(summed_loss(network(text[None]), shifted(text)[None]) for text in texts)
    return loss, gradients(network, loss)
