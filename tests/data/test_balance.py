"""Unequal classes: the order that balances them, and the weights of classes in the loss."""

import numpy as np
import pytest
from sklearn.utils.class_weight import compute_class_weight

from vit_jax.config import base_config, check
from vit_jax.data.balance import balanced_order, class_weights, note_of, single_labels
from vit_jax.data.sources.handed_in import handed_in
from vit_jax.errors import UserError

LABELS = np.random.default_rng(0).permutation(
    np.repeat([0, 1, 3], [400, 90, 10])
)  # Class 2 has no images.


@pytest.mark.parametrize(
    ("kind", "shares"), [("full", [1, 1, 0, 1]), ("sqrt", [20, 90**0.5, 0, 10**0.5])]
)
def test_classes_have_the_shares_of_the_balance(kind, shares):
    indices = balanced_order(LABELS, kind, 0)(np.arange(50_000))
    drawn = np.bincount(LABELS[indices])
    np.testing.assert_allclose(drawn / 50_000, np.array(shares) / np.sum(shares), atol=2e-3)


def test_full_balance_has_each_class_in_every_batch_and_in_a_random_order():
    drawn = LABELS[balanced_order(LABELS, "full", 0)(np.arange(3000))].reshape(-1, 3)
    assert (np.sort(drawn, axis=1) == [0, 1, 3]).all()
    assert len({*map(tuple, drawn.tolist())}) == 6


@pytest.mark.parametrize("kind", ["sqrt", "full"])
def test_images_of_a_class_come_equally_often(kind):
    indices = balanced_order(LABELS, kind, 0)(np.arange(100_000))
    counts = np.bincount(indices, minlength=len(LABELS))
    for label in (0, 1, 3):
        spread = np.ptp(counts[np.isin(LABELS, label)])
        # One for an incomplete epoch over the class's images, and one for an incomplete round.
        assert spread <= 2, label


@pytest.mark.parametrize("kind", ["sqrt", "full"])
def test_balanced_order_has_random_access(kind):
    order, far = balanced_order(LABELS, kind, 3), 2**61
    positions = np.arange(far, far + 200)
    assert order(positions).tolist() == [order(positions[i : i + 1])[0] for i in range(200)]
    assert order(positions).tolist() != balanced_order(LABELS, kind, 4)(positions).tolist()


def test_repeated_images_come_in_a_row_in_the_same_balanced_order():
    once = balanced_order(LABELS, "sqrt", 0)(np.arange(100))
    thrice = balanced_order(LABELS, "sqrt", 0, repeats=3)(np.arange(300))
    assert thrice.tolist() == once.repeat(3).tolist()


def test_full_weights_are_scikit_learns_balanced():
    reference = compute_class_weight("balanced", classes=np.array([0, 1, 3]), y=LABELS)
    np.testing.assert_allclose(np.array(class_weights(LABELS, "full"))[[0, 1, 3]], reference)


@pytest.mark.parametrize("kind", ["sqrt", "full"])
def test_weights_have_the_mean_1_over_the_images(kind):
    weights = np.array(class_weights(LABELS, kind))
    assert weights[LABELS].mean() == pytest.approx(1)
    power = {"sqrt": 0.5, "full": 1}[kind]
    assert weights[3] / weights[0] == pytest.approx(40**power)


def source(labels):
    images = np.zeros((len(labels), 8, 8, 3), np.uint8)
    return handed_in((images, labels), "train", class_names=("cat", "dog", "fox"), num_classes=3)


def test_images_of_several_classes_are_refused_with_the_flag():
    with pytest.raises(
        UserError, match=r"config.data.balance needs one label .* 1 of 3 .*data.balance='none'"
    ):
        single_labels(source([[0], [1, 2], [2]]), "data.balance")


def test_note_names_the_classes_and_the_flags():
    note = note_of(source([[0]] * 33 + [[1]] * 3 + [[2]] * 10))
    assert note.startswith(
        "note: the classes are unequal, 11 to 1: 33 training images of cat and 3 of dog;"
    )
    assert "--config.data.balance=sqrt or --config.loss.class_weights=sqrt" in note
    assert note_of(source([[0]] * 30 + [[1]] * 3)) is None


@pytest.mark.parametrize(
    ("values", "error"),
    [
        (
            {"data.balance": "full", "loss.class_weights": "full"},
            "loss.class_weights .* 'none' with data.balance='full'",
        ),
        ({"data.balance": "full", "objective.name": "mae"}, "data.balance"),
        ({"loss.class_weights": "sqrt", "objective.name": "mae"}, "loss.class_weights"),
        ({"data.balance": "half"}, "none or sqrt or full"),
    ],
)
def test_contradicting_options_of_balance_are_rejected(values, error):
    config = base_config()
    config.update_from_flattened_dict({"model.name": "ViT-Ti/4", "steps": 1} | values)
    with pytest.raises(UserError, match=error):
        check(config)
