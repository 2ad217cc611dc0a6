"""Self-distillation: its loss, its memory, and that neither depends on the devices."""

import jax
import numpy as np
import pytest

from tests.training.objectives.small import SMALL, config_of
from vit_jax.data.sources import open_source
from vit_jax.errors import UserError
from vit_jax.parallel.mesh import make_mesh, to_devices
from vit_jax.planning.estimate import make_workload
from vit_jax.runs.assemble import pictures
from vit_jax.runs.evaluator import Evaluator
from vit_jax.runs.loop import as_items, from_items
from vit_jax.training.program import abstract_batch, make_program


def setup(devices=None, **values):
    config = config_of("dino", head_hidden=16, prototypes=12, teacher_momentum=0.5)
    config.model.update(dict(name="ViT-Ti/4", **SMALL))
    plain = {"name": "sgd", "beta1": 0.0, "weight_decay": 0.0, "clip_norm": 0.0}
    plain |= {"learning_rate": 0.5, "schedule": "constant", "warmup_steps": 0}
    config.optimizer.update(plain)
    config.batch_size, config.data.image_size, config.data.test_resize = 16, 16, 16
    config.update_from_flattened_dict(values)
    mesh = make_mesh(config.mesh, devices)
    return make_program(config, num_classes=0, steps=10, mesh=mesh), config


def batch_of(mesh, number=0):
    images = np.random.default_rng(number).integers(256, size=(16, 2, 16, 16, 3), dtype=np.uint8)
    return to_devices({"image": images, "labels": np.full((16, 1), -1, np.int32)}, mesh)


def stepped(steps=2, **values):
    program, _ = setup(**values)
    state, sums = program.initial_state(0), program.initial_metrics()
    for number in range(steps):
        state, sums = program.train_step(state, sums, batch_of(program.mesh, number))
    return jax.device_get((state["params"], state["extra"], state["memory"], sums))


def assert_equal(one, other, rtol=1e-5, atol=1e-6):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)


@pytest.mark.slow
def test_eight_devices_train_as_one():
    assert_equal(stepped(), stepped(devices=jax.devices()[:1]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "values", [{"micro_batches": 2}, {"micro_batches": 2, "optimizer.sum_gradients": "float32_once"}]
)
def test_what_is_seen_is_that_of_the_whole_batch(values):
    assert_equal(stepped(), stepped(**values))


def test_teacher_and_centre_follow_by_their_definition():
    program, _ = setup()
    state = program.initial_state(0)
    first = jax.device_get(state["memory"])
    state, _ = program.train_step(state, program.initial_metrics(), batch_of(program.mesh))
    share = 0.5 * (1 + np.cos(np.pi * 1 / 10)) / 2
    wanted = jax.tree.map(
        lambda old, new: old + share * (new - old), first["teacher"], jax.device_get(state["params"])
    )
    assert_equal(wanted, jax.device_get(state["memory"]["teacher"]))
    assert np.abs(first["centre"]).max() == 0 < np.abs(state["memory"]["centre"]).max()
    assert program.judged(state).params is state["memory"]["teacher"]


def test_memory_survives_a_checkpoints_items():
    program, _ = setup()
    state, metrics = program.initial_state(0), program.initial_metrics()
    items = as_items(state, metrics)
    assert {"teacher", "teacher_head", "centre", "mean"} < set(items)
    again, _ = from_items(items)
    assert jax.tree.structure(again) == jax.tree.structure(state)


def test_evaluation_does_not_depend_on_the_batch():
    figures = []
    for batch_size in (16, 40):
        program, config = setup(batch_size=batch_size)
        splits = {"test": open_source("digits", "test[:40]")}
        evaluate = Evaluator(program, splits, config, print, pictures(config))
        figures.append(evaluate("test", program.judged(program.initial_state(0)), lambda: True))
    assert figures[0]["images"] == 40
    assert figures[0] == pytest.approx(figures[1], rel=1e-5)


def test_plan_counts_both_views_and_the_teacher():
    program, config = setup()
    assert abstract_batch(config, program.mesh)["image"].shape == (16, 2, 16, 16, 3)
    config.data.source, config.epochs = "digits", 5.0
    supervised = config.copy_and_resolve_references()
    supervised.objective.name = "classification"
    ratio = make_workload(config, None).multiply_adds / make_workload(supervised, None).multiply_adds
    # A third of a forward pass for each of the teacher's two; the last layer reads one token only.
    assert 8 / 3 * 0.7 < ratio < 8 / 3 * 1.2


def test_mixed_images_are_refused():
    with pytest.raises(UserError, match="augment.mixup is 0.2 and must be 0"):
        setup(**{"augment.mixup": 0.2})
