"""Models take uint8 or floats in [-1, 1] and normalize them; other inputs are one-line errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from PIL import Image

from vit_jax import create_model
from vit_jax.errors import UserError

IMAGENET = dict(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
MODELS = {
    "ViT": ("ViT-mu/16", dict(image_size=32)),
    "hybrid": ("R+ViT-Ti/16", dict(image_size=32, depth=1)),
    "BiT": ("BiT-R50x1", dict(image_size=32, resnet_blocks=(1,))),
}


def made(kind, **changes):
    name, arguments = MODELS[kind]
    return create_model(name, **(arguments | dict(num_classes=0) | changes))


def forward(model):
    graphdef, params = nnx.split(model)
    return lambda images: jax.jit(lambda p, x: nnx.merge(graphdef, p)(x))(params, images)


def pixels(size=(32, 32), channels=3, count=2):
    return np.random.default_rng(0).integers(256, size=(count, *size, channels), dtype=np.uint8)


@pytest.mark.one_variant
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("statistics", [{}, IMAGENET], ids=["half", "ImageNet's"])
def test_uint8_and_floats_of_equal_pixels_give_equal_logits(kind, statistics):
    model, images = forward(made(kind, **statistics)), pixels()
    wanted = model(images)
    floats = images.astype(np.float32) / np.float32(127.5) - 1
    np.testing.assert_allclose(model(floats), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", MODELS)
def test_the_first_layer_gets_pixels_normalized_by_mean_and_std(kind):
    images = pixels()
    seen = (images / 255 - np.array(IMAGENET["mean"])) / np.array(IMAGENET["std"])
    usual, own = made(kind), made(kind, **IMAGENET)  # Both models have the same seed.
    np.testing.assert_allclose(own.normalize(images), seen, atol=2e-6)
    wanted = forward(usual)(seen.astype(np.float32))
    np.testing.assert_allclose(forward(own)(images), wanted, rtol=1e-4, atol=1e-4)


def test_denormalize_inverts_normalize():
    model, images = made("ViT", **IMAGENET), pixels()
    np.testing.assert_allclose(model.denormalize(model.normalize(images)), images, atol=1e-3)


def test_by_default_images_in_minus_one_to_one_are_unchanged():
    images = np.random.default_rng(0).uniform(-1, 1, (2, 32, 32, 3)).astype(np.float32)
    np.testing.assert_array_equal(made("ViT").normalize(images), images)


def test_bfloat16_images_are_accepted_as_floats():
    images = jnp.linspace(-1, 1, 2 * 32 * 32 * 3, dtype=jnp.bfloat16).reshape(2, 32, 32, 3)
    np.testing.assert_array_equal(made("ViT").normalize(images), images.astype(jnp.float32))


def test_one_channel_may_have_its_own_mean():
    model = made("ViT", channels=1, mean=0.1307, std=(0.3081,))
    images = pixels(channels=1)
    np.testing.assert_allclose(model.normalize(images), (images / 255 - 0.1307) / 0.3081, atol=2e-6)


def test_one_number_applies_to_all_channels():
    images = pixels()
    wanted = made("ViT", mean=(0.4,) * 3, std=(0.2,) * 3).normalize(images)
    for mean, std in [(0.4, 0.2), ((0.4,), (0.2,)), ([0.4], [0.2])]:
        np.testing.assert_array_equal(made("ViT", mean=mean, std=std).normalize(images), wanted)


SHAPES = [(2, 33, 32, 3), (2, 64, 64, 3), (2, 32, 32, 1), (32, 32, 3), (2, 3, 32, 32)]


@pytest.mark.parametrize("kind", ["ViT", "hybrid"])
@pytest.mark.parametrize("shape", SHAPES)
def test_images_of_another_shape_are_refused_in_one_line(kind, shape):
    model = made(kind)
    with pytest.raises(
        UserError, match=r"takes images \[batch, 32, 32, 3\], not \[" + str(shape[0])
    ):
        model(np.zeros(shape, np.uint8))
    if kind == "ViT":
        with pytest.raises(UserError, match=r"takes images \[batch, 32, 32, 3\]"):
            model.patches(np.zeros(shape, np.uint8))


def test_a_bit_accepts_any_size_but_no_other_channels():
    model = made("BiT")
    assert forward(model)(pixels((40, 23))).shape == forward(model)(pixels()).shape
    for shape in [(2, 32, 32, 1), (32, 32, 3), (2, 0, 32, 3)]:
        with pytest.raises(UserError, match=r"takes images \[batch, height, width, 3\]"):
            model(np.zeros(shape, np.uint8))


def test_an_axial_bit_accepts_only_its_own_size():
    model = create_model("AxialResNet50", num_classes=0, image_size=32, resnet_blocks=(1,))
    with pytest.raises(UserError, match=r"takes images \[batch, 32, 32, 3\], not \[2, 40, 32, 3\]"):
        model(np.zeros((2, 40, 32, 3), np.uint8))


def test_a_traced_function_may_use_constant_images():
    model, images = made("ViT"), jnp.full((2, 32, 32, 3), -0.5)
    logits = jax.jit(lambda bias: model(images) + bias)(0.0)
    np.testing.assert_allclose(logits, model(images), atol=1e-5)
    wrong = images + 2.5
    with pytest.raises(UserError, match="not from 2 to 2"):
        jax.jit(lambda bias: model(wrong) + bias)(0.0)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("dtype", [np.int32, bool, np.complex64])
def test_numbers_that_are_no_pixels_are_refused(kind, dtype):
    with pytest.raises(UserError, match=r"uint8, or of floats in \[-1, 1\], not "):
        made(kind)(np.ones((2, 32, 32, 3), dtype))


@pytest.mark.parametrize(
    "values",
    [
        dict(mean=(0.5, 0.5)),
        dict(mean=()),
        dict(mean="0.5"),
        dict(mean=float("nan")),
        dict(mean=True),
        dict(std=0),
        dict(std=(0.2, -0.1, 0.2)),
        dict(std=float("inf")),
        dict(std=None),
    ],
)
@pytest.mark.parametrize("kind", ["ViT", "BiT"])
def test_an_invalid_mean_or_std_is_refused(kind, values):
    with pytest.raises(UserError, match=f"^{next(iter(values))} is .*must be"):
        made(kind, **values)


def test_lists_and_pil_images_are_accepted_like_arrays():
    model, images = made("ViT", num_classes=3), pixels()
    wanted, pictures = model(images), [Image.fromarray(image) for image in images]
    for given in (
        images.tolist(),
        [*images],
        tuple(pictures),
        [jnp.asarray(image) for image in images],
    ):
        np.testing.assert_array_equal(model(given), wanted)
    np.testing.assert_array_equal(model(pictures[0]), model(images[:1]))
    np.testing.assert_array_equal(model.features(pictures), model.features(images))
    floats = (images / 127.5 - 1).astype(np.float32)
    np.testing.assert_allclose(model(floats.tolist()), wanted, atol=1e-5)
    grey = made("ViT", channels=1)
    np.testing.assert_array_equal(
        grey(pictures[0].convert("L")), grey(np.asarray(pictures[0].convert("L"))[None, ..., None])
    )


@pytest.mark.parametrize(
    ("images", "words"),
    [
        (
            [Image.new("RGBA", (32, 32))],
            "channels, not PIL's RGBA: give image.convert.'RGB'., or use model.predict",
        ),
        (
            [np.zeros((32, 32, 3), np.uint8), np.zeros((32, 30, 3), np.uint8)],
            "of one size, not of .32, 30, 3., ",
        ),
        ([], r"takes images \[batch, 32, 32, 3\], not \[0\]"),
        ([[[[300, 0, 0]] * 32] * 32], "uint8, or of floats in .-1, 1., not int"),
        (
            np.zeros((0, 32, 32, 3), np.uint8),
            r"takes images \[batch, 32, 32, 3\], not \[0, 32, 32, 3\]",
        ),
        ("photo.jpg", "as arrays of uint8, .* not str; model.predict reads files"),
        (["photo.jpg"], "takes images|as arrays"),
        ([None], "as arrays of uint8, .* not object"),
        (None, "as arrays of uint8, .* not NoneType"),
        ({"image": np.zeros((1, 32, 32, 3))}, "as arrays of uint8, .* not dict"),
    ],
)
def test_errors_about_invalid_batches_are_one_line(images, words):
    with pytest.raises(UserError, match=words) as caught:
        made("ViT")(images)
    assert "\n" not in str(caught.value)
