"""Least squares as defined in section 6.2 of the protocol, in NumPy float64."""

import numpy as np


def system(features: np.ndarray, labels: np.ndarray, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns standardized features with the constant 100, and targets of +1 and -1."""
    features = features.astype(np.float64)
    standard = (features - features.mean(axis=0)) / (features.std(axis=0) + 1e-5)
    constant = np.full((len(features), 1), 100.0)
    return np.hstack([standard, constant]), 2 * np.eye(classes)[labels] - 1


def primal(features, labels, classes, penalty) -> np.ndarray:
    a, y = system(features, labels, classes)
    return np.linalg.solve(a.T @ a + penalty * np.eye(a.shape[1]), a.T @ y)


def dual(features, labels, classes, penalty) -> np.ndarray:
    a, y = system(features, labels, classes)
    return a.T @ np.linalg.solve(a @ a.T + penalty * np.eye(len(a)), y)


def accuracy(coefficients, train, test, labels) -> float:
    standard = (test - train.mean(axis=0)) / (train.std(axis=0) + 1e-5)
    scores = np.hstack([standard, np.full((len(test), 1), 100.0)]) @ coefficients
    return float((scores.argmax(axis=1) == labels).mean())
