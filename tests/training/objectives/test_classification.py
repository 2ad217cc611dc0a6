"""Tests of classification losses against NumPy in float64."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from sklearn.metrics import log_loss

from vit_jax.training.objectives.classification import (
    Classification,
    class_targets,
    classification_loss,
    correct,
)
from vit_jax.training.objectives.objective import EVALUATION, StepContext

LABELS = np.array([[2, -1, -1], [0, 3, -1], [4, 1, 4], [-1, -1, -1]])


@pytest.fixture
def logits() -> np.ndarray:
    return np.random.default_rng(0).normal(0, 3, (4, 5))


def targets(smoothing: float, even: bool) -> np.ndarray:
    hot = np.zeros((4, 5))
    for row, labels in zip(hot, LABELS, strict=True):
        row[[label for label in labels if label >= 0]] = 1
    if even:
        hot /= np.maximum(hot.sum(1, keepdims=True), 1)
    return (1 - smoothing) * hot + smoothing / 5


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_softmax_loss_equals_numpy(logits, smoothing):
    log_probability = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    expected = -(targets(smoothing, even=True) * log_probability).sum(1)
    soft = class_targets(jnp.asarray(LABELS), 5, "softmax")
    got = classification_loss(jnp.asarray(logits), soft, "softmax", smoothing)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("smoothing", [0.0, 1e-4])
def test_sigmoid_loss_is_summed_over_the_classes(logits, smoothing):
    probability = 1 / (1 + np.exp(-logits))
    target = targets(smoothing, even=False)
    expected = -(target * np.log(probability) + (1 - target) * np.log(1 - probability)).sum(1)
    hot = class_targets(jnp.asarray(LABELS), 5, "sigmoid")
    got = classification_loss(jnp.asarray(logits), hot, "sigmoid", smoothing)
    np.testing.assert_allclose(got, expected, rtol=1e-5)


@pytest.mark.parametrize("name", ["softmax", "sigmoid"])
def test_loss_of_mixed_targets_is_the_mixture_of_the_losses(logits, name):
    one = class_targets(jnp.asarray(LABELS), 5, name)
    other = jnp.roll(one, 1, axis=0)
    loss = [
        classification_loss(jnp.asarray(logits), t, name, 0.1)
        for t in (0.7 * one + 0.3 * other, one, other)
    ]
    np.testing.assert_allclose(loss[0], 0.7 * loss[1] + 0.3 * loss[2], rtol=1e-5)


def test_a_prediction_of_any_class_of_an_image_is_correct():
    highest = np.array([2, 3, 0, 4])
    got = correct(jnp.asarray(np.eye(5)[highest]), jnp.asarray(LABELS))
    assert got.tolist() == [True, True, False, False]


def test_class_weights_scale_only_the_training_loss(logits):
    labels, weights = np.array([2, 0, 4, 2]), np.array([0.5, 1, 1, 2, 3])
    objective = Classification("softmax", 0.0)
    objective.class_weights = tuple(weights.tolist())
    batch = {"labels": jnp.asarray(labels)[:, None]}
    probability = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    of_each = weights[labels]
    weighted = (
        log_loss(labels, probability, sample_weight=of_each, labels=range(5)) * of_each.mean()
    )
    training = objective.label_losses(jnp.asarray(logits), batch, StepContext(nnx.Rngs(0)))
    np.testing.assert_allclose(training.mean(), weighted, rtol=1e-5)
    evaluation = objective.label_losses(jnp.asarray(logits), batch, EVALUATION)
    np.testing.assert_allclose(
        evaluation.mean(), log_loss(labels, probability, labels=range(5)), rtol=1e-5
    )


def test_mixed_images_have_the_mean_weight_of_their_classes(logits):
    objective = Classification("softmax", 0.0)
    objective.class_weights = (1.0, 2.0, 3.0, 4.0, 5.0)
    labels = jnp.array([[0], [1], [2], [3]])
    mixed = {"labels": labels, "partner_labels": labels[::-1], "share": jnp.full(4, 0.75)}
    losses = objective.label_losses(jnp.asarray(logits), mixed, StepContext(nnx.Rngs(0)))
    plain = Classification("softmax", 0.0).label_losses(
        jnp.asarray(logits), mixed, StepContext(nnx.Rngs(0))
    )
    np.testing.assert_allclose(losses / plain, [1.75, 2.25, 2.75, 3.25], rtol=1e-5)
