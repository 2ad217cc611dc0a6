"""Tests of BEiT: the loss on a frozen tokeniser's codes, and errors for unsuitable tokenisers."""

from functools import partial

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
    keys,
    losses,
    noisy,
    pictures,
    random_images,
    with_frozen,
)
from vit_jax.command import read_config
from vit_jax.errors import UserError
from vit_jax.models import (
    abstract,
    count_multiply_adds,
    count_parameters,
    create_model,
    model_factory,
)
from vit_jax.models.model_card import traced_multiply_adds
from vit_jax.runs.assemble import training_views
from vit_jax.training.objectives import objective_of
from vit_jax.training.objectives.beit import BEiT
from vit_jax.training.program import model_arguments

SIZE, PATCHES, MASKED, CODES = 16, 16, 6, 7
TOKENISER = dict(image_size=SIZE, num_classes=CODES, blocks=(1, 1, 1), widths=(8, 8, 16))
TEACHERS = {
    "stride 4": ("DVAE", TOKENISER),
    "stride 8": ("DVAE", TOKENISER | dict(blocks=(1, 1, 1, 1), widths=(8, 8, 8, 16))),
    "no codes": ("DVAE", TOKENISER | dict(num_classes=0)),
    "a ViT": ("ViT-Ti/4", dict(image_size=SIZE, num_classes=5, **SMALL)),
}


@pytest.fixture(scope="module")
def teachers(tmp_path_factory) -> dict[str, str]:
    """Writes a checkpoint for each entry of TEACHERS, and returns their folders by name."""
    folder = tmp_path_factory.mktemp("teachers")
    for kind, (name, values) in TEACHERS.items():
        vit_jax.save_model(noisy(create_model(name, **values), 2), folder / kind, log=str)
    return {kind: str(folder / kind) for kind in TEACHERS}


def made(teacher: str, image_size=SIZE, **values):
    """Returns a small ViT with BEiT's architecture, and the objective with its tokeniser."""
    config = config_of("beit", teacher=teacher, **values)
    config.data.image_size = image_size
    arguments = dict(
        position="bias", position_at="shared", qkv_bias="qv", layer_scale=0.1, pooling="gap"
    )
    vit = create_model(
        "ViT-Ti/4", num_classes=0, image_size=image_size, cls_token=True, **SMALL | arguments
    )
    vit = noisy(vit)
    return vit, with_frozen(config, vit)


tokens_of = jax.jit(lambda objective, batch: objective.tokens(batch))


def test_loss_is_the_cross_entropy_of_the_codes_of_masked_patches(teachers):
    model, objective = made(teachers["stride 4"])
    batch = batch_of(objective)
    images, masked = np.asarray(batch["image"]), np.asarray(batch["masked"])
    codes = np.asarray(vit_jax.load_model(teachers["stride 4"], log=str).codes(images))
    assert len(np.unique(codes)) > 2

    @jax.jit
    def encode(images, masked):
        embeddings = jnp.where(masked[..., None], objective.mask[...], model.patches(images))
        return model.norm(model.encode(model.assemble(embeddings)))

    tokens = np.asarray(encode(images, masked), np.float64)[:, 1:]
    scores = tokens @ np.asarray(objective.head.kernel[...]) + np.asarray(objective.head.bias[...])
    chances = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    expected, right = [], []
    for chance, code, which in zip(chances, codes, masked, strict=True):
        expected.append(-np.log(chance[which, code[which]]).mean())
        right.append((chance[which].argmax(-1) == code[which]).mean())
    found = losses(objective, model, batch)
    np.testing.assert_allclose(found.each, expected, rtol=1e-4)
    np.testing.assert_allclose(found.metrics["accuracy"], right, rtol=1e-6)


@pytest.mark.parametrize(("name", "count"), [("BEiT-B/16", 91_965_776), ("BEiT-L/16", 311_534_016)])
def test_model_and_head_have_the_authors_number_of_parameters(name, count):
    config = read_config(f"configs/beit.py:model={name}")
    vit = abstract(model_factory(num_classes=0, **model_arguments(config)))
    objective = abstract(partial(BEiT, vit, 8192, 75 / 196))
    assert count_parameters(vit) + count_parameters(objective) == count


def test_75_of_196_patches_are_masked():
    vit = abstract(model_factory("ViT-Ti/16", num_classes=0, image_size=224))
    objective = abstract(partial(BEiT, vit, 8, 75 / 196))
    masked = objective.prepare({}, keys(4))["masked"]
    assert np.asarray(masked).sum(1).tolist() == [75] * 4


