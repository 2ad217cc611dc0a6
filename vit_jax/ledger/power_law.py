"""Fits power laws of the error over compute: error = factor * compute ** -exponent."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

RESAMPLED = 2000


def laws(
    points: Sequence[Mapping[str, Any]], x: str, y: str, by: str
) -> dict[str, dict[str, float]]:
    """Fits a power law of the error (1 - accuracy) over compute to each group of points.

    Args:
      points: results from `Study.points`. A point contains two lists with a value per seed, under
        the keys `x` and `y`.
      y: key of the accuracy, from 0 to 1.

    Returns:
      For each group of at least three points: `factor` and `exponent` of the power law; `low` and
      `high`, the bounds of the exponent's 90 % bootstrap interval; and `points`, the number of
      points.
    """
    groups: dict[str, list[tuple[float, float]]] = {}
    for point in points:
        groups.setdefault(point[by], []).append((np.mean(point[x]), 1 - np.mean(point[y])))
    return {
        name: law(*np.transpose(members)) for name, members in groups.items() if len(members) > 2
    }


def law(compute: np.ndarray, error: np.ndarray) -> dict[str, float]:
    """Fits a power law to points by linear regression of log(error) on log(compute).

    Args:
      compute: training compute of each point, `[points]`.
      error: error of each point, from 0 to 1, `[points]`.

    Returns:
      `factor` and `exponent` of the power law; `low` and `high`, the bounds of the exponent's 90 %
      bootstrap interval; and `points`, the number of points.
    """
    x, y = np.log(compute), np.log(np.maximum(error, 1e-6))
    slope, intercept = np.polyfit(x, y, 1)
    random, exponents = np.random.default_rng(0), []
    while len(exponents) < RESAMPLED:
        chosen = random.integers(len(x), size=len(x))
        if np.ptp(x[chosen]) > 0:
            exponents.append(-np.polyfit(x[chosen], y[chosen], 1)[0])
    low, high = np.percentile(exponents, [5, 95])
    fitted = dict(factor=np.exp(intercept), exponent=-slope, low=low, high=high, points=len(x))
    return {name: float(value) for name, value in fitted.items()}


def laws_in_words(laws: Mapping[str, Mapping[str, float]]) -> str:
    """Formats the power law of each group as text: the exponent and its interval."""
    return "; ".join(
        f"{name}: error falls as compute to the power of -{law['exponent']:.3f} "
        f"({law['low']:.3f} to {law['high']:.3f}, {law['points']:.0f} points)"
        for name, law in laws.items()
    )
