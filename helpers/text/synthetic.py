"""`SyntheticText`: generated text with WikiText's lengths and word frequencies, and with structure to learn.

The text is a random walk on a circle of 2**20 cells, each of which belongs to a word. Word number r owns a share of the
cells that falls as r**-0.97, laid out in a fixed random order. The circle is divided into 16 equal parts of 16 equal
arcs each. From one word to the next, the walk moves to the next part: to the arc that one of four fixed
permutations gives (with probabilities 1/2, 1/4, 1/8, 1/8), and to a random cell of it. With probability 1/8 it moves
anywhere instead. Permutations keep all arcs equally likely, so word frequencies are the same everywhere in a sample.

A frequent word covers many arcs and so says little about the next word; the words before it say more. Hence a bigram
model beats a unigram model, and a model with a longer context beats both.

The same seed gives the same text on any platform and with any numpy: all operations are exact (integers, square roots,
division and a running sum), on the raw output of PCG64, whose stream numpy guarantees.
"""

import functools
from dataclasses import dataclass

import numpy as np

from ..lab.arguments import check_at_least
from .samples import Samples
from .vocab import SPECIALS, TextError, Vocab

# (n, lines): how many of WikiText's 5,352 lines (validation and test) have at most n tokens.
LENGTHS = (
    (0, 0), (1, 37), (2, 128), (3, 162), (4, 252), (5, 618), (6, 800), (7, 1075), (8, 1297), (9, 1429), (10, 1561),
    (11, 1647), (12, 1717), (16, 1832), (24, 1941), (32, 2042), (40, 2160), (48, 2274), (56, 2397), (64, 2542),
    (72, 2690), (80, 2854), (96, 3178), (112, 3536), (128, 3871), (144, 4127), (160, 4381), (192, 4751), (224, 5037),
    (256, 5179), (320, 5301), (384, 5342), (478, 5352),
)  # fmt: skip
TEXT, LENGTH = 0, 1  # the two random streams of a seed
SIZE = 24_728  # WikiText's 24,725 words (validation and test) and the specials: a multiple of 8

CELLS, PARTS, ARCS, MOVES = 2**20, 16, 2**8, 4
WORDS_AT_MOST = 2**16  # with more, the rarest words would own no cell
ANY_ARC = MOVES
# The move for a number from 0 to 63: 8 of 64 go anywhere; of the others 1/2, 1/4, 1/8 and 1/8 take each permutation.
CHOICES = np.repeat(np.arange(MOVES + 1, dtype=np.uint8), [28, 14, 7, 7, 8])
GRAMMAR = 20_160_926  # the seed of the language, the same for all texts


class SyntheticText(Samples):
    """Generated samples, the same for the same seed on every machine; nothing is downloaded or read.

    Lengths are distributed as WikiText's (median 71, mean 85, 29% of ten tokens or fewer, at most 478). Word
    frequencies fall as rank**-0.97. Other seeds are other texts in the same language: train on seed 0 and validate on
    seed 1. More samples extend the same text. 100,000 samples, 8.5 million tokens, take about two seconds and 300 MB.

    The loss in nats a token, at the default `vocab_size` (which counts the three specials): 7.44 from frequencies
    alone, 5.7 with a smoothed bigram model of 10,000 samples, 4.64 with the best possible bigram model, and 4.52 with
    knowledge of the language and all words before.
    """

    def __init__(self, samples: int = 10_000, seed: int = 0, vocab_size: int = SIZE):
        check_at_least(1, samples=samples)
        check_at_least(0, seed=seed)
        check_at_least(len(SPECIALS) + 1, vocab_size=vocab_size)
        if vocab_size > WORDS_AT_MOST:
            raise TextError(f"vocab_size is {vocab_size}; synthetic text has at most {WORDS_AT_MOST}")
        offsets = np.concatenate([[0], np.cumsum(draw_lengths(samples, seed))])
        ids = write(vocab_size - len(SPECIALS), offsets, seed, TEXT)
        ids += len(SPECIALS)
        super().__init__(ids, offsets, _vocab(vocab_size), f"synthetic text, seed {seed}")


