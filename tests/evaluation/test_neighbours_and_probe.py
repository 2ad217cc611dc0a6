"""Tests of k-NN and the linear probe on features, against NumPy and scikit-learn."""

import numpy as np
import pytest

from vit_jax.errors import UserError
from vit_jax.evaluation import knn, probe
from vit_jax.evaluation.features import Features
from vit_jax.evaluation.knn import knn_accuracies
from vit_jax.evaluation.probe import PENALTIES, linear_head, linear_probe
from vit_jax.parallel.mesh import make_mesh

MESH = make_mesh()
CLASSES = 6


def features(images: int, seed: int, noise: float = 1.0) -> Features:
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(99).normal(size=(CLASSES, 20))
    labels = rng.integers(CLASSES, size=images)
    values = (centres[labels] + noise * rng.normal(size=(images, 20))) * np.geomspace(0.1, 10, 20)
    return Features(values.astype(np.float32), labels[:, None].astype(np.int32), np.arange(images))


def winning_classes(
    train: Features, test: Features, neighbours: int, temperature: float = 0.07
) -> np.ndarray:
    """Returns the class with the most votes of the nearest neighbours, int `[test images]`."""

    def unit(x):
        return x / np.linalg.norm(x, axis=1, keepdims=True)

    similarity = unit(test.values.astype(float)) @ unit(train.values.astype(float)).T
    nearest = np.argsort(-similarity, axis=1, kind="stable")[:, :neighbours]
    weights = np.exp(np.take_along_axis(similarity, nearest, axis=1) / temperature)
    classes = np.eye(CLASSES)[train.labels[nearest, 0]]
    return (weights[..., None] * classes).sum(axis=1).argmax(axis=1)


@pytest.fixture
def blocks(monkeypatch):
    """Makes blocks of training and test images small: there are several, the last one not full."""
    monkeypatch.setattr(knn, "TRAIN_BLOCK", 64)
    monkeypatch.setattr(knn, "TEST_BLOCK", 48)


@pytest.mark.parametrize("temperature", [0.07, 10.0])
def test_neighbours_vote_as_in_numpy(temperature, blocks):
    train, test = features(250, seed=0, noise=4.0), features(130, seed=1, noise=4.0)
    counts = (250, 1, 20, 10)
    expected = {count: winning_classes(train, test, count, temperature) for count in counts}
    found = knn_accuracies(train, test, CLASSES, MESH, counts, temperature=temperature)
    right = {count: (classes == test.labels[:, 0]).mean() for count, classes in expected.items()}
    assert found == pytest.approx(right) and len(set(right.values())) > 2
    for count, classes in expected.items():
        as_elected = test._replace(labels=classes[:, None].astype(np.int32))
        assert knn_accuracies(
            train, as_elected, CLASSES, MESH, [count], temperature=temperature
        ) == {count: 1}


def test_ties_of_distances_and_of_votes_are_won_by_the_first(blocks):
    # The features lie on one of four axes, so similarities are exactly 0 or 1, and most neighbours
    # have ties.
    rng = np.random.default_rng(0)
    train, test = (
        features(images, seed=images)._replace(
            values=np.eye(4, dtype=np.float32)[rng.integers(4, size=images)]
        )
        for images in (250, 70)
    )
    for count in (1, 2, 7, 40, 250):
        as_elected = test._replace(
            labels=winning_classes(train, test, count)[:, None].astype(np.int32)
        )
        assert knn_accuracies(train, as_elected, CLASSES, MESH, [count]) == {count: 1}


def test_small_temperature_does_not_overflow():
    train, test = features(250, seed=0), features(130, seed=1)
    assert knn_accuracies(train, test, CLASSES, MESH, [20], temperature=1e-3)[20] > 0.5


def test_a_prediction_of_any_label_of_a_test_image_is_correct():
    train, test = features(250, seed=0), features(40, seed=1, noise=0.1)
    wrong = (test.labels + 1) % CLASSES
    both = test._replace(labels=np.hstack([wrong, test.labels]))
    assert knn_accuracies(train, test._replace(labels=wrong), CLASSES, MESH, [20]) == {20: 0}
    assert knn_accuracies(train, both, CLASSES, MESH, [20]) == {20: 1}
    assert linear_probe(train, both, CLASSES, MESH, penalties=(0.1,)).accuracy == 1


@pytest.mark.parametrize("neighbours", [0, 11])
def test_more_neighbours_than_images_are_refused(neighbours):
    with pytest.raises(
        UserError, match=f"^{neighbours} neighbours of 10 training images; use 1 to 10"
    ):
        knn_accuracies(features(10, 0), features(10, 1), CLASSES, MESH, [1, neighbours])


