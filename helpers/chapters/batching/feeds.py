"""The kinds of batches that are compared, and the ratio of two that took turns."""

from functools import partial

import numpy as np
import pandas as pd

from ...book.values import TIMES, Number, lacking, speedup
from ...lab.estimate import LUCK_HERE, estimate
from ...training.text_batches import balanced_batches, packed_batches, random_batches
from .inputs import MAX_LENGTH

BRAIN, BIG_BRAIN, BALANCED, PACKED = STEPS = ("BRAIN", "BIG BRAIN", "k = 10", "packed")
SPREADS = (1, 5, 10, 20, 50, MAX_LENGTH)  # k
FEEDS = {
    BRAIN: partial(random_batches, to_maximum=True),
    BIG_BRAIN: random_batches,
    **{f"k = {k}": partial(balanced_batches, k=k) for k in SPREADS},
    PACKED: packed_batches,
}


def in_turns(rows: pd.DataFrame, variant: str, baseline: str) -> Number:
    """The ratio of the times of a real token by the turns of two variants."""
    two = rows.set_index("variant").reindex([variant, baseline])["us_per_token"].dropna()
    if len(two) == 2:
        ours, theirs = (np.array(of.split(), dtype=float) for of in two)
        if paired := estimate([np.log(ours / theirs)], LUCK_HERE):
            return speedup(paired.row())
    return lacking(f"turns of {variant} and {baseline}", TIMES)
