"""A small Llama with weights that follow from a formula, so that fixed logits of it can be compared with."""

import itertools
import zlib

import numpy as np
import torch
from torch import Tensor

from helpers.models.llama import RopeScaling
from helpers.rush import Setup, build_trainer
from helpers.rush.measurement import fixed_tokens

# Waves of 6, 20, 63 and 199 positions: the scaling leaves the first as it is, slows the last, and blends between.
SIZE = {
    "vocab_size": 19,
    "width": 32,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "feedforward_size": 48,
    "max_length": 128,
    "theta": 100.0,
    "scaling": RopeScaling(factor=8.0, original_length=64),
}
TOKENS = [[(7 * i * i + 3 * i + 5) % 19 for i in range(40)]]


def loss_curve(setup: Setup, steps: int) -> list[float]:
    """The loss of each step on the fixed tokens, from the setup's seed."""
    trainer = build_trainer(setup)
    return [float(trainer.step(tokens)) for tokens in itertools.islice(fixed_tokens(setup), steps)]


def numbers(name: str, shape: tuple[int, ...]) -> Tensor:
    """Numbers between -0.5 and 0.5, scattered, the same for a name and a shape whatever the version of anything.

    Those of a norm are between 0.5 and 1.5.
    """
    index = np.arange(int(np.prod(shape)), dtype=np.uint64) + np.uint64(zlib.crc32(name.encode()))
    mixed = index * np.uint64(0x9E3779B97F4A7C15)  # then SplitMix64's mixing
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    uniform = (mixed >> np.uint64(40)).astype(np.float64) / 2**24 - 0.5
    values = uniform + 1 if len(shape) == 1 else uniform
    return torch.from_numpy(values.reshape(shape)).float()
