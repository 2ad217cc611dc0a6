"""Tests of resizing position embeddings, biases and patch embeddings to another grid."""

import cv2
import numpy as np
import pytest
from helpers import described, params_of, random_model, write
from hypothesis import given, settings
from hypothesis import strategies as st

import vit_jax
from vit_jax.errors import UserError
from vit_jax.interop.adapting import fit
from vit_jax.interop.checkpoint import Checkpoint, sketch
from vit_jax.models.model_card import parameter_shapes
from vit_jax.models.position import sincos2d
from vit_jax.models.resize import resize_patches, resize_positions

SIDES = st.tuples(st.integers(1, 12), st.integers(1, 12))


def plane(grid, prefix):
    """Returns a table that is linear in row and column, after `prefix` other rows."""
    rows, columns = np.meshgrid(*(np.linspace(0, 1, max(n, 2))[:n] for n in grid), indexing="ij")
    table = np.stack([rows, columns, 2 * rows - columns, np.ones(grid)], axis=-1).reshape(-1, 4)
    return np.concatenate([np.full((prefix, 4), 9.0), table])[None].astype(np.float32)


@settings(max_examples=100, deadline=None)
@given(old=SIDES, new=SIDES, prefix=st.integers(0, 2))
def test_special_rows_are_kept_and_the_grid_has_its_size(old, new, prefix):
    table = (
        np.random.default_rng(0).normal(size=(1, prefix + old[0] * old[1], 3)).astype(np.float32)
    )
    resized = resize_positions(table, old, new, prefix)
    assert resized.shape == (1, prefix + new[0] * new[1], 3)
    np.testing.assert_array_equal(resized[:, :prefix], table[:, :prefix])


@settings(max_examples=100, deadline=None)
@given(
    old=st.tuples(st.integers(2, 12), st.integers(2, 12)),
    new=st.tuples(st.integers(2, 12), st.integers(2, 12)),
)
def test_a_linear_table_stays_linear_from_corner_to_corner(old, new):
    np.testing.assert_allclose(
        resize_positions(plane(old, 1), old, new, 1), plane(new, 1), atol=1e-6
    )


def test_between_patches_values_are_interpolated():
    table = np.array([0.0, 4.0], np.float32).reshape(1, 2, 1)
    resized = resize_positions(table, (1, 2), (1, 5), 0)
    np.testing.assert_allclose(resized.ravel(), [0, 1, 2, 3, 4])


def test_positions_for_the_same_grid_do_not_change():
    table = np.random.default_rng(0).normal(size=(1, 13, 8)).astype(np.float32)
    np.testing.assert_array_equal(resize_positions(table, (3, 4), (3, 4), 1), table)


@pytest.mark.parametrize(
    "sides", [(7, 5), (5, 7), (4, 16), (37, 16), (16, 37), (3, 1), (1, 3)], ids=str
)
@pytest.mark.parametrize("kind", ["bicubic", "bicubic_offset", "bicubic_antialias"])
def test_tables_are_resized_as_pytorch_resizes_images(kind, sides, torch):
    """timm uses `bicubic_antialias`, Transformers also `bicubic`, DINO's code `bicubic_offset`.

    DINO's code adds 0.1 to the sides and passes the ratio of the sides as the scale.
    """
    old, new = (sides[0], 6), (sides[1], 9)
    table = np.random.default_rng(0).normal(size=(1, 1 + old[0] * old[1], 3)).astype(np.float32)
    picture = torch.from_numpy(table[:, 1:].reshape(1, *old, 3).transpose(0, 3, 1, 2).copy())
    options = dict(mode="bicubic", align_corners=False, antialias=kind == "bicubic_antialias")
    if kind == "bicubic_offset":
        options["scale_factor"] = tuple(
            (after + 0.1) / before for before, after in zip(old, new, strict=True)
        )
    else:
        options["size"] = new
    wanted = torch.nn.functional.interpolate(picture, **options).numpy()[0].transpose(1, 2, 0)
    found = resize_positions(table, old, new, 1, kind)
    np.testing.assert_array_equal(found[:, :1], table[:, :1])
    np.testing.assert_allclose(found[0, 1:].reshape(*new, 3), wanted, atol=1e-5)


