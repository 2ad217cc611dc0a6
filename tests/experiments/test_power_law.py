"""Power laws fitted to points."""

import numpy as np
import pytest

from vit_jax.ledger.charts import lines, with_laws
from vit_jax.ledger.power_law import laws, laws_in_words


def points(exponent: float, noise: float, count: int = 12) -> list[dict]:
    """Returns points of one family along a power law, with noise in the logarithm of the error."""
    compute = np.geomspace(1e-6, 1e-3, count)
    scatter = noise * np.random.default_rng(3).normal(size=count)
    error = 0.01 * compute**-exponent * np.exp(scatter)
    return [
        {"family": "ViT", "exaflops": [c, c], "accuracy": [1 - e, 1 - e]}
        for c, e in zip(compute, error, strict=True)
    ]


def test_exact_law_is_found_with_an_interval_of_no_width():
    found = laws(points(0.3, 0), "exaflops", "accuracy", "family")["ViT"]
    assert found["exponent"] == pytest.approx(0.3) and found["factor"] == pytest.approx(0.01)
    assert found["low"] == pytest.approx(0.3) and found["high"] == pytest.approx(0.3)


def test_interval_is_that_of_the_slopes_error_under_noise():
    noise, found = 0.2, laws(points(0.3, 0.2, 200), "exaflops", "accuracy", "family")["ViT"]
    x = np.log(np.geomspace(1e-6, 1e-3, 200))
    # The standard error of the slope of a least-squares line.
    error = noise / np.sqrt(np.sum((x - x.mean()) ** 2))
    assert found["low"] < 0.3 < found["high"]
    assert found["high"] - found["low"] == pytest.approx(2 * 1.645 * error, rel=0.15)


def test_fewer_than_three_points_have_no_law():
    assert laws(points(0.3, 0)[:2], "exaflops", "accuracy", "family") == {}


def test_law_in_words_has_exponent_and_interval():
    words = laws_in_words({"ViT": dict(exponent=0.3, low=0.25, high=0.35, points=12.0)})
    assert words == "ViT: error falls as compute to the power of -0.300 (0.250 to 0.350, 12 points)"


def test_law_is_drawn_through_the_points_that_it_was_fitted_to():
    members = [point | {"model": "small"} for point in points(0.05, 0)]
    chart = lines(members, "exaflops", by=["model"])
    with_laws(chart, laws(members, "exaflops", "accuracy", "family"), members, "exaflops", "family")
    (law,) = [line for line in chart.axes[0].lines if line.get_label() == "ViT, power law"]
    drawn = np.interp(np.log([1e-6, 1e-4, 1e-3]), np.log(law.get_xdata()), law.get_ydata())
    assert drawn == pytest.approx(100 - np.array([1e-6, 1e-4, 1e-3]) ** -0.05, abs=0.01)


def test_deviations_are_drawn_within_0_and_100_per_cent():
    wide = [
        {"exaflops": [1.0], "accuracy": [0.9, 0.1, 0.1]},
        {"exaflops": [2.0], "accuracy": [0.4, 1.0, 1.0]},
    ]
    bars = lines(wide, "exaflops").axes[0].collections[0].get_segments()
    heights = np.array([segment[:, 1] for segment in bars])
    assert heights.min() == 0 and heights.max() == 100
