"""Times the least squares fit of few-shot evaluation, and compares it with NumPy in float64."""

import time

import numpy as np

from vit_jax.benchmarks.figures import Table
from vit_jax.evaluation.least_squares import CONSTANT, GUARD, accuracy, fit
from vit_jax.parallel.mesh import make_mesh, over_devices

CLASSES, FEATURES, TEST_IMAGES, PENALTY = 1000, 1024, 50_000, 2.0**10


def measure(shots: tuple[int, ...] = (1, 5, 10, 25)) -> dict:
    """Prints and returns the seconds of a least squares fit with 1,000 classes and 1,024 features.

    Compilation is not included. `shots` are numbers of images per class.
    """
    mesh = make_mesh()
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(CLASSES, FEATURES)).astype(np.float32)
    mixing = rng.normal(size=(FEATURES, FEATURES)).astype(np.float32)

    def draw(images: int) -> tuple[np.ndarray, np.ndarray]:
        labels = np.arange(images, dtype=np.int32) % CLASSES
        noise = 4 * rng.normal(size=(images, FEATURES)).astype(np.float32)
        return (centres[labels] + noise) @ mixing, labels

    test, test_labels = draw(TEST_IMAGES)
    placed = over_devices(test, mesh), over_devices(test_labels[:, None], mesh, fill=-1)
    sizes = f"{CLASSES:,} classes, {FEATURES:,} features, penalty {PENALTY:g}"
    print(f"{sizes}; {TEST_IMAGES:,} test images")
    columns = {"fit, s": ".2f", "scores, s": ".2f", "accuracy": ".1%"}
    table = Table("images per class", columns | {"difference from NumPy": ".0e"})
    for count in shots:
        features, labels = draw(count * CLASSES)
        for _ in range(2):  # The first iteration compiles.
            started = time.perf_counter()
            (classifier,) = fit(features, labels, CLASSES, [PENALTY], mesh)
            fitted = time.perf_counter()
            share = accuracy(classifier, *placed, mesh)
            scored = time.perf_counter()
        plain = _plain(features.astype(np.float64), labels)
        error = np.linalg.norm(classifier.coefficients - plain) / np.linalg.norm(plain)
        table.row(str(count), fitted - started, scored - fitted, share, error)
    return table.figures


def _plain(features: np.ndarray, labels: np.ndarray) -> np.ndarray:
    standard = (features - features.mean(axis=0)) / (features.std(axis=0) + GUARD)
    rows = np.hstack([standard, np.full((len(features), 1), CONSTANT)])
    targets = 2 * np.eye(CLASSES)[labels] - 1
    if len(rows) < rows.shape[1]:
        return rows.T @ np.linalg.solve(rows @ rows.T + PENALTY * np.eye(len(rows)), targets)
    return np.linalg.solve(rows.T @ rows + PENALTY * np.eye(rows.shape[1]), rows.T @ targets)
