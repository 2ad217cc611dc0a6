"""Tests of Swin and Swin V2: outputs and gradients against NumPy in float64."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from reference import (
    count,
    feed_forward,
    forward,
    layer_norm,
    linear,
    parameters,
    random_images,
    random_model,
)

from vit_jax.errors import UserError
from vit_jax.models import create_model, family_of, model_factory
from vit_jax.models.position import spread_offsets
from vit_jax.models.swin import log_offsets, shifted_regions, windows

# The maps have 7x9 and 4x5 patches, which are not divisible by windows of 3. Merging pads the odd
# sides of the first map.
TINY = dict(
    image_size=(14, 18),
    num_classes=3,
    patch_size=2,
    dim=8,
    blocks=(2, 2),
    stage_heads=(2, 4),
    window=3,
)
SHORT = dict(blocks=(2,), stage_heads=(2,))
CASES = {
    "padded, shifted": {},
    "divided": dict(image_size=(12, 12)),
    "one axis shifted": SHORT | dict(image_size=(6, 12)),
    "map within a window": dict(window=6),
    "other windows in each stage": dict(window=(2, 3)),
    "positions": dict(position="1d", channels=1, num_classes=0),
    "three stages": dict(blocks=(1, 2, 1), stage_heads=(1, 2, 4)),
    "V2: padded, shifted": dict(version=2),
    "V2: divided": dict(version=2, image_size=(12, 12)),
    "V2: map within a window": dict(version=2, window=6),
    "V2: other windows before": dict(version=2, pretrained_windows=(5, 2), position="1d"),
}


def attend(x, p, window, shifted, version, former):
    """Returns the window attention of one image's map, one pair of positions at a time."""
    shift = [
        side // 2 if shifted and size > side else 0
        for size, side in zip(x.shape, window, strict=False)
    ]
    height, width, dim = x.shape
    kernel, heads = p["qkv"]["kernel"], p["qkv"]["kernel"].shape[2]
    bias = p["qkv"]["bias"]
    if version == 2:
        bias = np.stack([bias[0], 0 * bias[0], bias[1]])
    moved, out = np.roll(x, (-shift[0], -shift[1]), (0, 1)), np.zeros((height, width, dim))
    moved = np.pad(moved, ((0, -height % window[0]), (0, -width % window[1]), (0, 0)))
    for top in range(0, moved.shape[0], window[0]):
        for left in range(0, moved.shape[1], window[1]):
            places = [(top + i, left + j) for i in range(window[0]) for j in range(window[1])]
            # For each shifted axis: whether the position was moved around the border.
            around = [
                tuple(
                    s > 0 and at >= size - s
                    for at, size, s in zip(place, moved.shape, shift, strict=False)
                )
                for place in places
            ]
            tokens = np.stack([moved[place] for place in places])
            result = np.zeros((len(places), dim))
            for head in range(heads):
                q, k, v = (tokens @ kernel[:, part, head] + bias[part, head] for part in range(3))
                if version == 2:
                    q, k = (
                        y / np.maximum(np.linalg.norm(y, axis=1, keepdims=True), 1e-12)
                        for y in (q, k)
                    )
                    scores = q @ k.T * np.exp(min(p["logit_scale"][head], math.log(100)))
                else:
                    scores = q @ k.T / np.sqrt(q.shape[1])
                for i, query in enumerate(places):
                    for j, key in enumerate(places):
                        offset = query[0] - key[0], query[1] - key[1]
                        scores[i, j] += bias_of(p, offset, head, window, version, former)
                        scores[i, j] -= 100 * (around[i] != around[j])
                weights = np.exp(scores - scores.max(1, keepdims=True))
                result += weights / weights.sum(1, keepdims=True) @ v @ p["out"]["kernel"][head]
            for place, row in zip(places, result + p["out"]["bias"], strict=True):
                if place[0] < height and place[1] < width:
                    out[place] = row
    return np.roll(out, shift, (0, 1))


def bias_of(p, offset, head, window, version, former):
    """Returns the bias for two positions with this offset."""
    if version == 1:
        return p["bias_table"][offset[0] + window[0] - 1, offset[1] + window[1] - 1, head]
    parts = [
        8 * d / max(1, side - 1)
        for d, side in zip(offset, (former,) * 2 if former else window, strict=True)
    ]
    logs = np.array(
        [math.copysign(math.log2(1 + abs(part)) / math.log2(8), part) for part in parts]
    )
    mlp = p["bias_mlp"]
    hidden = np.maximum(0, linear(logs, mlp["fc1"]))
    return 16 / (1 + np.exp(-hidden @ mlp["fc2"]["kernel"][:, head]))


