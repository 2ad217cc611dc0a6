"""Tests of all objectives in the shared training step and the shared evaluation."""

import jax
import numpy as np
import pytest
from flax import nnx
from ml_collections import ConfigDict

from tests.training.objectives.small import SMALL, config_of
from vit_jax.data.sources import open_source
from vit_jax.data.views import View
from vit_jax.errors import UserError
from vit_jax.models import count_multiply_adds
from vit_jax.parallel.mesh import make_mesh, to_devices
from vit_jax.runs.evaluator import Evaluator
from vit_jax.training.objectives import handing_in
from vit_jax.training.objectives.objective import EVALUATION, Loss, Objective
from vit_jax.training.program import Program, make_program

OBJECTIVES = {"masked_patch": {"target": "pixels"}, "mae": {}, "fcmae": {}}
# Objectives that draw random numbers for each micro-batch separately.
OTHERS = {"dvae": {"codes": 16}}
MODELS = {
    "fcmae": dict(name="ConvNeXtV2-T", blocks=(1, 1), widths=(8, 16)),
    "dvae": dict(name="DVAE", blocks=(1, 1), widths=(8, 16)),
}


def program_of(name: str, classes: int = 0, **values) -> tuple[Program, ConfigDict]:
    """Returns a program and its config; with plain SGD, updates are proportional to gradients."""
    config = config_of(name, **(OBJECTIVES | OTHERS).get(name, {}))
    config.model.update(MODELS.get(name, dict(name="ViT-Ti/4", **SMALL)))
    plain = {"name": "sgd", "beta1": 0.0, "weight_decay": 0.0, "clip_norm": 0.0}
    plain |= {"learning_rate": 0.1, "schedule": "constant", "warmup_steps": 0}
    config.optimizer.update(plain)
    config.batch_size, config.data.image_size, config.data.test_resize = 16, 16, 16
    config.update_from_flattened_dict(values)
    classes = classes or (OBJECTIVES | OTHERS).get(name, {}).get("codes", 0)
    program = make_program(config, num_classes=classes, steps=10, mesh=make_mesh(config.mesh))
    return program, config


class OfParts(Objective):
    """An objective defined outside the package, with labels and with views of two sizes."""

    labels = True

    @staticmethod
    def views(config):
        return View(), View("part", count=3, size=8)

    @classmethod
    def make(cls, config, model, steps, rngs):
        return cls()

    def __call__(self, model, batch, context=EVALUATION):
        parts = model.resized(8)(batch["part"].reshape(-1, 8, 8, 3)).reshape(-1, 9)
        return Loss((model(batch["image"]) - batch["labels"]).sum(-1) + parts.sum(-1))


def test_flops_are_counted_of_any_objectives_views():
    with handing_in(OfParts):
        program, _ = program_of("OfParts", classes=3)
    model = nnx.merge(program.graphdef, program.state["params"])
    assert program.flops() > 6 * count_multiply_adds(model)


def batch_of(mesh) -> dict:
    images = np.random.default_rng(0).integers(256, size=(16, 16, 16, 3), dtype=np.uint8)
    return to_devices({"image": images, "labels": np.full((16, 1), -1, np.int32)}, mesh)


def stepped(name: str, **values) -> tuple[dict, list[dict]]:
    """Returns the weights after two steps, as host arrays, and each step's metrics."""
    program, config = program_of(name, **values)
    state, metrics = program.initial_state(0), []
    for _ in range(2):
        state, sums = program.train_step(state, program.initial_metrics(), batch_of(program.mesh))
        metrics.append(jax.device_get(sums))
    return jax.device_get({name: state[name] for name in ("params", "extra")}), metrics


@pytest.mark.slow
@pytest.mark.parametrize("name", OBJECTIVES)
def test_micro_batches_use_the_masks_of_the_whole_batch(name):
    (whole, metrics), (parts, same) = (stepped(name, micro_batches=count) for count in (1, 4))
    for one, other in zip(
        jax.tree.leaves((whole, metrics)), jax.tree.leaves((parts, same)), strict=True
    ):
        np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-6)


@pytest.mark.one_variant
@pytest.mark.parametrize("name", OBJECTIVES | OTHERS)
def test_random_draws_differ_between_steps_and_repeat_bit_exactly(name):
    still = {"optimizer.learning_rate": 0.0}
    (_, (first, second)), (_, again) = stepped(name, **still), stepped(name, **still)
    assert first["loss"] != second["loss"]
    assert [one["loss"] for one in again] == [first["loss"], second["loss"]]


@pytest.mark.one_variant
@pytest.mark.parametrize("name", OBJECTIVES | OTHERS)
def test_objectives_parameters_are_trained_with_the_models(name):
    program, _ = program_of(name)
    before = jax.device_get(program.initial_state(0)["extra"])
    after, _ = stepped(name)
    changed = jax.tree.map(lambda old, new: not np.array_equal(old, new), before, after["extra"])
    assert all(jax.tree.leaves(changed)), changed


@pytest.mark.one_variant
@pytest.mark.parametrize("name", OBJECTIVES | OTHERS)
def test_evaluation_does_not_depend_on_the_batch(name):
    figures = []
    splits = {"test": open_source("digits", "test[:40]")}
    for batch_size in (16, 40):
        program, config = program_of(name, batch_size=batch_size)
        state = program.initial_state(0)
        evaluate = Evaluator(program, splits, config, print)
        figures.append(evaluate("test", program.evaluated(state), lambda: True))
    assert figures[0]["images"] == 40
    assert figures[0] == pytest.approx(figures[1], rel=1e-5)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"augment.mixup": 0.2}, "augment.mixup is 0.2 and must be 0"),
        ({"augment.level": "medium1"}, "augment.mixup is 0.2 and must be 0"),
        ({"augment.erasing": 0.5}, "augment.erasing is 0.5 and must be 0"),
        ({"finetune.train": "lora"}, "trains all parameters"),
        (
            {"optimizer.average": 0.9},
            "keeps no average of the parameters: config.optimizer.average is 0.9",
        ),
    ],
)
def test_unsupported_options_of_an_objective_without_labels_are_refused(values, words):
    with pytest.raises(UserError, match=words):
        program_of("mae", **values)


def test_objective_for_a_resnet_is_refused():
    with pytest.raises(UserError, match="must be a ViT, not a hybrid or a ResNet"):
        config = config_of("mae")
        config.model.update(dict(name="BiT-R50x1", resnet_blocks=(1, 1)))
        make_program(config, num_classes=0, steps=20_000, mesh=make_mesh(config.mesh))


def test_a_second_head_without_a_teacher_is_refused_in_training():
    config = config_of("classification")
    config.model.update(dict(name="ViT-Ti/4", distillation="heads", **SMALL))
    with pytest.raises(
        UserError, match="no teacher is given: give config.objective.name='distillation'"
    ):
        make_program(config, num_classes=5, steps=20_000, mesh=make_mesh(config.mesh))
