"""Trials on trial: on made-up machines."""

import numpy as np

from helpers.lab.estimate import AT_A_LOOK, EFFECT, MOST_LOOKS, NONE, Estimate, estimate, verdict_class

# Log times of turns: independent noise, a drift over the trial, sudden changes of speed (how many), turns that are
# disturbed (their share), and noise that lasts over turns (its correlation).
MACHINES: dict[str, dict[str, float]] = {
    "quiet": {},
    "drift of 30 %": {"drift": 0.3},
    "two sudden changes of 15 %": {"changes": 2},
    "a tenth disturbed": {"disturbed": 0.1},
    "lasting noise of 5 %": {"correlation": 0.9},
    "all of these": {"drift": 0.3, "changes": 2, "disturbed": 0.1, "correlation": 0.9},
}


def simulated(
    generator: np.random.Generator,
    rounds: int,
    ratio: float,
    *,
    noise: float = 0.02,
    drift: float = 0.0,
    changes: float = 0.0,
    disturbed: float = 0.0,
    correlation: float = 0.0,
    luck: float = 0.0,
) -> np.ndarray:
    """The log ratios of the pairs of a start of so many rounds A B B A."""
    turns = np.arange(4 * rounds)
    logs = drift * turns / len(turns) + generator.normal(0, noise, len(turns))
    for _ in range(generator.poisson(changes)):
        logs += (turns >= generator.integers(len(turns))) * generator.normal(0, 0.15)
    logs += (generator.random(len(turns)) < disturbed) * generator.exponential(0.5, len(turns))
    if correlation:
        innovations, level = generator.normal(0, 0.05 * np.sqrt(1 - correlation**2), len(turns)), 0.0
        for turn, innovation in enumerate(innovations):
            level = correlation * level + innovation
            logs[turn] += level
    logs += np.tile([0, 1, 1, 0], rounds) * (np.log(ratio) + generator.normal(0, luck))
    of_round = logs.reshape(rounds, 4)
    return np.stack([of_round[:, 1] - of_round[:, 0], of_round[:, 2] - of_round[:, 3]], axis=1).ravel()


def until_decided(
    machine: str, ratio: float, trials: int, *, rounds: int = 6, noise: float = 0.035, luck: float = 0.005
) -> dict[str, float]:
    """Trials that look after each start and end when they know enough, as `trial` does.

    Of so many trials the shares that found an effect, one of the wrong sign, none above 5 %, and whose interval holds
    the truth; and their pairs in the mean.
    """
    generator = np.random.default_rng(0)
    ends: list[tuple[Estimate, int]] = []
    for _ in range(trials):
        logs: list[np.ndarray] = []
        while len(logs) <= MOST_LOOKS:
            logs.append(simulated(generator, rounds, ratio, noise=noise, luck=luck, **MACHINES[machine]))
            result = estimate(logs, luck, AT_A_LOOK)
            if len(logs) > 1 and result.enough:
                break
        ends.append((result, np.sign(result.ratio - 1) if verdict_class(result.verdict) == EFFECT else 0))
    found = np.array([sign for _, sign in ends])
    none = np.array([verdict_class(end.verdict) == NONE for end, _ in ends])
    return {
        "found": float((found != 0).mean()),
        "wrong_sign": float((found * np.sign(np.log(ratio)) < 0).mean() if ratio != 1 else (found != 0).mean()),
        "none_above_5": float(none.mean()),
        "holds": float(np.mean([end.low <= ratio <= end.high for end, _ in ends])),
        "pairs": float(np.mean([end.pairs for end, _ in ends])),
    }
