"""Tests of models resized inside a trace: the same parameters for images of another size."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from vit_jax.errors import UserError
from vit_jax.models import create_model
from vit_jax.models.position import RelativeLayout
from vit_jax.models.resize import resize_axis, resize_positions

TINY = dict(num_classes=3, dim=16, depth=2, mlp_dim=16, heads=2)


def random_positions(model):
    """Replaces the initial values of the position embeddings by random ones."""
    rng = np.random.default_rng(0)
    for path, leaf in nnx.to_flat_state(nnx.state(model)):
        if path[0] == "position_embedding":
            leaf[...] = jnp.asarray(rng.normal(size=leaf.shape), jnp.float32)
    return model


@pytest.mark.one_variant
@pytest.mark.parametrize(("size", "grid"), [((48, 16), (6, 2)), (8, (1, 1)), (64, (8, 8))])
def test_learned_table_is_resized_as_for_a_checkpoint(size, grid):
    model = random_positions(create_model("ViT-Ti/8", image_size=(32, 24), **TINY))
    other = model.resized(size)
    wanted = resize_positions(np.asarray(model.position_embedding()), (4, 3), grid, 1)
    np.testing.assert_allclose(other.position_embedding(), wanted, rtol=1e-5, atol=1e-5)
    assert other.grid == grid and other.tokens == 1 + grid[0] * grid[1]
    images = np.zeros((2, *other.image_size, 3), np.uint8)
    assert other(images).shape == (2, 3)
    with pytest.raises(UserError, match="takes images"):
        model(images)


@pytest.mark.one_variant
@pytest.mark.parametrize("kind", ["bicubic", "bicubic_offset", "bicubic_antialias"])
def test_learned_table_is_resized_by_the_rule_that_the_model_has(kind):
    model = random_positions(create_model("ViT-Ti/8", image_size=32, position_resize=kind, **TINY))
    wanted = resize_positions(np.asarray(model.position_embedding()), (4, 4), (3, 6), 1, kind)
    found = model.resized((24, 48)).position_embedding()
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    linear = resize_positions(np.asarray(model.position_embedding()), (4, 4), (3, 6), 1)
    assert np.abs(np.asarray(found) - linear).max() > 0.01


def test_rows_and_columns_are_resized_as_for_a_checkpoint():
    model = random_positions(create_model("ViT-Ti/8", image_size=(32, 24), position="2d", **TINY))
    other = model.resized((40, 48)).position_embedding
    np.testing.assert_allclose(
        other.x, resize_axis(model.position_embedding.x, 6), rtol=1e-5, atol=1e-5
    )
    np.testing.assert_allclose(
        other.y, resize_axis(model.position_embedding.y, 5), rtol=1e-5, atol=1e-5
    )


@pytest.mark.slow
def test_gradients_of_crops_of_two_sizes_reach_the_one_table():
    model = create_model("ViT-Ti/8", image_size=32, **TINY)
    graphdef, params = nnx.split(model)
    large, small = np.ones((1, 32, 32, 3), np.float32), np.ones((1, 16, 16, 3), np.float32)

    @jax.jit
    def gradient(params, share):
        def loss(params):
            model = nnx.merge(graphdef, params)
            crops = model.resized(16).features(small)[:, 0].sum()
            return (1 - share) * model.features(large)[:, 0].sum() + share * crops

        return jax.grad(loss)(params)

    whole, crops, both = (gradient(params, share) for share in (0.0, 1.0, 0.5))
    for tree in (whole, crops):
        table = np.asarray(tree["position_embedding"]["table"][...])[0]
        assert (
            np.abs(table[[0, 1, 4, 13, 16]]).max(axis=1) > 0
        ).all()  # The class token and the corners.
    mean = jax.tree.map(lambda a, b: (a + b) / 2, whole, crops)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6), both, mean)


@pytest.mark.one_variant
@pytest.mark.parametrize(
    "options",
    [
        dict(position="sincos2d"),
        dict(position="none", rope="eva02", pooling="gap"),
        dict(position="1d", position_at="every", registers=2),
        dict(position="none", rope="dinov3"),
        dict(position="none", rope="mixed"),
        dict(position="bias", registers=1),
        dict(position="bias", position_at="shared"),
        dict(position="relative", registers=1),
        dict(position="relative", pooling="gap"),
        dict(attention="axial", pooling="gap"),
    ],
)
def test_a_resized_model_equals_a_model_of_that_size(options):
    model, made = (create_model("ViT-Ti/8", image_size=size, **TINY | options) for size in (32, 16))
    resized = model.resized(16)
    nnx.update(made, nnx.state(resized))
    images = np.random.default_rng(0).integers(0, 256, (2, 16, 16, 3), np.uint8)
    np.testing.assert_array_equal(resized.features(images), made.features(images))


@pytest.mark.slow
def test_axial_attention_is_resized_with_its_tables(torch):
    values = dict(num_classes=0, resnet_blocks=(1, 1), resnet_width=1 / 4)
    model = create_model("AxialResNet50", image_size=32, **values)
    resized, made = (
        model.resized((64, 48)),
        create_model("AxialResNet50", image_size=(64, 48), **values),
    )
    nnx.update(made, nnx.state(resized))
    images = np.random.default_rng(0).integers(0, 256, (2, 64, 48, 3), np.uint8)
    np.testing.assert_array_equal(resized.features(images), made.features(images))
    old, new = (of.resnet.stages["2"]["01"].conv2 for of in (model, resized))
    for before, after, rows in ((old.column, new.column, 31), (old.row, new.row, 23)):
        wanted = resize_bicubic(torch, np.asarray(before.relative_embedding)[:, None], rows, 1)[
            :, 0
        ]
        np.testing.assert_allclose(after.relative_embedding, wanted, atol=1e-5)
    assert model.features(np.zeros((1, 32, 32, 3), np.uint8)).shape == (1, 128)


def resize_bicubic(torch, table, rows, columns):
    """Resizes a table `[rows, columns, channels]` with PyTorch's bicubic interpolation."""
    images = torch.tensor(table, dtype=torch.float64).permute(2, 0, 1)[None]
    resized = torch.nn.functional.interpolate(images, (rows, columns), mode="bicubic")
    return resized[0].permute(1, 2, 0).numpy()


