"""Tests of recall in image-text retrieval, against sorting all similarities."""

import numpy as np
import pytest

from vit_jax.models import retrieval
from vit_jax.models.retrieval import Paired, recalls


def unit(x: np.ndarray) -> np.ndarray:
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)


def drawn(seed: int = 0):
    """Returns images with one to five captions each, which are more similar to their own image."""
    rng = np.random.default_rng(seed)
    owners = np.repeat(np.arange(40), rng.integers(1, 6, 40))
    images = rng.normal(size=(40, 6))
    texts = images[owners] + 1.2 * rng.normal(size=(len(owners), 6))
    return unit(images), unit(texts), owners


def by_sorting(scores: np.ndarray, right: np.ndarray, k: int) -> float:
    """Returns the share of rows with a right column among the k highest scores."""
    order = np.argsort(-scores, axis=1)[:, :k]
    return float(np.take_along_axis(right, order, axis=1).any(axis=1).mean())


@pytest.mark.parametrize("at_once", [7, 2**22])
def test_recall_of_several_captions_is_that_of_sorting(at_once, monkeypatch):
    monkeypatch.setattr(retrieval, "MOST_COMPARED", 130 * at_once)
    images, texts, owners = drawn()
    found = recalls(Paired(images, texts, np.stack([owners, np.arange(len(owners))], axis=1)))
    scores, right = images @ texts.T, owners == np.arange(40)[:, None]
    for k in (1, 5, 10):
        assert found[f"recall@{k}_image_to_text"] == pytest.approx(by_sorting(scores, right, k))
        expected = by_sorting(scores.T, right.T, k)
        assert found[f"recall@{k}_text_to_image"] == pytest.approx(expected)
    assert 0.1 < found["recall@1_image_to_text"] < found["recall@10_image_to_text"] < 1


def test_a_caption_of_several_images_is_right_for_each_and_retrieved_once():
    images, texts, owners = drawn(1)
    distinct = np.arange(len(owners)) % 60  # The first captions belong to two images each.
    texts = texts[:60]
    found = recalls(Paired(images, texts, np.stack([owners, distinct], axis=1)))
    listed = texts[distinct]  # Each occurrence of a caption is a separate query.
    of_images = np.array([[t in distinct[owners == i] for t in range(60)] for i in range(40)])
    right = of_images[:, distinct]
    for k in (1, 5, 10):
        expected = by_sorting(images @ texts.T, of_images, k)
        assert found[f"recall@{k}_image_to_text"] == pytest.approx(expected)
        expected = by_sorting(listed @ images.T, right.T, k)
        assert found[f"recall@{k}_text_to_image"] == pytest.approx(expected)


@pytest.mark.parametrize("value", [1.0, np.nan])
def test_equal_or_nan_embeddings_retrieve_nothing(value):
    images = np.full((20, 4), value / 2, np.float32)
    pairs = np.stack([np.arange(20)] * 2, axis=1)
    assert set(recalls(Paired(images, images, pairs)).values()) == {0.0}
