"""Batches of texts of different lengths, from padding everything to padding nothing.

BaseDataset            BRAIN               each sample padded to max_length
StandardDataset        BIG BRAIN           each batch padded to its longest, by `collate_fn`
BalancedBatchSampler   ULTRA DUPER         batches of nearly one length
SequencedDataset       packed              one long sequence, documents one after another, no padding
pack                                       which samples share a sequence: greedy, first-fit, best-fit
packed_attention                           attention over such a sequence that keeps its documents apart
"""

from .attention import packed_attention
from .datasets import BaseDataset, StandardDataset, collate_fn
from .packed import PackedLayout
from .packing import pack
from .sampler import BalancedBatchSampler
from .sequenced import SequencedDataset

BrainDataset, BigBrainDataset, UltraDuperBigBrainDataset = BaseDataset, StandardDataset, StandardDataset
UltraDuperBigBrainBatchSampler = BalancedBatchSampler

__all__ = [
    "BalancedBatchSampler",
    "BaseDataset",
    "BigBrainDataset",
    "BrainDataset",
    "PackedLayout",
    "SequencedDataset",
    "StandardDataset",
    "UltraDuperBigBrainBatchSampler",
    "UltraDuperBigBrainDataset",
    "collate_fn",
    "pack",
    "packed_attention",
]
