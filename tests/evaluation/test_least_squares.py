"""Tests of the closed-form classifier against NumPy in float64, and of its properties."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.evaluation import plain
from vit_jax.errors import UserError
from vit_jax.evaluation.least_squares import accuracy, fit
from vit_jax.parallel.mesh import make_mesh, over_devices

MESH = make_mesh()


def data(images, width, classes, seed=0) -> tuple[np.ndarray, np.ndarray]:
    """Returns correlated features that depend on the class, and labels."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(classes, size=images)
    features = rng.normal(size=(images, width)) + 0.5 * rng.normal(size=(classes, width))[labels]
    mixed = features @ rng.normal(size=(width, width)) * rng.lognormal(size=width) + rng.normal(
        size=width
    )
    return mixed.astype(np.float32), labels


def coefficients(features, labels, classes, *penalties, log=print) -> np.ndarray:
    return fit(features, labels, classes, penalties, MESH, log)[0].coefficients


def score(train, labels, test, test_labels, classes, penalty) -> float:
    (classifier,) = fit(train, labels, classes, [penalty], MESH)
    arrays = (
        over_devices(test.astype(np.float32), MESH),
        over_devices(test_labels[:, None], MESH, fill=-1),
    )
    return accuracy(classifier, *arrays, MESH)


def assert_close(ours, right):
    assert ours.shape == right.shape
    # The documented accuracy is 1e-4.
    assert np.linalg.norm(ours - right) < 1e-8 * np.linalg.norm(right)


# The number of images is below, at and above the number of features + 1. The number of classes is
# below, at and above the number of features.
@pytest.mark.parametrize("images", [12, 20, 21, 22, 90])
@pytest.mark.parametrize("classes", [5, 20, 30])
@pytest.mark.parametrize("penalty", [2.0**-10, 2.0**10, 2.0**19])
def test_coefficients_are_those_of_the_formula(images, classes, penalty):
    features, labels = data(images, 20, classes)
    formula = plain.dual if images < 21 else plain.primal
    case = features, labels, classes, penalty
    assert_close(coefficients(*case), formula(*case))


@given(
    images=st.integers(2, 60),
    width=st.integers(1, 40),
    classes=st.integers(2, 40),
    power=st.integers(-6, 19),
    seed=st.integers(0, 99),
)
@settings(max_examples=30, deadline=None)
def test_coefficients_satisfy_both_formulas_for_any_shape(images, width, classes, power, seed):
    features, labels = data(images, width, classes, seed)
    found = coefficients(features, labels, classes, 2.0**power)
    for formula in (plain.primal, plain.dual):
        right = formula(features, labels, classes, 2.0**power)
        assert np.linalg.norm(found - right) < 1e-5 * np.linalg.norm(right)


@pytest.mark.parametrize("images", [15, 50])
def test_a_grid_of_penalties_equals_single_penalties(images):
    features, labels = data(images, 20, 7)
    penalties = [2.0**power for power in range(-10, 20)]
    for penalty, found in zip(penalties, fit(features, labels, 7, penalties, MESH), strict=True):
        assert_close(found.coefficients, coefficients(features, labels, 7, penalty))


@pytest.mark.parametrize("images", [9, 40])
def test_repeating_the_training_set_five_times_divides_the_penalty_by_five(images):
    features, labels = data(images, 12, 4)
    many = coefficients(np.tile(features, (5, 1)), np.tile(labels, 5), 4, 100.0)
    assert_close(many, coefficients(features, labels, 4, 20.0))


@pytest.mark.parametrize("penalty", [0.0, 1e-6])
def test_one_hot_features_are_classified_without_error(penalty):
    labels = np.arange(40) % 8
    features = np.eye(8)[labels]
    assert score(features, labels, features, labels, 8, penalty) == 1


def test_scale_of_a_feature_does_not_matter():
    (features, labels), (test, test_labels) = data(60, 12, 4), data(200, 12, 4, seed=1)
    scale = np.geomspace(0.01, 1000, 12)
    first = score(features, labels, test, test_labels, 4, 1.0)
    assert score(features * scale, labels, test * scale, test_labels, 4, 1.0) == first


def test_test_features_are_standardised_as_the_training_features_are():
    (features, labels), (test, test_labels) = data(60, 12, 4), data(500, 12, 4, seed=1)
    test = 1.5 * test + 2 * features.std(
        axis=0
    )  # Standardizing the test features with their own statistics would undo this.
    right = plain.accuracy(plain.primal(features, labels, 4, 1.0), features, test, test_labels)
    assert score(features, labels, test, test_labels, 4, 1.0) == pytest.approx(right)


@pytest.mark.parametrize("images", [10, 40])
def test_penalty_zero_with_dependent_rows_or_columns_logs_the_least_norm_solution(images):
    features, labels = data(images, 12, 4)
    features[:, -1], features[1], labels[1] = features[:, 0], features[0], labels[0]
    said = []
    found = coefficients(features, labels, 4, 0.0, log=said.append)
    a, targets = plain.system(features, labels, 4)
    assert_close(found, np.linalg.pinv(a) @ targets)
    (line,) = said
    assert "least-norm" in line


@pytest.mark.parametrize("images", [10, 40])
def test_penalty_zero_is_exact_if_the_images_determine_the_coefficients(images):
    features, labels = data(images, 12, 4)
    said = []
    found = coefficients(features, labels, 4, 0.0, log=said.append)
    a, targets = plain.system(features, labels, 4)
    assert_close(found, np.linalg.pinv(a) @ targets)
    assert said == []


def test_constant_features_have_coefficients_of_zero():
    features, labels = data(40, 12, 4)
    features[:, 3] = 0.1
    assert not coefficients(features, labels, 4, 1.0)[3].any()


def test_penalty_below_zero_is_refused():
    with pytest.raises(UserError, match="-1 and must be 0 or above"):
        coefficients(*data(10, 3, 2), 2, -1.0)


def test_features_that_are_not_finite_are_refused():
    features, labels = data(10, 3, 2)
    features[4, 1] = np.nan
    with pytest.raises(UserError, match="not finite"):
        coefficients(features, labels, 2, 1.0)
