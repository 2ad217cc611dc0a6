"""Tests of warnings about implausible metrics in the first steps."""

import pytest

from vit_jax.runs.training_log import Suspicion


def remarks(rows, classes=10, images=100):
    """Returns the warnings by the number of their row, from 1; each row adds `images` images."""
    suspicion = Suspicion(classes)
    found = (suspicion.remark(means, number * images) for number, means in enumerate(rows, 1))
    return {number: remark for number, remark in enumerate(found, 1) if remark}


@pytest.mark.parametrize(
    ("accuracies", "images", "step"),
    [
        ([0.0, 0.0, 0.0], 100, 1),
        ([0.0, 0.0, 0.0], 40, 3),  # With 10 classes, up to 99 wrong images can be chance.
        ([1.0, 1.0, 1.0], 40, 2),
        ([1.0, 0.9, 1.0, 1.0], 40, None),
        ([0.0, 0.1, 0.0, 0.0], 40, None),
        ([0.2, 1.0, 1.0, 1.0], 100, None),
    ],
)
def test_an_accuracy_that_is_constant_from_the_first_step_logs_one_warning(
    accuracies, images, step
):
    found = remarks([{"loss": 1.0, "accuracy": accuracy} for accuracy in accuracies], images=images)
    assert list(found) == ([step] if step else [])
    for remark in found.values():
        assert remark.startswith(
            f"the accuracy is {accuracies[0]:.0%} from the first step on: check the labels"
        )


def test_a_loss_of_zero_from_the_first_step_logs_a_warning():
    found = remarks([{"loss": 0.0, "accuracy": 0.0}, {"loss": 0.0, "accuracy": 0.0}])
    assert list(found) == [1] and found[1].startswith("the loss is 0.0000 from the first step on")
    assert not remarks([{"loss": 0.1}, {"loss": 0.0}], classes=0)
