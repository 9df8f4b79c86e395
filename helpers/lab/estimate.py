"""The ratio of two programs' times from pairs of turns, with its interval and one of three verdicts.

A pair is two turns that follow each other, A B or B A; its log ratio is free of the machine's drift. A start is one
life of the two programs: each process has luck of its own (where its memory lies, which core it is on) that no number
of pairs averages out. So the interval has two parts: the spread of the pairs within a start, and the luck of the
starts, whose variance is estimated from the starts together with what null trials showed before (`trials.programs`).

The centre of a start is the mean of its pairs without the lowest and the highest fifth, and its error follows from what
was cut (Yuen 1974). Simulated with pairs that scatter by 5 %, 32 of them exclude an effect of 5 % in 96 % of null
trials; the median in 76 %, the mean in as many on a quiet machine and in 3 % beside others' work.

Verdicts: an effect (faster, slower) where an interval of 99 % leaves 1 out; none above x %, of at most 5, where all of
it is nearer to 1 than that; else undecided, with the effect that such a trial detects four times in five.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist

import numpy as np

LUCK = 0.02  # standard deviation of the log ratio of a program against itself over starts, where no null trials say it
# Over trials of functions in one process: assumed, from no null trial.
LUCK_HERE = 0.002
WEIGHT = 8  # starts that `LUCK` counts as, beside those of the trial
SHOWN, DECIDED = 0.95, 0.99  # confidence of the interval that is shown, and of a verdict
# A trial that looks at its result up to `MOST_LOOKS` times and ends when it is decided has this confidence at each, and
# about `DECIDED` in all: `tests/simulated_trials.py` simulates it.
MOST_LOOKS, AT_A_LOOK = 8, 1 - (1 - DECIDED) / 4
TRIMMED = 0.2  # of a start's pairs, at either end
LEAST_PAIRS = 4  # within a start; fewer have no spread that could be estimated
PRECISION = 0.02  # half the width of an interval that no trial needs narrower
NEGLIGIBLE = 0.05  # the largest effect of which a trial may say that there is none above it
POWER = NormalDist().inv_cdf(0.8)
FASTER, SLOWER, NONE, UNDECIDED, EFFECT = "faster", "slower", "none", "undecided", "effect"


@dataclass(frozen=True)
class Estimate:
    """The time of a program as a ratio to its baseline's: below 1 is faster."""

    ratio: float
    low: float
    high: float
    pairs: int
    starts: int
    verdict: str

    @property
    def half_width(self) -> float:
        """Half the width of the interval, as a share of the ratio."""
        return (self.high - self.low) / 2 / self.ratio

    @property
    def enough(self) -> bool:
        """Whether a trial may end here: it has decided, and knows an effect to a tenth of it or to 2 %."""
        precise = self.half_width <= max(PRECISION, abs(self.ratio - 1) / 10)
        return verdict_class(self.verdict) == NONE or (verdict_class(self.verdict) == EFFECT and precise)

    def row(self) -> dict[str, float | int | str]:
        """The columns of a record."""
        return asdict(self)


def verdict_class(verdict: str) -> str:
    """`EFFECT`, `NONE` or `UNDECIDED`."""
    return EFFECT if verdict in (FASTER, SLOWER) else NONE if verdict.startswith(NONE) else UNDECIDED


def estimate(
    starts: Sequence[Sequence[float] | np.ndarray], luck: float = LUCK, confidence: float = DECIDED
) -> Estimate | None:
    """The mean over starts of each start's centre; None as long as no start has enough pairs.

    `confidence` is that of the verdict; the interval is one of `SHOWN`.
    """
    logs = [np.asarray(start, dtype=float) for start in starts if len(start) >= LEAST_PAIRS]
    if not logs:
        return None
    centres, within, freedoms = map(np.array, zip(*map(_centre, logs), strict=True))
    count, pairs = len(logs), sum(map(len, logs))
    centre = float(centres.mean())
    between = centres.var(ddof=1) if count > 1 else 0.0
    seen = max(between - within.mean(), 0.0) * (count - 1)  # beyond what the pairs' spread explains
    luck_variance = (WEIGHT * luck**2 + seen) / (WEIGHT + count - 1)
    parts = np.array([*within / count**2, luck_variance / count]) + 1e-99  # some, where all pairs are equal
    freedom = parts.sum() ** 2 / (parts**2 / [*freedoms, WEIGHT + count - 1]).sum()
    error = math.sqrt(parts.sum())
    shown, decides = (error * students(level, freedom) for level in (SHOWN, confidence))
    verdict = _verdict(centre, decides, decides + POWER * error)
    return Estimate(math.exp(centre), math.exp(centre - shown), math.exp(centre + shown), pairs, count, verdict)


def _verdict(centre: float, reach: float, detects: float) -> str:
    if abs(centre) > reach:
        return FASTER if centre < 0 else SLOWER
    if (most := math.expm1(abs(centre) + reach)) <= NEGLIGIBLE:
        return f"{NONE} above {100 * most:.2g} %"
    return f"{UNDECIDED}, detects {float(f'{100 * math.expm1(min(detects, 9)):.2g}'):g} %"


def _centre(logs: np.ndarray) -> tuple[float, float, int]:
    """The trimmed mean, its variance by the winsorized one, and the degrees of freedom."""
    ordered, count = np.sort(logs), len(logs)
    cut = int(TRIMMED * count)
    left = count - 2 * cut
    variance = np.clip(ordered, ordered[cut], ordered[-cut - 1]).var(ddof=1) * (count - 1) / (left * (left - 1))
    return float(ordered[cut : count - cut].mean()), float(variance), left - 1


def students(confidence: float, freedom: float) -> float:
    """The two-sided quantile of Student's t: exact for 1 and 2, else by Cornish and Fisher's expansion."""
    if freedom == 1:
        return math.tan(math.pi * confidence / 2)
    if freedom == 2:
        return confidence * math.sqrt(2 / (1 - confidence**2))
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    fourth = (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160
    return z + first / freedom + second / freedom**2 + third / freedom**3 + fourth / freedom**4