def swin(params, image, *, window, patch_size, blocks, version=1, pretrained_windows=None, **_):
    """Returns the logits of one image, or its features if there is no head."""
    kernel, p = params["patch_embedding"]["kernel"], patch_size
    rows, columns = image.shape[0] // p, image.shape[1] // p
    x = np.zeros((rows, columns, kernel.shape[-1]))
    for r, c in np.ndindex(rows, columns):
        patch = image[r * p : r * p + p, c * p : c * p + p]
        x[r, c] = np.einsum("yxc,yxcd->d", patch, kernel) + params["patch_embedding"]["bias"]
    x = layer_norm(x, params["patch_norm"], 1e-5)
    if "position_embedding" in params:
        x = x + params["position_embedding"]["table"][0].reshape(x.shape)
    for stage, number in enumerate(blocks, start=1):
        side = window if isinstance(window, int) else window[stage - 1]
        own = min(side, x.shape[0]), min(side, x.shape[1])
        former = pretrained_windows and pretrained_windows[stage - 1]
        for place in range(1, number + 1):
            block = params["stages"][f"{stage}"][f"{place:02d}"]

            def attention(y, p=block["attention"], shifted=place % 2 == 0, own=own, former=former):
                return attend(y, p, own, shifted, version, former)

            def mlp(y, p=block["mlp"]):
                return feed_forward(y, p, "gelu", "erf")

            for norm, branch in (("norm1", attention), ("norm2", mlp)):
                if version == 1:
                    x = x + branch(layer_norm(x, block[norm], 1e-5))
                else:
                    x = x + layer_norm(branch(x), block[norm], 1e-5)
        if stage < len(blocks):
            x = np.pad(x, ((0, x.shape[0] % 2), (0, x.shape[1] % 2), (0, 0)))
            x = np.concatenate([x[0::2, 0::2], x[1::2, 0::2], x[0::2, 1::2], x[1::2, 1::2]], -1)
            merge = params["merges"][f"{stage}"]
            if version == 1:
                x = layer_norm(x, merge["norm"], 1e-5) @ merge["reduction"]["kernel"]
            else:
                x = layer_norm(x @ merge["reduction"]["kernel"], merge["norm"], 1e-5)
    x = layer_norm(x, params["norm"], 1e-5).mean((0, 1))
    return linear(x, params["head"]) if "head" in params else x


@pytest.mark.one_variant
@pytest.mark.parametrize("case", CASES)
def test_swin_equals_a_plain_forward_pass(case):
    arguments = TINY | CASES[case]
    model = random_model("Swin-T", **arguments)
    images = random_images(2, *arguments["image_size"], arguments.get("channels", 3))
    params = parameters(model)
    expected = np.stack([swin(params, image, **arguments) for image in images])
    np.testing.assert_allclose(forward(model, images), expected, atol=2e-5 * np.abs(expected).max())


@pytest.mark.one_variant
@pytest.mark.parametrize(
    "case", ["padded, shifted", "V2: padded, shifted", "V2: other windows before"]
)
def test_gradients_equal_finite_differences_of_a_plain_forward_pass(case):
    arguments = TINY | CASES[case] | dict(image_size=(10, 8), blocks=(2, 1))
    model = random_model("Swin-T", **arguments)
    image = random_images(1, *arguments["image_size"])
    graphdef, params = nnx.split(model)
    weights = np.array([0.3, -1.0, 0.6])

    @jax.jit
    def gradient(params):
        return jax.grad(
            lambda params: nnx.merge(graphdef, params)(image)[0] @ jnp.asarray(weights)
        )(params)

    found, plain, rng = (
        nnx.to_pure_dict(gradient(params)),
        parameters(model),
        np.random.default_rng(2),
    )
    largest = max(np.linalg.norm(x) for x in jax.tree.leaves(found))
    for path, x in jax.tree.leaves_with_path(plain):
        names = [key.key for key in path]
        leaf = found
        for name in names:
            leaf = leaf[name]
        direction = rng.normal(size=x.shape)
        ends = []
        for step in (1e-5, -1e-5):
            change = {path: step * direction}
            moved = jax.tree.map_with_path(lambda p, y, change=change: y + change.get(p, 0), plain)
            ends.append(swin(moved, np.float64(image[0]), **arguments) @ weights)
        expected = (ends[0] - ends[1]) / 2e-5
        np.testing.assert_allclose(
            np.sum(np.float64(leaf) * direction),
            expected,
            atol=2e-4 * largest,
            err_msg="/".join(names),
        )


