"""Weighted k-NN classification on frozen features, as in DINO (Caron et al., 2021)."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from vit_jax.errors import UserError
from vit_jax.evaluation.features import Features, single_labels
from vit_jax.parallel.mesh import everywhere, over_devices, replicated, split_batch, whole_batch

NEIGHBOURS = (10, 20, 100, 200)
TRAIN_BLOCK, TEST_BLOCK = 4096, 2048  # Number of images in one block of the similarity matrix.


def knn_accuracies(
    train: Features,
    test: Features,
    num_classes: int,
    mesh: Mesh,
    neighbours: Sequence[int],
    *,
    temperature: float = 0.07,
) -> dict[int, float]:
    """Returns the test accuracy of weighted k-NN for each number of neighbours.

    The nearest training images by cosine similarity vote for their class with the weight
    exp(similarity / temperature). If two images are equally similar, or two classes have equally
    many votes, the one with the lower index wins. A prediction is correct if it is one of the test
    image's labels.

    Raises:
      UserError: there are fewer training images than neighbours, or a training image does not have
        exactly one label.
    """
    most = max(neighbours)
    for count in neighbours:
        if not 1 <= count <= len(train.values):
            raise UserError(
                f"{count} neighbours of {len(train.values)} training images; use 1 to "
                f"{len(train.values)}"
            )
    labels = single_labels(train.labels, "the training images")
    size = whole_batch(mesh, min(TEST_BLOCK, len(test.values)))
    starts = range(0, len(test.values), size)
    queries, nearest = [], []
    for start in starts:
        queries.append(over_devices(unit(test.values[start : start + size]), mesh, size))
        similarity = np.full((size, most), -np.inf, np.float32)
        classes = np.zeros((size, most), np.int32)
        nearest.append((over_devices(similarity, mesh), over_devices(classes, mesh)))
    for start in range(0, len(train.values), TRAIN_BLOCK):
        rows = everywhere(unit(train.values[start : start + TRAIN_BLOCK]), mesh)
        classes = everywhere(labels[start : start + TRAIN_BLOCK], mesh)
        for place, query in enumerate(queries):
            nearest[place] = _closer(mesh)(query, *nearest[place], rows, classes)
    counts = tuple(sorted(neighbours))
    right = np.zeros(len(counts), np.int64)
    for start, found in zip(starts, nearest, strict=True):
        targets = over_devices(test.labels[start : start + size], mesh, size, fill=-1)
        right += jax.device_get(
            _count_right(mesh, num_classes, counts)(*found, targets, temperature)
        )
    shares = dict(zip(counts, (right / len(test.values)).tolist(), strict=True))
    return {count: shares[count] for count in neighbours}


def unit(values: np.ndarray) -> np.ndarray:
    """Scales the features of each image to unit L2 norm. Features of zeros stay unchanged."""
    return values / np.maximum(np.linalg.norm(values, axis=1, keepdims=True), 1e-12)


@functools.cache
def _closer(mesh: Mesh):
    """Compiles a function that updates the nearest neighbours with a block of training images.

    Its arguments are the features of the test images, the similarities and the classes of their
    nearest neighbours so far (both `[test images, neighbours]`), and the features and the classes
    of the block. It returns the new similarities and classes.
    """

    def closer(queries, similarity, classes, rows, row_classes):
        similarities = jnp.matmul(queries, rows.T, precision="highest")
        similarities = jnp.concatenate([similarity, similarities], axis=1)
        similarity, places = jax.lax.top_k(similarities, similarity.shape[1])
        row_classes = jnp.broadcast_to(row_classes, (len(queries), len(row_classes)))
        candidates = jnp.concatenate([classes, row_classes], axis=1)
        return similarity, jnp.take_along_axis(candidates, places, axis=1)

    rows, copied = split_batch(mesh), replicated(mesh)
    return jax.jit(
        closer, in_shardings=(rows, rows, rows, copied, copied), out_shardings=(rows, rows)
    )


@functools.cache
def _count_right(mesh: Mesh, num_classes: int, counts: tuple[int, ...]):
    """Compiles the weighted vote of the nearest training images of each test image.

    The compiled function returns the number of correctly classified images for each number of
    neighbours in `counts`, which must be in ascending order.
    """

    def count(similarity, classes, labels, temperature):
        # The largest similarity is subtracted from all similarities of an image, because exp(1 /
        # temperature) could overflow.
        weights = jnp.exp((similarity - similarity[:, :1]) / temperature)
        image = jnp.arange(len(classes))[:, None]
        votes = jnp.zeros((len(classes), num_classes))
        right = []
        for before, upto in zip((0, *counts), counts, strict=False):
            votes = votes.at[image, classes[:, before:upto]].add(weights[:, before:upto])
            right.append((votes.argmax(axis=1)[:, None] == labels).any(axis=1).sum())
        return jnp.stack(right)

    rows, copied = split_batch(mesh), replicated(mesh)
    return jax.jit(count, in_shardings=(rows, rows, rows, copied), out_shardings=copied)