def test_nothing_of_the_tokeniser_is_trained(teachers):
    model, objective = made(teachers["stride 4"])
    batch = batch_of(objective)
    loss = nnx.grad(lambda objective, model, batch: objective(model, batch).each.mean())
    gradient = nnx.jit(loss)(objective, model, batch)
    frozen = [np.abs(np.asarray(x)).max() for x in jax.tree.leaves(gradient["frozen"])]
    assert max(frozen) == 0 and np.abs(np.asarray(gradient["head"]["kernel"][...])).max() > 0


@pytest.mark.parametrize(("name", "filter"), [("beit", "LANCZOS"), ("beitv2", "BICUBIC")])
def test_the_tokenisers_crop_is_resized_by_the_authors_filter(name, filter):
    """BEiT resizes the tokeniser's crop with Lanczos, BEiT v2 with bicubic interpolation.

    Lanczos is the default of run_beit_pretraining.py; BEiT v2's recipe has `--second_interpolation
    bicubic`.
    """
    config = config_of(name, teacher_size=12)
    config.data.update(
        dict(image_size=24, crop="random_resized", crop_area=(1.0, 1.0), crop_aspect=(1.0, 1.0))
    )
    config.data.update(dict(interpolation="bicubic", decode="exact"))
    _, taught = training_views(config)
    pixels = np.random.default_rng(0).integers(256, size=(40, 40, 3), dtype=np.uint8)
    expected = Image.fromarray(pixels).resize((12, 12), Image.Resampling[filter])
    found = taught.crop(pixels, np.random.default_rng(0))
    np.testing.assert_array_equal(found, np.asarray(expected))


def test_the_tokeniser_gets_the_same_crop_at_its_own_size(teachers):
    model, objective = made(teachers["stride 8"], teacher_size=32)
    config = config_of("beit", teacher=teachers["stride 8"], teacher_size=32)
    config.data.image_size = SIZE
    image, taught = objective_of(config.objective.name).views(config)
    assert (taught.size, taught.same_rectangle_as) == (32, image.name)
    seen = random_images(3, 32, 32)
    batch = batch_of(objective) | {taught.name: seen}
    expected = vit_jax.load_model(teachers["stride 8"], log=str).codes(seen)
    np.testing.assert_array_equal(tokens_of(objective, batch), expected)


@pytest.mark.parametrize("kind", ["no codes", "a ViT"])
def test_a_teacher_without_codes_is_refused(teachers, kind):
    with pytest.raises(
        UserError, match=r"computes no codes: take a tokenizer, such as .* configs/dvae.py$"
    ):
        made(teachers[kind])


def test_a_tokeniser_of_other_places_is_refused_with_the_size_that_fits(teachers):
    words = r"has 2x2 codes of 16x16 pixels, and the model 4x4: config.objective.teacher_size=32$"
    with pytest.raises(UserError, match=words):
        made(teachers["stride 8"])


@pytest.mark.parametrize("ratio", [0.01, 0.99])
def test_masks_of_all_patches_or_of_none_are_refused(teachers, ratio):
    with pytest.raises(UserError, match="of 16 patches; it must leave some, and mask some"):
        made(teachers["stride 4"], mask_ratio=ratio)


def test_pictures_show_patches_of_the_code_that_is_predicted(teachers):
    model, objective = made(teachers["stride 4"])
    batch = batch_of(objective)
    masked, codes = np.asarray(batch["masked"]), np.asarray(tokens_of(objective, batch))
    code = codes[~masked][0]
    # The head now predicts this code for every patch.
    objective.head.kernel[...] = jnp.zeros_like(objective.head.kernel[...])
    objective.head.bias[...] = jnp.zeros(CODES).at[code].set(1.0)
    visible, predicted = map(np.asarray, pictures(objective, model, batch))
    image, place = map(int, np.argwhere(~masked & (codes == code))[0])
    row, column = 4 * (place // 4), 4 * (place % 4)
    patch = np.asarray(batch["image"])[image, row : row + 4, column : column + 4]
    first = int(np.flatnonzero(masked[0])[0])
    row, column = 4 * (first // 4), 4 * (first % 4)
    np.testing.assert_array_equal(predicted[0, row : row + 4, column : column + 4], patch)
    assert (visible[0, row : row + 4, column : column + 4] == 127.5).all()


def test_multiply_adds_are_the_students_and_a_third_of_the_tokenisers(teachers):
    model, objective = made(teachers["stride 4"])
    images = jax.ShapeDtypeStruct((1, SIZE, SIZE, 3), np.uint8)
    graphdef, weights = nnx.split(objective.frozen)
    taught = traced_multiply_adds(
        lambda w, images: nnx.merge(graphdef, w).codes(images), weights, images
    )
    head = MASKED * SMALL["dim"] * CODES
    assert objective.multiply_adds(model) == count_multiply_adds(model) + head + taught / 3