def draw_lengths(samples: int, seed: int) -> np.ndarray:
    """Random lengths (samples,), distributed as WikiText's: a range of `LENGTHS`, then uniform within it."""
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


@dataclass(frozen=True)
class Language:
    cells: np.ndarray  # (CELLS,) the word that owns each cell
    moves: np.ndarray  # (MOVES, ARCS) the next arc, by move and arc


@functools.lru_cache(maxsize=4)
def language(words: int) -> Language:
    """The language with `words` words. 4 MiB, made in about 10 ms."""
    layout = np.argsort(random_bits(words, GRAMMAR, 0), kind="stable")
    share = np.cumsum(_shares(words)[layout])
    ends = np.floor(share * (CELLS / share[-1])).astype(np.int64)
    ends[-1] = CELLS
    cells = np.repeat(layout.astype(np.int32), np.diff(ends, prepend=0))
    within = np.argsort(random_bits(MOVES * ARCS, GRAMMAR, 1).reshape(MOVES, PARTS, -1), kind="stable")
    onward = (np.arange(PARTS)[:, None] + 1) % PARTS * (ARCS // PARTS) + within  # (MOVES, PARTS, arcs of a part)
    return Language(cells, onward.reshape(MOVES, ARCS).astype(np.uint8))


def random_bits(count: int, *seed: int) -> np.ndarray:
    """(count,) random uint64."""
    return np.random.PCG64(np.random.SeedSequence(seed)).random_raw(count)


def write(words: int, offsets: np.ndarray, *seed: int) -> np.ndarray:
    """Word ids of a text whose samples begin at `offsets`; about 0.1 µs a word.

    Word i follows from random number i and the words before it in its sample, so a longer text begins with the shorter
    one.
    """
    bits = random_bits(int(offsets[-1]), *seed)
    move = CHOICES[(bits >> np.uint64(58)).astype(np.intp)]
    move[offsets[:-1]] = ANY_ARC  # a sample begins anywhere
    arcs = (bits >> np.uint64(32)).astype(np.uint8)  # the arcs of ANY_ARC; the other moves overwrite theirs
    spoken = language(words)
    _walk(arcs, move, offsets, spoken.moves)
    width = CELLS // ARCS
    return spoken.cells[arcs.astype(np.intp) * width + (bits & np.uint64(width - 1)).astype(np.intp)]


def _walk(arcs: np.ndarray, move: np.ndarray, offsets: np.ndarray, moves: np.ndarray) -> None:
    """Fill in the arcs position by position, for all samples at once."""
    lengths = np.diff(offsets)
    longest_first = np.argsort(-lengths, kind="stable")
    starts, falling = offsets[:-1][longest_first], -lengths[longest_first]
    for position in range(1, int(lengths.max())):
        words = starts[: np.searchsorted(falling, -position)] + position  # of the samples that are longer
        bound = words[move[words] != ANY_ARC]
        arcs[bound] = moves[move[bound], arcs[bound - 1]]


def _shares(words: int) -> np.ndarray:
    """r ** -(31/32) for r = 1, 2, …, by square roots, which are rounded the same everywhere (powers are not)."""
    rank = np.arange(1, words + 1, dtype=np.float64)
    root = rank
    for _ in range(5):
        root = np.sqrt(root)
    return root / rank


def spell(number: int) -> str:
    """The spelling of a word; frequent words are short. 0 -> `ba`, 99 -> `zu`, 100 -> `baba`."""
    consonants, vowels = "bcdfghjklmnpqrstvwxz", "aeiou"
    name = ""
    while number >= 0:
        number, syllable = divmod(number, len(consonants) * len(vowels))
        name = consonants[syllable // len(vowels)] + vowels[syllable % len(vowels)] + name
        number -= 1
    return name
