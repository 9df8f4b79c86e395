"""`SyntheticText`: text for when there is none, with WikiText's lengths and frequencies and something to learn."""

import functools

import numpy as np

from .files import TextError, at_least
from .language import WORDS_AT_MOST, language, random_bits, spell, write
from .samples import Samples
from .vocab import SPECIALS, Vocab

# How many of WikiText's 5,352 lines (validation and test) have at most so many tokens.
LENGTHS = (
    (0, 0), (1, 37), (2, 128), (3, 162), (4, 252), (5, 618), (6, 800), (7, 1075), (8, 1297), (9, 1429), (10, 1561),
    (11, 1647), (12, 1717), (16, 1832), (24, 1941), (32, 2042), (40, 2160), (48, 2274), (56, 2397), (64, 2542),
    (72, 2690), (80, 2854), (96, 3178), (112, 3536), (128, 3871), (144, 4127), (160, 4381), (192, 4751), (224, 5037),
    (256, 5179), (320, 5301), (384, 5342), (478, 5352),
)  # fmt: skip
TEXT, LENGTH = 0, 1  # the two random streams of a seed
SIZE = 24_728  # WikiText's 24,725 words (validation and test) and the specials: a multiple of 8


class SyntheticText(Samples):
    """Made-up samples, the same for the same seed on every machine: nothing is downloaded, nothing read.

    Lengths are drawn from WikiText's: median 71, mean 85, 29% of ten tokens or fewer, longest 478; longer ones than
    `max_length` are cut. Word frequencies fall as rank**-0.97. Other seeds are other texts in the same language, so one
    can train on seed 0 and validate on seed 1. More samples continue the same text. 100,000 samples, 8.5 million
    tokens, take about two seconds and, while being made, 300 MB.

    What there is to learn, in nats a token at the default `vocab_size` (which counts the three specials): knowing the
    frequencies gives 7.44; a smoothed bigram model made from 10,000 samples 5.7, the best possible one 4.64; knowing
    the language and all words before 4.52.
    """

    def __init__(self, samples: int = 10_000, seed: int = 0, vocab_size: int = SIZE, max_length: int | None = None):
        at_least("samples", samples, 1)
        at_least("seed", seed, 0)
        at_least("vocab_size", vocab_size, len(SPECIALS) + 1)
        if vocab_size > WORDS_AT_MOST:
            raise TextError(f"vocab_size is {vocab_size}; synthetic text has at most {WORDS_AT_MOST}")
        lengths = draw_lengths(samples, seed)
        if max_length is not None:
            lengths = np.minimum(lengths, at_least("max_length", max_length, 1))
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        ids = write(vocab_size - len(SPECIALS), offsets, seed, TEXT)
        ids += len(SPECIALS)
        super().__init__(ids, offsets, _vocab(vocab_size), f"synthetic text, seed {seed}")

    @property
    def unigram_entropy(self) -> float:
        """Nats a token that remain when only the words' frequencies are known: where a model's loss starts."""
        share = language(len(self.vocab) - len(SPECIALS)).frequencies
        return float(-(share * np.log(share)).sum())


def draw_lengths(samples: int, seed: int) -> np.ndarray:
    """Lengths of samples, as WikiText's lines have them: one of the ranges of `LENGTHS`, then any length in it."""
    ends, counts = np.array(LENGTHS).T
    bits = random_bits(samples, seed, LENGTH)
    drawn = (bits >> np.uint64(32)).astype(np.int64) % counts[-1]
    band = np.searchsorted(counts, drawn, side="right")
    width = (ends[band] - ends[band - 1]).astype(np.uint64)
    within = ((bits & np.uint64(2**32 - 1)) * width) >> np.uint64(32)
    return ends[band - 1] + 1 + within.astype(np.int64)


@functools.lru_cache(maxsize=4)
def _vocab(size: int) -> Vocab:
    words = size - len(SPECIALS)
    return Vocab({spell(number): words - number for number in range(words)})
