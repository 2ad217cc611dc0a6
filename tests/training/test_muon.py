"""Tests of Muon: updates against NumPy, and a run with it."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vit_jax
from tests.system.conftest import parameters
from tests.test_config import load
from vit_jax.config import base_config
from vit_jax.parallel.mesh import make_mesh
from vit_jax.training.optimizer import make_optimizer
from vit_jax.training.program import make_program

BETA1, BETA2, EPSILON = 0.95, 0.99, 1e-8


def updates(gradients: list[dict], **values) -> list[dict]:
    """Returns each gradient's update at a learning rate of 1, without clipping and weight decay."""
    config = base_config().optimizer
    config.update(
        dict(name="muon", beta1=BETA1, beta2=BETA2, weight_decay=0.0, clip_norm=0.0) | values
    )
    optimizer = make_optimizer(config, lambda t: jnp.ones(()), weight_decay=config.weight_decay)
    weights = jax.tree.map(jnp.ones_like, gradients[0])
    state = optimizer.init(weights)
    found = []
    for gradient in gradients:
        update, state = optimizer.update(gradient, state, weights)
        found.append(update)
    return found


def tree_of(path: str, x) -> dict:
    for name in reversed(path.split("/")):
        x = {name: x}
    return x


def nesterov(gradients: list[np.ndarray]) -> list[np.ndarray]:
    """Returns Nesterov momentum for each gradient, with bias correction."""
    mean, found = 0.0, []
    for t, gradient in enumerate(gradients, start=1):
        mean = BETA1 * mean + (1 - BETA1) * gradient
        ahead = BETA1 * mean / (1 - BETA1 ** (t + 1))
        found.append(ahead + (1 - BETA1) * gradient / (1 - BETA1**t))
    return found


def orthogonal(matrix: np.ndarray) -> np.ndarray:
    """Applies five Newton-Schulz steps with Jordan's coefficients."""
    x = matrix / np.linalg.norm(matrix)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x


def muon(gradients: list[np.ndarray]) -> list[np.ndarray]:
    """Returns the updates of a matrix; the root mean square of an orthogonal update is 0.2."""
    return [-0.2 * max(x.shape) ** 0.5 * orthogonal(x) for x in nesterov(gradients)]


def adam(gradients: list[np.ndarray]) -> list[np.ndarray]:
    square, found = 0.0, []
    for t, (gradient, mean) in enumerate(zip(gradients, nesterov(gradients), strict=True), start=1):
        square = BETA2 * square + (1 - BETA2) * gradient**2
        found.append(-mean / (np.sqrt(square / (1 - BETA2**t)) + EPSILON))
    return found


def draw(*shape: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.normal(size=shape).astype(np.float32) for _ in range(3)]


@pytest.mark.one_variant
@pytest.mark.parametrize(
    ("path", "shape", "matrix"),
    [
        ("params/blocks/00/mlp/fc1/kernel", (4, 12), (4, 12)),
        ("params/blocks/00/mlp/fc2/kernel", (12, 4), (12, 4)),
        ("params/blocks/00/attention/out/kernel", (2, 3, 4), (6, 4)),
        ("params/resnet/stages/0/conv2/kernel", (3, 3, 2, 4), (18, 4)),
        ("extra/objective/blocks/00/mlp/fc2/kernel", (12, 4), (12, 4)),
        ("extra/lora/blocks.00.attention.out.kernel/down", (2, 3, 4), (6, 4)),
    ],
)
def test_kernel_is_a_matrix_of_inputs_by_outputs(path, shape, matrix):
    gradients = draw(*shape)
    expected = muon([x.reshape(matrix) for x in gradients])
    found = updates([tree_of(path, x) for x in gradients])
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(
            jax.tree.leaves(ours)[0], theirs.reshape(shape), rtol=1e-3, atol=1e-4
        )


@pytest.mark.parametrize(
    ("path", "shape"),
    [("attention/qkv/kernel", (6, 3, 2, 4)), ("mlp/fc1/kernel", (6, 2, 9))],
)
def test_fused_projections_are_orthogonalized_separately(path, shape):
    gradients = draw(*shape)
    found = updates([tree_of(f"params/blocks/00/{path}", x) for x in gradients])
    for part in range(shape[1]):
        expected = muon([x[:, part].reshape(6, -1) for x in gradients])
        for ours, theirs in zip(found, expected, strict=True):
            part_of_ours = jax.tree.leaves(ours)[0][:, part]
            np.testing.assert_allclose(part_of_ours.reshape(6, -1), theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("path", "shape"),
    [
        ("params/head/kernel", (8, 5)),
        ("params/patch_embedding/kernel", (2, 2, 3, 8)),
        ("params/position_embedding/table", (1, 5, 8)),
        ("params/blocks/00/attention/qkv/bias", (3, 2, 4)),
        ("params/norm/scale", (8,)),
    ],
)
def test_other_parameters_are_updated_by_adam(path, shape):
    gradients = draw(*shape)
    found = updates([tree_of(path, x) for x in gradients])
    for ours, theirs in zip(found, adam(gradients), strict=True):
        np.testing.assert_allclose(jax.tree.leaves(ours)[0], theirs, rtol=1e-4)


def small():
    config = load("quickstart")
    config.model.update(dict(dim=32, depth=1, mlp_dim=64, heads=2))
    config.optimizer.update(dict(name="muon", warmup_steps=1))
    config.data.workers = 0
    config.update(dict(batch_size=32, steps=4, evaluate_every=4))
    config.checkpoint.update(dict(every=2, keep_last=2))
    return config


def test_state_has_one_moment_for_a_kernel_and_two_for_other_parameters():
    config = small()
    state = make_program(config, num_classes=10, steps=4, mesh=make_mesh(config.mesh)).state
    kept = sum(x.size for x in jax.tree.leaves(state["optimizer"]) if x.ndim)
    sizes = {"blocks": 0, "rest": 0}
    for path, x in jax.tree.leaves_with_path(state["params"]):
        within = path[0].key == "blocks" and path[-1].key == "kernel"
        sizes["blocks" if within else "rest"] += x.size
    assert (
        kept == sizes["blocks"] + 2 * sizes["rest"] + 3
    )  # The other 3 numbers are the Newton-Schulz coefficients.


@pytest.mark.slow
def test_a_resumed_run_is_bit_exact(tmp_path, capsys):
    vit_jax.train(small(), tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "stopped")
    shutil.rmtree(tmp_path / "stopped" / "checkpoints" / "4")
    vit_jax.train(small(), tmp_path / "stopped")
    assert (
        f"continuing from {tmp_path / 'stopped' / 'checkpoints' / '2'}" in capsys.readouterr().out
    )
    for one, other in zip(
        parameters(tmp_path / "stopped"), parameters(tmp_path / "whole"), strict=True
    ):
        np.testing.assert_array_equal(one, other)