def test_an_enlarged_patch_keeps_its_embedding(torch):
    rng = np.random.default_rng(0)
    patches, kernel = rng.normal(size=(10, 3, 7, 5)), rng.normal(size=(7, 5, 3, 4))
    large = torch.nn.functional.interpolate(torch.tensor(patches), (16, 9), mode="bilinear").numpy()
    found = np.einsum("bchw,hwcd->bd", large, resize_patches(kernel, 16, 9))
    np.testing.assert_allclose(found, np.einsum("bchw,hwcd->bd", patches, kernel), atol=1e-4)


def test_a_smaller_patch_has_the_embedding_nearest_to_that_of_the_large_one(torch):
    """Equals FlexiViT's formula, the pseudo-inverse of the matrix that resizes whole patches."""
    kernel = np.random.default_rng(0).normal(size=(8, 8, 3, 4))
    units = torch.eye(64, dtype=torch.float64).reshape(64, 1, 8, 8)
    resize = (
        torch.nn.functional.interpolate(units, (5, 5), mode="bilinear").numpy().reshape(64, 25).T
    )
    expected = np.linalg.pinv(resize.T) @ kernel.reshape(64, -1)
    np.testing.assert_allclose(resize_patches(kernel, 5, 5).reshape(25, -1), expected, atol=1e-5)


def test_a_model_is_loaded_for_patches_of_another_size(tmp_path):
    arguments = dict(dim=32, depth=1, mlp_dim=48, heads=2, image_size=64, num_classes=3)
    model = random_model("ViT-Ti/16", **arguments)
    file = write(model, tmp_path / "model.npz", "google", "ViT-Ti/16", **arguments)
    said = []
    loaded = vit_jax.load_model(file, patch_size=32, image_size=128, log=said.append)
    assert "resized: patch_embedding/kernel 16x16 -> 32x32" in said
    images = np.random.default_rng(0).uniform(-1, 1, (2, 64, 64, 3)).astype(np.float32)
    # With each patch of the image enlarged separately, the logits do not change.
    patches = images.reshape(2, 4, 16, 4, 16, 3).transpose(0, 1, 3, 2, 4, 5).reshape(-1, 16, 16, 3)
    large = np.stack(
        [cv2.resize(patch, (32, 32), interpolation=cv2.INTER_LINEAR) for patch in patches]
    )
    large = large.reshape(2, 4, 4, 32, 32, 3).transpose(0, 1, 3, 2, 4, 5).reshape(2, 128, 128, 3)
    np.testing.assert_allclose(loaded(large), model(images), atol=1e-4)


@pytest.fixture(scope="module")
def patch_file(tmp_path_factory):
    """Writes a file of a model with patches of 16 pixels."""
    arguments = dict(dim=32, depth=1, mlp_dim=48, heads=2, image_size=64, num_classes=3)
    file = tmp_path_factory.mktemp("patches") / "model.npz"
    return write(random_model("ViT-Ti/16", **arguments), file, "google", "ViT-Ti/16", **arguments)


@pytest.mark.parametrize("side", [8, 1])
def test_smaller_patches_log_that_they_are_an_approximation(side, patch_file):
    said = []
    vit_jax.load_model(patch_file, patch_size=side, image_size=4 * side, log=said.append)
    words = (
        f"resized: patch_embedding/kernel 16x16 -> {side}x{side}, an approximation, as patches "
        "shrink"
    )
    assert words in said


@pytest.mark.parametrize(
    ("side", "words"),
    [
        (0, "patch_size"),
        (-8, "patch_size"),
        (7.5, "patch_size"),
        ("8", "patch_size"),
        (7, "patch size 7"),
    ],
)
def test_invalid_patch_sizes_are_refused(side, words, patch_file):
    with pytest.raises(UserError, match=words):
        vit_jax.load_model(patch_file, patch_size=side, log=str)


