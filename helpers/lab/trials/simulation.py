"""Made-up machines for the estimate to prove itself on: what share of its intervals holds the true ratio."""

import numpy as np

from ..estimate import FASTER, LUCK, SLOWER, estimate

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


def coverage(machine: str, starts: int, rounds: int, trials: int, luck: float = LUCK) -> tuple[float, float]:
    """The share of 95 % intervals that hold the true ratio, 1, and the share of trials that name a difference."""
    generator = np.random.default_rng(0)
    covered = verdicts = 0
    for trial in range(trials):
        logs = [simulated(generator, rounds, 1.0, luck=luck, **MACHINES[machine]) for _ in range(starts)]
        result = estimate(logs, seed=trial)
        covered += result.low <= 1 <= result.high
        verdicts += result.verdict in (FASTER, SLOWER)
    return covered / trials, verdicts / trials