@pytest.mark.parametrize(
    ("old", "new"),
    [((4, 3), (6, 2)), ((2, 5), (5, 2)), ((3, 3), (1, 1)), ((1, 4), (3, 4))],
    ids=str,
)
def test_relative_positions_are_resized_by_rows_and_columns(old, new, torch):
    layout = RelativeLayout(old, 1, 0)
    table = np.random.default_rng(0).normal(size=(layout.rows, 4))
    among = np.empty((2 * old[0] - 1, 2 * old[1] - 1, 4))
    for row, column in np.ndindex(among.shape[:2]):
        down, across = row - old[0] + 1, column - old[1] + 1
        among[row, column] = table[down * old[1] + across + old[0] * old[1] - 1]
    among = resize_bicubic(torch, among, 2 * new[0] - 1, 2 * new[1] - 1)
    found = np.asarray(layout.resized(jnp.asarray(table, jnp.float32), new))
    vectors = {row: [] for row in range(2 * new[0] * new[1] - 1)}
    for query, key in itertools.product(np.ndindex(new), repeat=2):
        number = (query[0] - key[0]) * new[1] + query[1] - key[1]
        offset = query[0] - key[0] + new[0] - 1, query[1] - key[1] + new[1] - 1
        vectors[number + new[0] * new[1] - 1].append(among[offset])
    wanted = [np.mean(of, axis=0) for of in vectors.values()]
    np.testing.assert_allclose(found, [*wanted, *table[-3:]], atol=1e-5)


def test_invalid_sizes_are_refused():
    model = create_model("ViT-Ti/8", image_size=16, **TINY)
    assert model.resized(16) is model
    with pytest.raises(UserError, match="does not divide the image of 20x16"):
        model.resized((20, 16))
    axial = create_model("AxialResNet50", image_size=32, num_classes=0, resnet_blocks=(1,))
    with pytest.raises(UserError, match="an image of multiples of 4 pixels, not 32x30"):
        axial.resized((32, 30))