def test_the_patch_size_of_a_model_without_patches_is_refused():
    arguments = dict(image_size=32, num_classes=3, blocks=(1, 1, 1, 1), widths=(8, 8, 8, 8))
    with pytest.raises(UserError, match="ConvNeXt.* has no argument 'patch_size'; .*image_size"):
        fit(checkpoint_of("ConvNeXt-T", **arguments), dict(patch_size=8))


def checkpoint_of(name, **arguments):
    """Returns a checkpoint whose parameters are all one."""
    options = described(name, **arguments)
    shapes = parameter_shapes(sketch(options))
    return Checkpoint("here", "nowhere", options, shapes, lambda path: np.ones(shapes[path]), [])


@pytest.mark.parametrize(
    "position, table, shape",
    [
        ("bias", "bias_table", (11 * 11 + 3, 2)),
        ("relative", "relative_embedding", (2 * 36 - 1 + 3, 8)),
    ],
)
def test_tables_by_offset_follow_the_grid(position, table, shape):
    sizes = dict(num_classes=5, dim=16, depth=1, mlp_dim=24, heads=2, position=position)
    checkpoint = checkpoint_of("ViT-Ti/16", image_size=64, **sizes)
    _, sources, done = fit(checkpoint, dict(image_size=96))
    path = f"blocks/00/attention/{table}"
    assert done.resized == [f"{path} 4x4 -> 6x6"]
    np.testing.assert_allclose(sources[path](), np.ones(shape), atol=1e-5)
    with pytest.raises(UserError, match="rows, but the tokens of the requested model need"):
        fit(checkpoint, dict(image_size=96, pooling="gap"))[1][path]()
    with pytest.raises(UserError, match=r"but the requested model has \["):
        fit(checkpoint, dict(pooling="gap"))  # The same grid, without the class token.
    # The table has the same shape, but other offsets.
    wide = checkpoint_of("ViT-Ti/16", image_size=(32, 80), **sizes)
    assert fit(wide, dict(image_size=(80, 32)))[2].resized == [f"{path} 2x5 -> 5x2"]


@pytest.mark.parametrize("size", [64, 96])
def test_a_table_shared_by_all_layers_can_become_one_per_layer(size, tmp_path):
    arguments = dict(
        dim=16, depth=2, mlp_dim=24, heads=2, image_size=64, num_classes=3, position="bias"
    )
    arguments |= dict(
        position_at="shared", gelu="erf", pooling="gap", cls_token=True, qkv_bias="qv"
    )
    model = random_model("ViT-Ti/16", **arguments)
    folder = write(model, tmp_path / "model", "timm", "ViT-Ti/16", **arguments)
    one, said = vit_jax.load_model(folder, image_size=size, log=str), []
    own = vit_jax.load_model(folder, image_size=size, position_at="stem", log=said.append)
    tables = {path: x for path, x in params_of(own).items() if path.endswith("bias_table")}
    assert list(tables) == ["blocks/00/attention/bias_table", "blocks/01/attention/bias_table"]
    for table in tables.values():
        np.testing.assert_array_equal(table, params_of(one)["bias_table"])
    assert any("copied into each layer: bias_table" in line for line in said)
    images = np.random.default_rng(0).uniform(-1, 1, (2, size, size, 3)).astype(np.float32)
    np.testing.assert_allclose(own(images), one(images), rtol=1e-5, atol=1e-5)


def test_tables_of_axial_attention_follow_the_lines():
    checkpoint = checkpoint_of("AxialResNet50", image_size=32, num_classes=5, resnet_blocks=(1,))
    _, sources, done = fit(checkpoint, dict(image_size=(64, 32)))
    path = "resnet/stages/1/01/conv2/column/relative_embedding"
    assert done.resized == [f"{path} 15 -> 31"]
    np.testing.assert_allclose(sources[path](), np.ones((31, 16)), atol=1e-5)


