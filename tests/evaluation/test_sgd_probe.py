"""Tests of DINOv2's linear probe against SGD in NumPy float64, and of its choice of features."""

import numpy as np
import pytest

from tests.evaluation.test_neighbours_and_probe import CLASSES, MESH, features
from tests.interop.helpers import random_images, random_model, write
from vit_jax.data.sources import data_set
from vit_jax.errors import UserError
from vit_jax.evaluation.features import Features, choices_of, representation
from vit_jax.evaluation.sgd_probe import SgdProbe, batches
from vit_jax.run_suites import run_suites

CHOICES = {"left": slice(0, 8), "middle": slice(5, 12), "all": slice(0, None)}
TINY = dict(image_size=16, patch_size=4, dim=16, mlp_dim=32, heads=2, num_classes=10)


def softmax(x: np.ndarray) -> np.ndarray:
    x = np.exp(x - x.max(axis=1, keepdims=True))
    return x / x.sum(axis=1, keepdims=True)


def trained(values, labels, start, rate: float, size: int, steps: int) -> np.ndarray:
    """Trains by SGD with momentum 0.9; returns weights and bias `[features + 1, classes]`.

    Weights and biases are separate arrays in float64.
    """
    kernel, bias = start[:-1].astype(float), start[-1].astype(float)
    kernel_momentum, bias_momentum = np.zeros_like(kernel), np.zeros_like(bias)
    for step, batch in enumerate(batches(np.arange(len(values)), size, steps, seed=0)):
        x, targets = values[batch].astype(float), np.eye(CLASSES)[labels[batch]]
        error = (softmax(x @ kernel + bias) - targets) / size
        now = rate * size / 256 * (1 + np.cos(np.pi * step / steps)) / 2
        kernel_momentum = 0.9 * kernel_momentum + x.T @ error
        bias_momentum = 0.9 * bias_momentum + error.sum(axis=0)
        kernel, bias = kernel - now * kernel_momentum, bias - now * bias_momentum
    return np.vstack([kernel, bias])


def test_each_learning_rate_and_choice_of_features_is_trained_as_in_numpy():
    train, rates = features(150, seed=0), [0.02, 2.0]
    labels = train.labels[:, 0]
    probe = SgdProbe(CHOICES, MESH, batch_size=40, steps=25)
    found = probe.fit(train.values, labels, CLASSES, dict.fromkeys(CHOICES, rates))
    starts = probe.starts(20, CLASSES)
    for name, columns in CHOICES.items():
        for ours, rate in zip(found[name], rates, strict=True):
            expected = trained(train.values[:, columns], labels, starts[name], rate, 40, 25)
            assert np.abs(expected - starts[name]).max() > 0.01
            np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-5)


def test_an_epoch_has_each_image_at_most_once_and_only_the_given_rows():
    rows = np.arange(100, 150, 2)
    drawn = [*batches(rows, 8, 7, seed=0)]
    assert [len({*batch}) for batch in drawn] == [8] * 7 and {*np.concatenate(drawn)} <= {*rows}
    assert len({*np.concatenate(drawn[:3])}) == len({*np.concatenate(drawn[3:6])}) == 24
    again, other = (np.concatenate([*batches(rows, 8, 7, seed)]) for seed in (0, 1))
    assert np.array_equal(again, np.concatenate(drawn)) and not np.array_equal(again, other)


def test_learning_rates_are_chosen_without_test_images_and_all_training_images_are_fitted():
    train, test = features(300, seed=0), features(200, seed=1)
    probe = SgdProbe(CHOICES, MESH, rates=(0.05, 1e-6, 1e-3), batch_size=64, steps=60)
    found = probe(train, test, CLASSES)
    other = probe(train, test._replace(labels=np.roll(test.labels, 1, axis=0)), CLASSES)
    for name, fitted in found.items():
        assert [*fitted.held_out] == [1e-6, 1e-3, 0.05]
        assert fitted.rate == max(fitted.held_out, key=fitted.held_out.get) != 1e-6
        assert (other[name].held_out, other[name].rate) == (fitted.held_out, fitted.rate)
    assert other["all"].accuracy < 0.5 < found["all"].accuracy
    for name, fitted in found.items():
        weights = probe.fit(
            train.values, train.labels[:, 0], CLASSES, dict.fromkeys(CHOICES, [fitted.rate])
        )
        assert probe.accuracies(weights, test)[name] == [fitted.accuracy]
        kernel = np.asarray(weights[name][0])
        likeliest = (test.values[:, CHOICES[name]] @ kernel[:-1] + kernel[-1]).argmax(axis=1)
        assert (likeliest == test.labels[:, 0]).mean() == pytest.approx(fitted.accuracy, abs=1e-9)