# Each at the image size in microsoft/Swin-Transformer's tables, for 1,000 classes.
@pytest.mark.one_variant
@pytest.mark.parametrize(
    ("name", "size", "parameters"),
    [
        ("Swin-T", 224, 28_288_354),
        ("Swin-S", 224, 49_606_258),
        ("Swin-B", 224, 87_768_224),
        ("Swin-B/w12", 384, 87_903_584),
        ("Swin-L", 224, 196_532_476),
        ("Swin-L/w12", 384, 196_735_516),
        ("SwinV2-T/w8", 256, 28_347_154),
        ("SwinV2-S/w16", 256, 49_728_418),
        ("SwinV2-B/w12to16", 256, 87_918_816),
        ("SwinV2-L/w12to24", 384, 196_739_932),
    ],
)
def test_parameter_count_is_the_published(name, size, parameters):
    assert count(name, image_size=size) == parameters


def test_blocks_are_layers_through_all_stages_as_in_simmim():
    model = create_model("Swin-T", **TINY | dict(blocks=(2, 1, 2), stage_heads=(2, 2, 2)))
    layer = family_of(model).layer(model)
    assert {
        "patch_embedding/kernel": -1,
        "patch_norm/scale": -1,
        "stages/1/01/norm1/scale": 0,
        "stages/1/02/mlp/fc1/kernel": 1,
        "merges/1/reduction/kernel": 1,
        "stages/2/01/attention/bias_table": 2,
        "merges/2/norm/bias": 2,
        "stages/3/01/attention/qkv/kernel": 3,
        "stages/3/02/attention/qkv/kernel": 4,
        "norm/scale": math.inf,
        "head/kernel": math.inf,
    }.items() <= {path: layer(path) for path in paths(model)}.items()


def paths(model) -> list[str]:
    return ["/".join(path) for path, _ in nnx.to_flat_state(nnx.state(model))]


def test_biases_are_indexed_by_the_offset_of_query_and_key():
    table = np.random.default_rng(0).normal(size=(5, 7, 2)).astype(np.float32)
    spread = np.asarray(spread_offsets(jnp.asarray(table)))
    for head, query, key in np.ndindex(2, 12, 12):
        offset = query // 4 - key // 4 + 2, query % 4 - key % 4 + 3
        assert spread[head, query, key] == table[*offset, head]


def test_offsets_are_on_a_logarithmic_scale():
    offsets = log_offsets((3, 1), (3, 1))
    assert offsets.shape == (5, 1, 2)
    np.testing.assert_allclose(
        offsets[:, 0, 0] * 3, [-np.log2(9), -np.log2(5), 0, np.log2(5), np.log2(9)], rtol=1e-6
    )
    np.testing.assert_array_equal(offsets[..., 1], 0)


def test_shifted_windows_have_one_region_for_each_group_of_former_neighbours():
    regions = shifted_regions((4, 4), (2, 2), (1, 1))
    assert [len(set(row)) for row in regions] == [1, 2, 2, 4]


def test_windows_are_no_larger_than_the_map():
    assert windows((56, 14), 7, 4) == [(7, 7), (7, 7), (7, 4), (7, 2)]


def test_stochastic_depth_rises_over_all_stages():
    model = create_model("Swin-T", **TINY | dict(stochastic_depth=0.3))
    np.testing.assert_allclose([model.block_rate(block) for block in range(4)], [0, 0.1, 0.2, 0.3])


@pytest.mark.one_variant
@pytest.mark.parametrize("version", [1, 2])
def test_rematerialization_does_not_change_the_output(version):
    arguments = TINY | SHORT | dict(version=version, dropout=0.1, stochastic_depth=0.5)
    images = random_images(2, *TINY["image_size"])
    plain, again = (
        forward(random_model("Swin-T", **arguments, remat=remat), images, seed=3)
        for remat in ("none", "full")
    )
    np.testing.assert_allclose(plain, again, atol=1e-5)
    assert not np.allclose(
        plain, forward(random_model("Swin-T", **arguments), images, seed=4), atol=1e-3
    )