@pytest.mark.one_variant
@pytest.mark.parametrize("size", [96, 32, (32, 96), (80, 48)])
def test_a_model_is_loaded_for_images_of_another_size(size, tmp_path):
    arguments = dict(dim=32, depth=1, mlp_dim=48, heads=2, image_size=64, num_classes=3)
    model = random_model("ViT-Ti/16", **arguments)
    file = write(model, tmp_path / "model.npz", "google", "ViT-Ti/16", **arguments)
    loaded = vit_jax.load_model(file, image_size=size, log=str)
    images = np.zeros((1, *loaded.image_size, 3), np.float32)
    assert loaded(images).shape == (1, 3)
    before, after = (params_of(m)["position_embedding/table"] for m in (model, loaded))
    np.testing.assert_array_equal(after, resize_positions(before, (4, 4), loaded.grid, 1))
    old, new = before[0, 1:].reshape(4, 4, -1), after[0, 1:].reshape(*loaded.grid, -1)
    for corner in ((0, 0), (0, -1), (-1, 0), (-1, -1)):
        np.testing.assert_allclose(new[corner], old[corner], atol=1e-6)


def test_a_model_without_class_token_drops_its_row(tmp_path):
    arguments = dict(dim=32, depth=1, mlp_dim=48, heads=2, image_size=64, num_classes=3)
    model = random_model("ViT-Ti/16", **arguments)
    file = write(model, tmp_path / "model.npz", "google", "ViT-Ti/16", **arguments)
    said = []
    loaded = vit_jax.load_model(file, pooling="gap", log=said.append)
    before, after = (params_of(m)["position_embedding/table"] for m in (model, loaded))
    np.testing.assert_array_equal(after, before[:, 1:])
    assert "dropped: cls" in said


def test_a_distilled_model_without_its_token_keeps_the_class_tokens_row(tmp_path):
    arguments = dict(dim=32, depth=1, mlp_dim=48, heads=2, image_size=64, num_classes=3)
    model = random_model("ViT-Ti/16", distillation="heads", **arguments)
    write(model, tmp_path / "model", "timm", "ViT-Ti/16", distillation="heads", **arguments)
    loaded = vit_jax.load_model(tmp_path / "model", distillation="none", log=str)
    before, after = (params_of(m)["position_embedding/table"] for m in (model, loaded))
    np.testing.assert_array_equal(after, np.delete(before, 1, axis=1))


def test_fixed_positions_become_a_trainable_table_and_new_norms_start_at_one():
    # This happens in the fine-tuning of a masked autoencoder.
    sizes = dict(num_classes=0, dim=16, depth=1, mlp_dim=24, heads=2)
    checkpoint = checkpoint_of("ViT-Ti/16", image_size=64, position="sincos2d", **sizes)
    changes = dict(num_classes=5, pooling="gap", cls_token=True, fc_norm=True, position="1d")
    fitted, sources, done = fit(checkpoint, changes)
    table = sources["position_embedding/table"]()
    np.testing.assert_array_equal(table[0, 0], np.zeros(16))
    np.testing.assert_array_equal(table[0, 1:], sincos2d((4, 4), 16, "sincos2d"))
    assert sources.keys() == parameter_shapes(sketch(fitted)).keys()
    assert (sources["fc_norm/scale"]() == 1).all() and not sources["fc_norm/bias"]().any()
    assert done.dropped == ["norm/bias", "norm/scale"]
    assert done.fresh[:2] == ["fc_norm/bias [16], zero", "fc_norm/scale [16], one"]
    larger = fit(checkpoint, changes | dict(image_size=128))[1]["position_embedding/table"]()
    np.testing.assert_allclose(larger[0, [1, 8, 57, 64]], table[0, [1, 4, 13, 16]], atol=1e-6)
