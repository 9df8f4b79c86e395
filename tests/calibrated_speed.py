"""The constants of `helpers.fit.speed`, fitted on the published runs.

    python tests/calibrated_speed.py     # where runs were added or rates of cards changed: writes the CSV's column
                                         # `predicted`, and prints what `THETA` and `BAND` become

`THETA` minimises absolute errors of logarithms. 0.1 s.
"""

import csv
import functools
import sys
from pathlib import Path

import numpy as np

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from helpers.fit.speed import DATA, published, terms

HELD = 0.8  # share of the published runs that lie in the band
TAILS = np.arange(10, 0, -1) / 100  # shares of runs beyond either end of the band, to choose from


def of_published() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Of all published runs: what the constants multiply, seconds without one, seconds published, weights."""
    multiplied, fixed = terms(published())
    sources = [run["source"] for run in published()]
    weights = np.array([sources.count(source) ** -0.5 for source in sources])
    x = np.stack([multiplied[:, 0] + multiplied[:, 1], multiplied[:, 2], multiplied[:, 3]], 1)
    return x, fixed[:, :3].sum(1), np.array([1 / run["tok_s_gpu"] for run in published()]), weights


def fitted(x: np.ndarray, fixed: np.ndarray, measured: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The constants with the least absolute logarithmic errors: least squares, weighted anew by the last errors."""
    theta = np.array([1.2, 10.0, 300.0])
    for _ in range(200):
        predicted = x @ theta + fixed
        error = np.log(measured / predicted)
        slope = x * theta / predicted[:, None]
        weighted = slope * (weights / np.maximum(np.abs(error), 0.002))[:, None]
        square = weighted.T @ slope
        step = np.linalg.solve(square + 1e-6 * np.trace(square) * np.eye(3), weighted.T @ error)
        theta = theta * np.exp(np.clip(step, -0.3, 0.3) * 0.7)
        if np.abs(step).max() < 1e-4:
            break
    return theta


@functools.cache
def left_out(by: str = "source") -> np.ndarray:
    """Tokens/s/GPU of each published run, predicted by a fit without its `source`, or without its `family` of GPUs."""
    x, fixed, measured, weights = of_published()
    groups = np.array([run["source"] if by == "source" else run["gpu"].split("_")[0] for run in published()])
    predicted = np.zeros(len(groups))
    for group in sorted(set(groups)):
        out = groups == group
        predicted[out] = 1 / (x[out] @ fitted(x, fixed, measured, weights * ~out) + fixed[out])
    return predicted


@functools.cache
def band() -> tuple[float, float]:
    """Logarithms of published over predicted speed between which four of five runs lie whose source was left out, both
    of the fit and of this band: the widest tails, alike on both sides, that the others leave."""
    _, _, measured, weights = of_published()
    errors, sources = -np.log(measured * left_out()), np.array([run["source"] for run in published()])
    for tail in TAILS:
        within = np.zeros(len(errors), bool)
        for source in set(sources):
            out = sources == source
            low, high = _between(errors[~out], weights[~out], tail)
            within[out] = (low <= errors[out]) & (errors[out] <= high)
        if weights[within].sum() >= HELD * weights.sum():
            break
    return _between(errors, weights, tail)


def _between(errors: np.ndarray, weights: np.ndarray, tail: float) -> tuple[float, float]:
    low, high = np.quantile(errors, (tail, 1 - tail), weights=weights, method="inverted_cdf")
    return float(low), float(high)


if __name__ == "__main__":
    file = DATA / "published_runs.csv"
    rows, speeds = list(csv.DictReader(file.read_text(encoding="utf-8").splitlines())), left_out()
    with file.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(row | {"predicted": f"{speed:.12g}"} for row, speed in zip(rows, speeds, strict=True))
    print(f"THETA = {tuple(fitted(*of_published()).tolist())}\nBAND = {band()}")
