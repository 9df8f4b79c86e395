"""Whether a changed training is still the same training: exact where the change is exact, else within seeds.

`try` and `referee` judge by this. A change whose losses are bitwise equal is exact. One that only reorders or rounds
arithmetic moves a loss by less than another seed does, over as many steps; one that draws other random numbers, as
compiled dropout and a loader's workers do, is another seed itself. That is necessary, not sufficient: over a few dozen
steps it can't tell what a change does to a whole training.
"""

import math
import re
from collections.abc import Sequence

EQUAL, WITHIN, DIFFERENT, UNSEEN = "bitwise equal", "within seeds", "different", "not seen"
ALLOWED = 2  # as many times the two seeds' difference: a third seed's would be now smaller, now larger than theirs
BLOCKS = 10  # of a run, whose mean losses are compared where batches may be others
NUMBER = re.compile(r"-?\d+\.?\d*(?:[eE][-+]?\d+)?")
Values = Sequence[float | None]


def compare(base: Values, other: Values, seed: Values) -> str:
    """The verdict on the losses of a change, `other`, beside those of the base and of the base with another seed.

    Behind it are the mean difference as a share of the base's loss, that of two seeds, and the number of steps.
    """
    steps = min(len(base), len(other))
    pairs = [(b, math.nan if o is None else o) for b, o in zip(base, other, strict=False) if b is not None]
    if not pairs:
        return UNSEEN
    if all(b == o for b, o in pairs):
        return f"{EQUAL}, {steps} steps"
    distance = _distance(pairs)
    of_seeds = [(b, s) for b, s in zip(base[:steps], seed, strict=False) if b is not None and s is not None]
    seeds = _distance(of_seeds) if of_seeds else math.nan
    verdict = WITHIN if distance <= seeds * ALLOWED else DIFFERENT
    beside = f", seeds {_percent(seeds)}" if math.isfinite(seeds) else ""
    return f"{verdict}: {_percent(distance)}{beside}, {steps} steps"


def is_same(verdict: str) -> bool:
    return not verdict.startswith(DIFFERENT)


def same_text(exact: bool, base: str, other: str, seed: str) -> bool:
    """Whether a file says the same: the same bytes where the training is exact, else equal words, and numbers in it."""
    if exact or base == other:
        return base == other
    numbers = [[float(number) for number in NUMBER.findall(text)] for text in (base, other, seed)]
    same_words = NUMBER.sub("", base) == NUMBER.sub("", other) and len(numbers[0]) == len(numbers[1])
    return same_words and is_same(compare(*numbers))


def course(losses: Values) -> Values:
    """The mean losses over a tenth of a run each, to compare where batches may be others."""
    if len(losses) < BLOCKS:
        return losses
    size = len(losses) // BLOCKS
    blocks = [[x for x in losses[start : start + size] if x is not None] for start in range(0, len(losses), size)]
    return [sum(block) / len(block) if block else None for block in blocks]


def _distance(pairs: Sequence[tuple[float, float]]) -> float:
    """The mean difference as a share of the mean loss; infinite where one of them isn't finite."""
    size = sum(abs(base) for base, _ in pairs)
    difference = sum(abs(base - other) for base, other in pairs)
    return difference / size if math.isfinite(difference) and size else math.inf


def _percent(share: float) -> str:
    if not math.isfinite(share):
        return "without limit"
    return f"{100 * share:.0f} %" if share > 0.1 else f"{100 * share:.2g} %"
