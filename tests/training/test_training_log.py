"""Tests of warnings about implausible metrics in the first steps, and of the last lines."""

import pytest

from vit_jax.runs.periodic_evaluation import since_start
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


def test_the_last_lines_compare_the_metrics_before_and_after_training():
    rows = [
        {"step": 0, "test/accuracy": 0.68, "test/loss": 1.0},
        {"step": 0, "knn/pets/10": 0.5},
        {"step": 8, "train/loss": 0.1},
        {"step": 8, "knn/pets/10": 0.6, "test/accuracy": 0.7, "test/loss": 0.9},
    ]
    probe = "test accuracy: 68.00% of the linear probe, 70.00% after training"
    assert since_start(rows, probe=True) == [probe]
    kept = [*rows[:3], rows[3] | {"kept/step": 4}]
    assert since_start(kept, probe=True) == [probe.replace("after training", "of the kept model")]
    neighbours = "k-NN accuracy on pets/10: 50.00% before, 60.00% after"
    assert since_start([rows[1], rows[3]], probe=False) == [neighbours]
    assert since_start(rows[2:], probe=True) == []


def test_an_accuracy_of_self_supervised_training_is_not_of_a_linear_probe():
    """The objective `beit` has the accuracy of tokens, which is also evaluated at the start."""
    rows = [{"step": step, "test/accuracy": 0.1, "test/loss": 1.0} for step in (0, 8)]
    assert since_start(rows, probe=False) == []