def test_linearly_separable_classes_are_classified():
    rng = np.random.default_rng(0)
    values = rng.normal(size=(400, 6)).astype(np.float32)
    values = values[np.abs(values @ np.arange(6)) > 1]
    labels = (values @ np.arange(6) > 0).astype(np.int32)[:, None]
    train, test = (
        Features(values[part], labels[part], np.arange(len(values[part])))
        for part in (slice(0, 200), slice(200, None))
    )
    found = SgdProbe({"all": slice(0, None)}, MESH, steps=300)(train, test, 2)["all"]
    assert found.accuracy > 0.97 and max(found.held_out.values()) > found.held_out[1e-5]


def test_an_interrupted_fit_has_no_result():
    answers = iter([True, True, False])
    probe = SgdProbe(
        CHOICES, MESH, rates=(0.1,), batch_size=64, steps=20, go_on=lambda: next(answers)
    )
    assert probe(features(100, 0), features(30, 1), CLASSES) is None


def with_labels(images: int, labels: np.ndarray) -> Features:
    return features(images, 0)._replace(labels=labels.astype(np.int32))


@pytest.mark.parametrize(
    ("train", "classes", "message"),
    [
        (
            features(9, 0),
            CLASSES,
            "^a linear probe needs ten training images to hold one out; there are 9$",
        ),
        (with_labels(20, np.zeros((20, 1))), 1, "^a linear probe needs two classes; there are 1$"),
        (with_labels(20, np.zeros((20, 1))), 0, "^a linear probe needs two classes; there are 0$"),
        (
            with_labels(20, np.arange(20)[:, None]),
            20,
            "^the 2 validation images and the 18 other training images have no class in "
            "common: .* images a "
            "class$",
        ),
        (
            with_labels(20, np.full((20, 1), -1)),
            CLASSES,
            "^the training images: image 0 has 0 labels",
        ),
    ],
)
def test_images_that_cannot_be_probed_are_refused(train, classes, message):
    with pytest.raises(UserError, match=message):
        SgdProbe(CHOICES, MESH, steps=1)(train, features(10, 1), classes)


@pytest.mark.parametrize("norm", [dict(), dict(final_norm=False)])
def test_class_tokens_and_patches_equal_captured_ones(norm):
    model = random_model("ViT-B/16", **TINY | dict(depth=5, registers=2) | norm)
    images = random_images(model)
    compute, choices = choices_of(model)
    found = np.asarray(compute(model, images))
    captured = model(images, capture=("tokens",))[1]["tokens"]
    assert len(captured) == 6
    normalised = [x if model.norm is None else model.norm(x) for x in captured]
    tokens = [np.asarray(x[:, 0]) for x in normalised[-4:]]
    patches = np.asarray(normalised[-1][:, 1:17]).mean(axis=1)
    expected = {
        "class token": [tokens[-1]],
        "class token and patches": [tokens[-1], patches],
        "4 class tokens": tokens,
        "4 class tokens and patches": [*tokens, patches],
    }
    assert list(choices) == list(expected)
    for name, parts in expected.items():
        np.testing.assert_allclose(found[:, choices[name]], np.hstack(parts), atol=2e-5)
    np.testing.assert_allclose(
        found[:, choices["class token"]], representation(model, images), atol=2e-5
    )


def test_model_without_a_class_token_is_probed_by_its_pooled_features():
    model = random_model("ViT-B/16", **TINY | dict(depth=1, pooling="gap"))
    assert choices_of(model) == (representation, {"pooled features": slice(0, None)})


@pytest.mark.parametrize(
    ("arguments", "lacking", "why"),
    [
        (
            dict(depth=2),
            ["4 class tokens", "4 class tokens and patches"],
            "it has fewer than 4 layers",
        ),
        pytest.param(
            dict(depth=1, pooling="gap"),
            [
                "class token",
                "class token and patches",
                "4 class tokens",
                "4 class tokens and patches",
            ],
            "the model has no class token",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_suite_has_a_row_for_each_choice_and_for_the_best(arguments, lacking, why, tmp_path):
    values = TINY | arguments
    checkpoint = write(
        random_model("ViT-B/16", **values), tmp_path / "a.npz", "google", "ViT-B/16", **values
    )
    options = {"set": [data_set("digits:")], "probe_steps": 30}
    rows = {
        row.name.removeprefix("digits, SGD on "): row
        for row in run_suites(
            checkpoint, ["sgd_probe"], tmp_path / "out", options=options, log=str
        ).rows.values()
    }
    assert {name: row.note for name, row in rows.items() if row.accuracy is None} == dict.fromkeys(
        lacking, why
    )
    own, rate = rows["best features"].note.split(", rate ")
    figures = {name: row for name, row in rows.items() if row.accuracy is not None}
    assert rows["best features"].images == 360 and float(rate.split(",")[0]) in (
        1e-2,
        2e-2,
        5e-2,
        0.1,
    )
    assert rows["best features"].accuracy > 0.2
    if own in figures:
        assert (
            figures[own].note == f"rate {rate}"
            and figures[own].accuracy == figures["best features"].accuracy
        )
    else:
        assert own == "pooled features" and list(figures) == ["best features"]