@pytest.mark.parametrize("penalty", [1e-3, 1.0])
def test_logistic_regression_is_scikit_learns(penalty):
    from sklearn.linear_model import LogisticRegression

    train = features(300, seed=0)
    labels = train.labels[:, 0]
    ours = probe.fit(train.values, labels, np.zeros((21, CLASSES)), penalty, MESH, iterations=1000)
    standard = (train.values - train.values.mean(axis=0)) / (train.values.std(axis=0) + 1e-5)
    theirs = LogisticRegression(C=1 / (penalty * len(labels)), tol=1e-8, max_iter=10_000).fit(
        standard, labels
    )
    np.testing.assert_allclose(ours[:-1], theirs.coef_.T, atol=3e-3)
    np.testing.assert_allclose(ours[-1] - ours[-1].mean(), theirs.intercept_, atol=3e-3)


def test_penalty_is_chosen_without_the_test_images():
    train, test = features(300, seed=0), features(200, seed=1)
    found = linear_probe(train, test, CLASSES, MESH, penalties=(1000.0, 0.1, 1e-3))
    assert found.penalty == max(found.held_out, key=found.held_out.get) != 1000.0
    shuffled = test._replace(labels=np.roll(test.labels, 1, axis=0))
    other = linear_probe(train, shuffled, CLASSES, MESH, penalties=(1000.0, 0.1, 1e-3))
    assert other.held_out == found.held_out
    assert other.accuracy < 0.5 < found.accuracy


def test_probe_of_too_few_images_is_refused():
    with pytest.raises(UserError, match="ten training images to hold one out; there are 9"):
        linear_probe(features(9, 0), features(9, 1), CLASSES, MESH)


@pytest.mark.parametrize("each", [True, False])
def test_a_linear_head_is_scikit_learns_with_the_penalty_of_the_lowest_validation_loss(
    each,
):
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import log_loss
    from threadpoolctl import threadpool_limits

    train, test = features(120, seed=3, noise=4.0), features(200, seed=4, noise=4.0)
    if not each:  # A few large features distinguish the classes; the others are small noise.
        rng = np.random.default_rng(5)
        train, test = (
            part._replace(
                values=np.hstack([part.values / np.geomspace(0.1, 10, 20), noise]).astype("f")
            )
            for part, noise in (
                (part, 0.3 * rng.normal(size=(len(part.values), 200))) for part in (train, test)
            )
        )
    head = linear_head(train, CLASSES, MESH, penalties=PENALTIES[:6], iterations=1000)

    def scale_of(values, own):
        deviation = values.std(axis=0)
        return deviation if own else np.sqrt((deviation**2).mean())

    def fitted(values, labels, penalty, own):
        standard = (values - values.mean(axis=0)) / scale_of(values, own)
        model = LogisticRegression(C=1 / (penalty * len(values)), max_iter=10_000, tol=1e-8)
        with threadpool_limits(1, "blas"):
            return model.fit(standard, labels)

    model = fitted(train.values, train.labels[:, 0], head.penalty, each)
    expected = model.predict_proba(
        (test.values - train.values.mean(axis=0)) / scale_of(train.values, each)
    )
    logits = test.values @ head.kernel + head.bias
    chances = np.exp(logits - logits.max(axis=1, keepdims=True))
    np.testing.assert_allclose(chances / chances.sum(axis=1, keepdims=True), expected, atol=0.02)
    # With another random division into folds, no other choice is much better.
    losses = {(own, penalty): 0.0 for own in (True, False) for penalty in PENALTIES[:6]}
    for held in np.array_split(np.random.default_rng(7).permutation(120), 5):
        kept = np.setdiff1d(np.arange(120), held)
        part = train.values[kept]
        for own, penalty in losses:
            rest = (train.values[held] - part.mean(axis=0)) / scale_of(part, own)
            said = fitted(part, train.labels[kept, 0], penalty, own).predict_proba(rest)
            losses[own, penalty] += log_loss(train.labels[held, 0], said, labels=range(CLASSES)) / 5
    assert losses[each, head.penalty] <= min(losses.values()) * 1.1


def test_a_linear_head_of_an_image_with_two_labels_is_refused():
    two = Features(np.zeros((20, 3), np.float32), np.zeros((20, 2), np.int32), np.arange(20))
    with pytest.raises(UserError, match="has 2 labels"):
        linear_head(two, CLASSES, MESH)


def test_images_of_a_group_are_in_one_fold_of_a_linear_heads_cross_validation():
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(40), 4)
    labels = (np.arange(40) % 2)[groups][:, None].astype(np.int32)
    values = rng.normal(size=(40, 30))[groups] + 0.01 * rng.normal(
        size=(160, 30)
    )  # The features depend only on the group.
    train = Features(values.astype(np.float32), labels, np.arange(160))
    apart = linear_head(train, 2, MESH, groups=groups)
    assert linear_head(train, 2, MESH).accuracy > 0.9
    assert apart.accuracy < 0.75 and apart.penalty >= 0.01
