"""`SyntheticText`: text for when there is none, with WikiText's lengths and frequencies and something to learn.

It is written in a made-up language: how often its words are, and which follow which, is the same on every machine.

A position on a circle of 2**20 cells stands for a word. Word number r of n owns a share of the cells that falls as
r**-0.97, laid out in a fixed random order. The circle is cut into 16 equal parts (of speech, as it were), each part
into 16 equal arcs. From one word to the next, the position goes on to the next part, to an arc in it that one of four
fixed permutations says (1/2, 1/4, 1/8, 1/8), and to any cell of that arc; once in eight times it goes anywhere.
Permutations keep all arcs equally likely, so words keep their frequencies at every place in a sample.

The parts are learned soon, the arcs later. A frequent word covers many arcs and so says little about what follows; the
words before it say more. That is why a bigram model beats a unigram model, and one that looks further back beats both.

Only exact operations are used (integers, square roots, division and a running sum), on the raw output of PCG64,
whose stream numpy guarantees; so the same seed gives the same text on any platform and with any numpy.
"""

import functools
from dataclasses import dataclass

import numpy as np

from helpers.lab.arguments import check_at_least, check_positive

from .samples import Samples
from .vocab import SPECIALS, TextError, Vocab

# How many of WikiText's 5,352 lines (validation and test) have at most so many tokens.
LENGTHS = (
    (0, 0), (1, 37), (2, 128), (3, 162), (4, 252), (5, 618), (6, 800), (7, 1075), (8, 1297), (9, 1429), (10, 1561),
    (11, 1647), (12, 1717), (16, 1832), (24, 1941), (32, 2042), (40, 2160), (48, 2274), (56, 2397), (64, 2542),
    (72, 2690), (80, 2854), (96, 3178), (112, 3536), (128, 3871), (144, 4127), (160, 4381), (192, 4751), (224, 5037),
    (256, 5179), (320, 5301), (384, 5342), (478, 5352),
)  # fmt: skip
TEXT, LENGTH = 0, 1  # the two random streams of a seed
SIZE = 24_728  # WikiText's 24,725 words (validation and test) and the specials: a multiple of 8

CELLS, PARTS, ARCS, MOVES = 2**20, 16, 2**8, 4
WORDS_AT_MOST = 2**16  # beyond, the rarest words would own no cell
ANY_ARC = MOVES
# Which move a number from 0 to 63 stands for: 8 in 64 go anywhere, the others go half, a quarter, an eighth, an eighth.
CHOICES = np.repeat(np.arange(MOVES + 1, dtype=np.uint8), [28, 14, 7, 7, 8])
GRAMMAR = 20_160_926  # the language is one for all texts; any number would do


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
        check_positive(samples=samples)
        check_at_least(0, seed=seed)
        check_at_least(len(SPECIALS) + 1, vocab_size=vocab_size)
        if vocab_size > WORDS_AT_MOST:
            raise TextError(f"vocab_size is {vocab_size}; synthetic text has at most {WORDS_AT_MOST}")
        lengths = draw_lengths(samples, seed)
        if max_length is not None:
            check_positive(max_length=max_length)
            lengths = np.minimum(lengths, max_length)
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


@dataclass(frozen=True)
class Language:
    cells: np.ndarray  # (CELLS,) the word that owns each cell
    moves: np.ndarray  # (MOVES, ARCS) the next arc, by move and arc

    @property
    def frequencies(self) -> np.ndarray:
        """The share of each word in a long text, most frequent word first."""
        return np.bincount(self.cells) / CELLS


@functools.lru_cache(maxsize=4)
def language(words: int) -> Language:
    """The language with so many words. 4 MiB, made in about 10 ms."""
    layout = np.argsort(random_bits(words, GRAMMAR, 0), kind="stable")
    share = np.cumsum(_shares(words)[layout])
    ends = np.floor(share * (CELLS / share[-1])).astype(np.int64)
    ends[-1] = CELLS
    cells = np.repeat(layout.astype(np.int32), np.diff(ends, prepend=0))
    within = np.argsort(random_bits(MOVES * ARCS, GRAMMAR, 1).reshape(MOVES, PARTS, -1), kind="stable")
    onward = (np.arange(PARTS)[:, None] + 1) % PARTS * (ARCS // PARTS) + within  # (MOVES, PARTS, arcs of a part)
    return Language(cells, onward.reshape(MOVES, ARCS).astype(np.uint8))


def random_bits(count: int, *seed: int) -> np.ndarray:
    """64 random bits each, as unsigned numbers."""
    return np.random.PCG64(np.random.SeedSequence(seed)).random_raw(count)


def write(words: int, offsets: np.ndarray, *seed: int) -> np.ndarray:
    """The words of a text whose samples begin at `offsets`; about 0.1 µs a word.

    Word i of the text is made from random number i and the words before it in its sample: a longer text begins
    with the shorter one.
    """
    bits = random_bits(int(offsets[-1]), *seed)
    move = CHOICES[(bits >> np.uint64(58)).astype(np.intp)]
    move[offsets[:-1]] = ANY_ARC  # a sample may begin anywhere
    arcs = (bits >> np.uint64(32)).astype(np.uint8)  # where ANY_ARC leads; overwritten by where the others lead
    known = language(words)
    _walk(arcs, move, offsets, known.moves)
    width = CELLS // ARCS
    return known.cells[arcs.astype(np.intp) * width + (bits & np.uint64(width - 1)).astype(np.intp)]


def _walk(arcs: np.ndarray, move: np.ndarray, offsets: np.ndarray, moves: np.ndarray) -> None:
    """Fill in the arc of every place, all samples at once, one place after the other."""
    lengths = np.diff(offsets)
    longest_first = np.argsort(-lengths, kind="stable")
    starts, falling = offsets[:-1][longest_first], -lengths[longest_first]
    for place in range(1, int(lengths.max())):
        here = starts[: np.searchsorted(falling, -place)] + place  # the samples that are longer than this place
        chosen = move[here]
        bound = here[chosen != ANY_ARC]
        arcs[bound] = moves[move[bound], arcs[bound - 1]]


def _shares(words: int) -> np.ndarray:
    """r ** -(31/32) for r from 1 on, by square roots, which round the same everywhere (powers do not)."""
    rank = np.arange(1, words + 1, dtype=np.float64)
    root = rank
    for _ in range(5):
        root = np.sqrt(root)
    return root / rank


def spell(number: int) -> str:
    """A name for a word: frequent ones are short. 0 -> `ba`, 99 -> `zu`, 100 -> `baba`."""
    consonants, vowels = "bcdfghjklmnpqrstvwxz", "aeiou"
    name = ""
    while number >= 0:
        number, syllable = divmod(number, len(consonants) * len(vowels))
        name = consonants[syllable // len(vowels)] + vowels[syllable % len(vowels)] + name
        number -= 1
    return name
