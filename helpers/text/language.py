"""A made-up language: how often its words are, and which follow which. The same on every machine.

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

CELLS, PARTS, ARCS, MOVES = 2**20, 16, 2**8, 4
WORDS_AT_MOST = 2**16  # beyond, the rarest words would own no cell
ANY_ARC = MOVES
# Which move a number from 0 to 63 stands for: 8 in 64 go anywhere, the others go half, a quarter, an eighth, an eighth.
CHOICES = np.repeat(np.arange(MOVES + 1, dtype=np.uint8), [28, 14, 7, 7, 8])
GRAMMAR = 20_160_926  # the language is one for all texts; any number would do


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