def test_attention_of_each_window_is_captured():
    model, images = random_model("Swin-T", **TINY | SHORT), random_images(1, *TINY["image_size"])

    logits, found = jax.jit(partial(model, capture=("attention", "features")))(images)
    first, shifted = found["attention"]
    assert first.shape == shifted.shape == (1, 9, 2, 9, 9)
    np.testing.assert_allclose(first.sum(-1), 1, rtol=1e-5)
    # Captured after the patch embedding and after each of the two blocks. The last features are the
    # input of the head's norm.
    *_, last = found["features"]
    assert len(found["features"]) == 3
    np.testing.assert_allclose(last, model.features(images, dense=True)[-1], atol=1e-6)
    np.testing.assert_allclose(logits, model(images), atol=1e-6)
    with pytest.raises(
        UserError, match="'tokens' cannot be captured; there are: attention, attended, features"
    ):
        model(images, capture=("tokens",))


def test_captured_attention_is_in_the_images_positions():
    """Attention is mapped back to the positions in the image.

    The map of 7x9 has windows of 3. The second block's windows are shifted by 1 and padded with
    zeros.
    """
    model = random_model("Swin-T", **TINY)
    _, found = model(random_images(1, *TINY["image_size"]), capture=("attention", "attended"))
    for block, shift in ((0, 0), (1, 1)):
        weights, wanted = np.asarray(found["attention"][block])[0], np.zeros((9, 9, 2))
        for window, each in enumerate(weights):
            for token in range(9):
                row, column = window // 3 * 3 + token // 3, window % 3 * 3 + token % 3
                wanted[row, column] = each[:, :, token].sum(axis=-1)
        wanted = np.roll(wanted[:7], (shift, shift), axis=(0, 1))
        np.testing.assert_allclose(found["attended"][block][0], wanted, rtol=1e-5)


def test_dense_features_are_of_each_stage():
    model, images = random_model("Swin-T", **TINY | dict(blocks=(1, 1))), random_images(1, 14, 18)
    fine, coarse = jax.jit(partial(model.features, dense=True))(images)
    assert (fine.shape, coarse.shape) == ((1, 7, 9, 8), (1, 4, 5, 16))
    np.testing.assert_allclose(model.norm(coarse).mean((1, 2)), model.features(images), atol=1e-5)


def test_a_swin_can_be_resized_if_its_windows_stay_the_same():
    arguments = TINY | dict(image_size=(12, 12), blocks=(1, 1))
    model, images = random_model("Swin-T", **arguments), random_images(1, 24, 12)
    larger = random_model("Swin-T", **arguments | dict(image_size=(24, 12)))
    np.testing.assert_array_equal(forward(model.resized((24, 12)), images), forward(larger, images))
    assert model.resized(12) is model
    with pytest.raises(UserError, match="has windows of 3x3 in stage 2, for 8x8 pixels of 2x2"):
        model.resized(8)
    with pytest.raises(UserError, match="parameters for each patch"):
        random_model("Swin-T", **TINY, position="1d").resized(12)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            dict(image_size=15),
            "patch size 2 does not divide the image of 15x15 pixels; use .* 14 or 16",
        ),
        (dict(blocks=(2,)), "model.stage_heads has 2 stages, and model.blocks 1"),
        (dict(version=2, pretrained_windows=(4,)), "model.pretrained_windows has 1 stages"),
        (dict(pretrained_windows=(4, 4)), "is for model.version=2"),
        (dict(stage_heads=(2, 3)), "3 heads do not divide the width 16 of stage 2"),
        (dict(window=0), "window is 0 and must be"),
        (dict(window=(3, 3, 3)), "model.window has 3 stages, and model.blocks 2"),
        (dict(version=3), "version is 3 and must be"),
        (dict(position="2d"), "position is '2d' and must be"),
    ],
)
def test_arguments_that_make_no_swin_are_refused(changes, words):
    with pytest.raises(UserError, match=words):
        model_factory("Swin-T", **TINY | changes)(rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    "name", ["SwinV2-T", "Swin-X", "Swin-T/w0", "Swin-B/w12to16", "SwinV2-B/w7to14"]
)
def test_incomplete_or_contradictory_names_are_refused(name):
    with pytest.raises(UserError, match="unknown model"):
        model_factory(name, num_classes=3, image_size=224)
