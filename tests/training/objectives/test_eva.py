"""Tests of EVA: the loss on a frozen teacher's features, and errors for unsuitable teachers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from PIL import Image

import vit_jax
from tests.training.objectives.small import (
    SMALL,
    batch_of,
    config_of,
    losses,
    noisy,
    pictures,
    random_images,
    with_frozen,
)
from vit_jax.data.sources import open_source
from vit_jax.errors import UserError
from vit_jax.models import count_multiply_adds, create_model
from vit_jax.parallel.mesh import make_mesh
from vit_jax.runs.assemble import evaluation_views
from vit_jax.runs.evaluator import Evaluator
from vit_jax.runs.frozen_model import open_frozen
from vit_jax.training.objectives import objective_of
from vit_jax.training.objectives.patch_teacher import cosine
from vit_jax.training.program import make_program

SIZE, PATCHES, MASKED = 16, 16, 7
TEACHER = dict(image_size=SIZE, dim=24, depth=2, mlp_dim=32, heads=2, mean=0.3, std=0.2)


@pytest.fixture(scope="module")
def teachers(tmp_path_factory) -> dict[str, str]:
    """Writes a checkpoint of each kind of teacher, and returns their folders by kind."""
    kinds = {
        "plain": ("ViT-Ti/4", TEACHER),
        "of larger patches": ("ViT-Ti/8", TEACHER | {"image_size": 32}),
        "with a head": ("ViT-Ti/4", TEACHER | {"num_classes": 5}),
        "with attention pooling": ("ViT-Ti/4", TEACHER | {"num_classes": 5, "pooling": "map"}),
        "of no patches": ("ConvNeXt-T", dict(image_size=32, blocks=(1, 1), widths=(8, 16))),
    }
    folder = tmp_path_factory.mktemp("teachers")
    for kind, (name, values) in kinds.items():
        model = noisy(create_model(name, **{"num_classes": 0} | values), 2)
        vit_jax.save_model(model, folder / kind, library="timm", log=str)
    return {kind: str(folder / kind) for kind in kinds}


def made(teacher: str, pooling="cls", **values):
    """Returns a small ViT, and the objective with its teacher."""
    config = config_of("eva", teacher=teacher, **values)
    config.data.image_size = SIZE
    vit = noisy(create_model("ViT-Ti/4", num_classes=0, image_size=SIZE, pooling=pooling, **SMALL))
    return vit, with_frozen(config, vit)


@pytest.mark.parametrize("features", ["tokens", "head"])
def test_loss_is_one_minus_the_cosine_to_the_teachers_features_of_masked_patches(
    teachers, features
):
    model, objective = made(teachers["with a head"], teacher_features=features)
    batch = batch_of(objective)
    images, masked = np.asarray(batch["image"]), np.asarray(batch["masked"])
    teacher = vit_jax.load_model(teachers["with a head"], log=str)
    said = np.asarray(teacher.features(images, dense=True), np.float64).reshape(
        len(images), PATCHES, -1
    )
    if features == "head":
        said = said @ np.asarray(teacher.head.kernel[...]) + np.asarray(teacher.head.bias[...])

    @jax.jit
    def encode(images, masked):
        embeddings = jnp.where(masked[..., None], objective.mask[...], model.patches(images))
        return model.norm(model.encode(model.assemble(embeddings)))

    tokens = np.asarray(encode(images, masked), np.float64)[:, 1:]
    predicted = tokens @ np.asarray(objective.head.kernel[...]) + np.asarray(
        objective.head.bias[...]
    )
    cosines = (
        (predicted * said).sum(-1)
        / np.linalg.norm(predicted, axis=-1)
        / np.linalg.norm(said, axis=-1)
    )
    expected = 1 - np.array([row[which].mean() for row, which in zip(cosines, masked, strict=True)])
    found = losses(objective, model, batch)
    np.testing.assert_allclose(found.each, expected, rtol=1e-4)
    np.testing.assert_allclose(found.metrics["cosine"], 1 - expected, rtol=1e-4, atol=1e-5)


def test_each_image_has_the_configured_share_of_masked_patches(teachers):
    _, objective = made(teachers["plain"])
    assert np.asarray(batch_of(objective)["masked"]).sum(1).tolist() == [MASKED] * 3


def test_the_patch_embedding_gets_its_share_of_the_gradient(teachers):
    def gradient(share):
        model, objective = made(teachers["plain"], embedding_gradient=share)
        loss = nnx.grad(lambda model, objective, batch: objective(model, batch).each.mean())
        return nnx.jit(loss)(model, objective, batch_of(objective))

    whole, tenth = gradient(1.0), gradient(0.1)
    kernels = (np.asarray(x["patch_embedding"]["kernel"][...]) for x in (whole, tenth))
    one, other = kernels
    np.testing.assert_allclose(other, one / 10, rtol=1e-4, atol=1e-5 * np.abs(other).max())
    np.testing.assert_allclose(tenth["cls"][...], whole["cls"][...], rtol=1e-3, atol=1e-6)


def test_the_teacher_gets_the_same_crop_at_its_own_size(teachers):
    model, objective = made(teachers["of larger patches"], teacher_size=32)
    config = config_of("eva", teacher=teachers["of larger patches"], teacher_size=32)
    config.data.image_size = SIZE
    image, taught = objective_of(config.objective.name).views(config)
    assert (taught.size, taught.same_rectangle_as) == (32, image.name)
    batch = batch_of(objective) | {taught.name: random_images(3, 32, 32)}
    changed = batch | {taught.name: 255 - batch[taught.name]}
    found, other = (losses(objective, model, one).each for one in (batch, changed))
    assert not np.allclose(found, other)


def test_a_run_draws_pictures_with_a_teacher_of_another_image_size(teachers):
    config = config_of("eva", teacher=teachers["of larger patches"], teacher_size=32)
    config.model.update(dict(name="ViT-Ti/4", **SMALL))
    config.optimizer.warmup_steps = 0
    config.batch_size, config.data.image_size, config.data.test_resize = 4, SIZE, SIZE
    frozen = open_frozen(config)
    mesh = make_mesh(config.mesh)
    program = make_program(config, num_classes=0, steps=10, mesh=mesh, frozen=frozen.model)
    splits = {"test": open_source("digits", "test[:8]")}
    evaluate = Evaluator(program, splits, config, print, evaluation_views(config))
    drawn = evaluate.pictures(
        "test", program.evaluated(program.initial_state(0, frozen=frozen.read())), 3
    )
    assert drawn.shape == (3, 3, SIZE, SIZE, 3)
    seen, visible, _ = drawn
    hidden = (visible != seen).any(-1)
    assert (visible[hidden] == 128).all() and 0 < hidden.mean() < 1
    np.testing.assert_array_equal(seen, evaluate.images(3))


def test_evaluation_crops_have_the_sizes_of_the_student_and_the_teacher():
    rng, config = np.random.default_rng(0), config_of("eva", teacher="", teacher_size=24)
    config.data.image_size, config.data.test_resize, config.data.interpolation = SIZE, 20, "bicubic"
    config.augment.color_jitter = (0.4, 0.4, 0.4)  # Applies to training images only.
    own, taught = evaluation_views(config)
    for image in rng.integers(256, size=(2, 40, 60, 3), dtype=np.uint8):
        for picture, size, resize in ((own, SIZE, 20), (taught, 24, 30)):
            resized = Image.fromarray(image).resize(
                (resize * 60 // 40, resize), Image.Resampling.BICUBIC
            )
            middle = [round((side - size) / 2) for side in resized.size]
            expected = resized.crop((*middle, *(start + size for start in middle)))
            assert picture.augment is None
            np.testing.assert_array_equal(picture.crop(image, rng), np.asarray(expected))


def test_zero_vectors_have_finite_gradients():
    one, other = jnp.zeros((2, 3)), jnp.array([[0.0, 0, 0], [1, 2, 2]])
    value, gradients = jax.value_and_grad(lambda *x: cosine(*x).sum(), (0, 1))(one, other)
    assert value == 0 and all(np.isfinite(x).all() for x in gradients)


def test_a_teacher_of_other_patches_is_refused_with_the_size_that_fits(teachers):
    with pytest.raises(
        UserError, match=r"has 2x2 patches of 16x16 pixels, and the model 4x4: .*teacher_size=32$"
    ):
        made(teachers["of larger patches"])


def test_a_teacher_without_patches_is_refused(teachers):
    with pytest.raises(UserError, match="has no patch features: use a ViT"):
        made(teachers["of no patches"])


def test_head_features_of_a_teacher_without_a_head_are_refused(teachers):
    with pytest.raises(UserError, match="has no head: config.objective.teacher_features='tokens'"):
        made(teachers["plain"], teacher_features="head")


def test_head_features_after_attention_pooling_are_refused(teachers):
    words = r"head that reads more than a patch's last token.*teacher_features='tokens'"
    with pytest.raises(UserError, match=words):
        made(teachers["with attention pooling"], teacher_features="head")


@pytest.mark.parametrize("ratio", [0.01, 0.99])
def test_masks_of_all_patches_or_of_none_are_refused(teachers, ratio):
    with pytest.raises(UserError, match="of 16 patches; it must leave some, and mask some"):
        made(teachers["plain"], mask_ratio=ratio)


def test_pictures_show_the_patches_whose_teacher_features_are_predicted(teachers):
    model, objective = made(teachers["plain"])
    batch = batch_of(objective)
    masked = np.asarray(batch["masked"])
    said = np.asarray(objective.teacher_features(batch))
    image, place = map(int, np.argwhere(~masked)[5])
    # The head now predicts the teacher's features of this patch for every patch.
    objective.head.kernel[...] = jnp.zeros_like(objective.head.kernel[...])
    objective.head.bias[...] = jnp.asarray(said[image, place])
    visible, predicted = pictures(objective, model, batch)
    row, column = 4 * (place // 4), 4 * (place % 4)
    patch = np.asarray(batch["image"])[image, row : row + 4, column : column + 4]
    first = int(np.flatnonzero(masked[0])[0])
    row, column = 4 * (first // 4), 4 * (first % 4)
    np.testing.assert_array_equal(
        np.asarray(predicted)[0, row : row + 4, column : column + 4], patch
    )
    assert (np.asarray(visible)[0, row : row + 4, column : column + 4] == 127.5).all()


def test_multiply_adds_are_the_students_and_a_third_of_the_teachers(teachers):
    model, objective = made(teachers["plain"], pooling="gap")
    head = MASKED * SMALL["dim"] * TEACHER["dim"]
    taught = count_multiply_adds(objective.frozen)
    assert objective.multiply_adds(model) == count_multiply_adds(model) + head + taught / 3
