"""Tests of the Vision Transformer: sizes against the paper, outputs against NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import vit_jax
from vit_jax.errors import UserError
from vit_jax.models import count_multiply_adds, model_factory
from vit_jax.models.vit import ViT
from vit_jax.models.vit_names import SIZES

TINY = dict(image_size=(8, 12), num_classes=5, patch_size=4, dim=16, depth=2, mlp_dim=24, heads=4)


@functools.cache
def card(
    name: str, num_classes: int = 1000, image_size: int = 224, **overrides
) -> vit_jax.ModelCard:
    return vit_jax.model_card(name, num_classes=num_classes, image_size=image_size, **overrides)


def count(*arguments, **overrides) -> int:
    return card(*arguments, **overrides).parameters


# Numbers of parameters without a head, at 224 pixels.
TRUNKS = {
    "ViT-Ti/32": 5_938_560,
    "ViT-Ti/16": 5_524_416,
    "ViT-Ti/8": 5_526_720,
    "ViT-S/32": 22_493_952,
    "ViT-S/16": 21_665_664,
    "ViT-S/14": 21_619_584,
    "ViT-S/8": 21_670_272,
    "ViT-B/32": 87_455_232,
    "ViT-B/16": 85_798_656,
    "ViT-B/14": 85_706_496,
    "ViT-B/8": 85_807_872,
    "ViT-L/32": 305_510_400,
    "ViT-L/16": 303_301_632,
    "ViT-L/14": 303_178_752,
    "ViT-H/32": 633_679_360,
    "ViT-H/16": 630_918_400,
    "ViT-H/14": 630_764_800,
    "ViT-g/16": 1_011_371_392,
    "ViT-g/14": 1_011_202_432,
    "ViT-G/16": 1_842_975_360,
    "ViT-G/14": 1_842_775_680,
}


@pytest.mark.one_variant
@pytest.mark.parametrize(
    ("name", "num_classes"),
    [(name, 1000) for name in TRUNKS] + [("ViT-B/16", 21_843), ("ViT-S/32", 18_291)],
)
def test_parameter_count_is_the_papers(name, num_classes):
    dim = SIZES[name[4:].split("/")[0]]["dim"]
    assert count(name, num_classes) == TRUNKS[name] + (dim + 1) * num_classes


@pytest.mark.parametrize(
    ("name", "num_classes", "parameters"),
    [
        ("ViT-Ti/16", 1000, 5_754_472),
        ("ViT-S/32", 1000, 23_026_792),
        ("ViT-S/16", 18_291, 28_855_539),
        ("ViT-B/32", 21_843, 104_843_091),
        ("ViT-B/16", 21_843, 103_186_515),
        ("ViT-L/32", 18_291, 325_308_275),
        ("ViT-L/16", 1000, 305_376_232),
        ("ViT-H/14", 21_843, 660_385_363),
    ],
)
def test_pre_logits_layer_adds_its_parameters(name, num_classes, parameters):
    assert count(name, num_classes, pre_logits=True) == parameters


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("ViT-S/16", 22_049_896),
        ("ViT-S/32", 22_878_184),
        ("ViT-B/16", 86_566_120),
        ("ViT-B/32", 88_222_696),
        ("ViT-L/16", 304_324_584),
        ("ViT-H/14", 632_043_240),
    ],
)
def test_average_pooling_has_no_class_token(name, parameters):
    assert count(name, pooling="gap") == parameters


@pytest.mark.one_variant
@pytest.mark.parametrize(
    ("name", "image_size", "tokens", "parameters"),
    [
        ("ViT-B/16", 384, 577, 86_859_496),
        ("ViT-B/32", 384, 145, 88_297_192),
        ("ViT-L/16", 384, 577, 304_715_752),
        ("ViT-L/32", 384, 145, 306_632_680),
        ("ViT-L/16", 512, 1025, 305_174_504),
        ("ViT-H/14", 518, 1370, 633_470_440),
        # The paper's size is 384. Patches of 14 pixels cover 378 pixels of it.
        ("ViT-H/14", 378, 730, 632_651_240),
    ],
)
def test_resolution_changes_only_the_position_table(name, image_size, tokens, parameters):
    assert count(name, image_size=image_size) == parameters
    assert card(name, image_size=image_size).tokens == tokens


@pytest.mark.parametrize(
    ("name", "image_size", "gmac"),
    [
        ("ViT-Ti/16", 224, 1.254),
        ("ViT-S/32", 224, 1.143),
        ("ViT-S/16", 224, 4.599),
        ("ViT-B/32", 224, 4.409),
        ("ViT-B/16", 224, 17.564),
        ("ViT-L/16", 224, 61.555),
        ("ViT-H/14", 224, 167.295),
        ("ViT-B/16", 384, 55.484),
        ("ViT-L/16", 384, 191.066),
    ],
)
def test_multiply_adds_are_the_papers(name, image_size, gmac):
    assert card(name, image_size=image_size).multiply_adds / 1e9 == pytest.approx(gmac, rel=1e-3)


def test_multiply_adds_equal_the_compilers_count():
    model = vit_jax.create_model("ViT-Ti/16", num_classes=1000, pre_logits=True)
    graphdef, params = nnx.split(model)

    def forward(params, images):
        return nnx.merge(graphdef, params)(images, whole=True)

    lowered = jax.jit(forward).lower(params, jnp.zeros((1, 224, 224, 3)))
    # Norms, softmax and GELU are a few per cent of all operations.
    flops = lowered.cost_analysis()["flops"]
    counted = 2 * count_multiply_adds(model)
    assert counted < flops < 1.1 * counted


def random_model(**overrides) -> ViT:
    """Returns a model with random parameters; none is zero, so that each affects the output."""
    model = vit_jax.create_model("ViT-Ti/4", **(TINY | overrides))
    rng = np.random.default_rng(0)
    graphdef, params = nnx.split(model)
    params = jax.tree.map(lambda x: jnp.asarray(rng.normal(0, 0.3, x.shape), x.dtype), params)
    return nnx.merge(graphdef, params)


forward = jax.jit(lambda model, images: model(images))


def reference(params: dict, images: np.ndarray, patch: int, pooling: str, erf: bool) -> np.ndarray:
    """Returns the logits by the equations of section 3.1, in float64, with loops."""
    from scipy.special import erf as error_function

    def norm(x, p):
        mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
        return (x - mean) / np.sqrt(var + 1e-6) * p["scale"] + p["bias"]

    def gelu(x):
        if erf:
            return x * (1 + error_function(x / np.sqrt(2))) / 2
        return x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))) / 2

    logits = []
    for image in images:
        rows, columns = image.shape[0] // patch, image.shape[1] // patch
        kernel = params["patch_embedding"]["kernel"].reshape(-1, params["head"]["kernel"].shape[0])
        tokens = []
        for r in range(rows):
            for c in range(columns):
                pixels = image[r * patch : (r + 1) * patch, c * patch : (c + 1) * patch]
                tokens.append(pixels.reshape(-1) @ kernel + params["patch_embedding"]["bias"])
        x = np.stack(([params["cls"][0, 0]] if pooling == "cls" else []) + tokens)
        x = x + params["position_embedding"]["table"][0]
        for name in sorted(params["blocks"]):
            block = params["blocks"][name]
            y, attention = norm(x, block["norm1"]), block["attention"]
            total = attention["out"]["bias"]
            for head in range(attention["out"]["kernel"].shape[0]):
                kernels, biases = (
                    attention["qkv"]["kernel"][:, :, head],
                    attention["qkv"]["bias"][:, head],
                )
                query, key, value = (y @ kernels[:, i] + biases[i] for i in range(3))
                scores = np.exp(query @ key.T / np.sqrt(query.shape[-1]))
                weights = scores / scores.sum(-1, keepdims=True)
                total = total + weights @ value @ attention["out"]["kernel"][head]
            x = x + total
            y, mlp = norm(x, block["norm2"]), block["mlp"]
            hidden = gelu(y @ mlp["fc1"]["kernel"] + mlp["fc1"]["bias"])
            x = x + hidden @ mlp["fc2"]["kernel"] + mlp["fc2"]["bias"]
        x = norm(x, params["norm"])
        x = x[0] if pooling == "cls" else x.mean(0)
        if "pre_logits" in params:
            x = np.tanh(x @ params["pre_logits"]["kernel"] + params["pre_logits"]["bias"])
        logits.append(x @ params["head"]["kernel"] + params["head"]["bias"])
    return np.stack(logits)


@pytest.mark.parametrize("pooling", ["cls", "gap"])
@pytest.mark.parametrize("gelu", ["tanh", "erf"])
@pytest.mark.parametrize("pre_logits", [False, True])
def test_logits_equal_a_plain_forward_pass(pooling, gelu, pre_logits):
    model = random_model(pooling=pooling, gelu=gelu, pre_logits=pre_logits)
    images = np.random.default_rng(1).uniform(-1, 1, (3, 8, 12, 3))
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), nnx.to_pure_dict(nnx.state(model)))
    expected = reference(params, images, patch=4, pooling=pooling, erf=gelu == "erf")
    np.testing.assert_allclose(forward(model, np.float32(images)), expected, atol=2e-5)


def test_a_new_head_outputs_exactly_its_bias():
    model = vit_jax.create_model("ViT-Ti/4", **TINY, head_bias=-10.0)
    images = np.random.default_rng(0).uniform(-1, 1, (2, 8, 12, 3)).astype(np.float32)
    np.testing.assert_array_equal(model(images), np.full((2, 5), -10.0, np.float32))


def test_dropout_is_off_without_a_key():
    images = jnp.ones((2, 8, 12, 3))
    with_rate, without = random_model(dropout=0.5), random_model(dropout=0.0)
    np.testing.assert_array_equal(forward(with_rate, images), forward(without, images))


def test_dropout_follows_its_key():
    model, images = random_model(dropout=0.5), jnp.ones((2, 8, 12, 3))
    with_key = jax.jit(lambda key: model(images, nnx.Rngs(dropout=key)))
    first, again, other = (with_key(jax.random.key(seed)) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert not np.allclose(first, other)


@pytest.mark.one_variant
@pytest.mark.parametrize("values", [{}, {"scan": True}, {"rope": "dinov3", "rope_rescale": 2.0}])
def test_tokens_of_a_layer_equal_those_in_a_full_forward_pass(values):
    model = random_model(depth=4, stochastic_depth=0.5, dropout=0.1, **values)
    embed = jax.jit(lambda images: model.assemble(model.patches(images)))
    x = embed(np.zeros((5, 8, 12, 3), np.uint8))

    @functools.partial(jax.jit, static_argnums=(1, 2))
    def encode(x, training, after):
        return model.encode(x, nnx.Rngs(dropout=1) if training else None, after=after)

    for training in (False, True):
        np.testing.assert_allclose(encode(x, training, 3)[0], encode(x, training, None), rtol=1e-5)

    @jax.jit
    def capture(x):
        with model.capturing(["tokens"]) as found:
            _, early = model.encode(x, after=3)
        return early, found["tokens"]

    early, tokens = capture(x)
    assert len(tokens) == 5
    np.testing.assert_array_equal(early, tokens[3])


def test_bfloat16_keeps_float32_parameters_and_logits():
    model = random_model(dtype="bfloat16")
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model))} == {jnp.dtype("float32")}
    images = np.random.default_rng(1).uniform(-1, 1, (3, 8, 12, 3)).astype(np.float32)
    logits = forward(model, images)
    assert logits.dtype == jnp.float32
    full = forward(random_model(), images)
    np.testing.assert_allclose(logits, full, atol=0.05 * np.abs(full).max())


def test_the_same_seed_has_the_same_parameters():
    one, two, other = (vit_jax.create_model("ViT-Ti/4", **TINY, seed=seed) for seed in (3, 3, 4))
    kernels = [model.blocks["00"].mlp.fc1.kernel[...] for model in (one, two, other)]
    np.testing.assert_array_equal(kernels[0], kernels[1])
    assert not np.array_equal(kernels[0], kernels[2])


def initialized(name, parts, **values):
    """Returns some parts of a new model; the compiler removes the other parts' random numbers."""
    build = model_factory(name, num_classes=10, image_size=224, **values)
    return jax.jit(lambda: parts(build(rngs=nnx.Rngs(0))))()


def block_and_patches(model):
    return model.blocks["05"], model.patch_embedding


def test_initial_values_are_those_of_the_authors():
    positions, cls, block, patches = initialized(
        "ViT-S/16",
        lambda model: (
            model.position_embedding,
            model.cls,
            model.blocks["05"],
            model.patch_embedding,
        ),
    )
    assert np.std(positions.table[...]) == pytest.approx(0.02, rel=0.02)
    assert not np.any(cls[...])
    for kernel, fan_in, fan_out in (
        (block.attention.qkv.kernel, 384, 384),
        (block.attention.out.kernel, 384, 384),
        (block.mlp.fc1.kernel, 384, 1536),
        (block.mlp.fc2.kernel, 1536, 384),
    ):
        limit = np.sqrt(6 / (fan_in + fan_out))
        assert np.abs(kernel[...]).max() == pytest.approx(limit, rel=1e-3)
        assert np.std(kernel[...]) == pytest.approx(limit / np.sqrt(3), rel=0.01)
    assert np.std(block.mlp.fc1.bias[...]) == pytest.approx(1e-6, rel=0.1)
    assert np.std(patches.kernel[...]) == pytest.approx(np.sqrt(1 / 768), rel=0.01)
    # A normal distribution truncated at two standard deviations and rescaled to its original
    # variance.
    assert np.abs(patches.kernel[...]).max() == pytest.approx(2.2737 / np.sqrt(768), rel=1e-3)
    assert abs(np.mean(block.mlp.fc2.kernel[...])) < 5 * limit / np.sqrt(3 * 1536 * 384)


def test_initial_values_can_be_those_of_masked_autoencoders():
    # PyTorch's Xavier initialization treats q, k and v as one layer, and the patch embedding as
    # dense.
    block, patches = initialized("ViT-S/16", block_and_patches, initialization="mae")
    for kernel, limit in (
        (block.attention.qkv.kernel, np.sqrt(6 / (384 + 3 * 384))),
        (block.attention.out.kernel, np.sqrt(6 / (384 + 384))),
        (block.mlp.fc1.kernel, np.sqrt(6 / (384 + 1536))),
        (patches.kernel, np.sqrt(6 / (768 + 384))),
        (patches.bias, np.sqrt(1 / 768)),
    ):
        values = np.asarray(kernel[...])
        assert (
            np.abs(values).max() == pytest.approx(limit, rel=0.02) and np.abs(values).max() <= limit
        )
        assert np.std(values) == pytest.approx(limit / np.sqrt(3), rel=0.1)
    assert not np.any(block.mlp.fc1.bias[...]) and not np.any(block.mlp.fc2.bias[...])


def test_initial_values_can_be_those_of_vqkd():
    block, patches = initialized("ViT-S/16", block_and_patches, initialization="vqkd")
    for kernel, divided in (
        (block.attention.qkv, 1),
        (block.attention.out, 12),
        (block.mlp.fc2, 12),
    ):
        assert np.std(kernel.kernel[...]) == pytest.approx(0.02 / np.sqrt(divided), rel=0.01)
    assert np.std(patches.kernel[...]) == pytest.approx(np.sqrt(1 / 768 / 3), rel=0.1)


def test_initial_values_can_be_deits():
    block, patches = initialized("ViT-S/16", block_and_patches, initialization="deit")
    for kernel in (block.attention.qkv.kernel, block.attention.out.kernel, block.mlp.fc2.kernel):
        assert np.std(kernel[...]) == pytest.approx(0.02, rel=0.01)
    for values in (patches.kernel[...], patches.bias[...]):
        assert 0.95 < np.abs(values).max() * np.sqrt(768) <= 1
        assert np.std(values) == pytest.approx(np.sqrt(1 / 768 / 3), rel=0.1)
    assert not np.any(block.mlp.fc1.bias[...])


@pytest.mark.parametrize("layer", [0, 11])
def test_initial_values_can_be_beits(layer):
    block = initialized(
        "BEiT-B/16", lambda model: model.blocks[f"{layer:02d}"], initialization="beit"
    )
    # Ratio of the std of a normal distribution truncated at one standard deviation to the original
    # std.
    truncated = 0.5396
    for kernel in (block.attention.qkv.kernel, block.mlp.fc1.kernel):
        assert np.std(kernel[...]) == pytest.approx(0.02 * truncated, rel=0.01)
        assert np.abs(kernel[...]).max() <= 0.02
    for kernel in (block.attention.out.kernel, block.mlp.fc2.kernel):
        assert np.std(kernel[...]) == pytest.approx(
            0.02 * truncated / np.sqrt(2 * (layer + 1)), rel=0.01
        )


@pytest.mark.parametrize(
    ("name", "factor"), [("EVA02-S/14", 1.0), ("EVA02-B/14", np.sqrt(np.log(24)))]
)
def test_initial_values_can_be_those_of_eva02(name, factor):
    """With norms inside the branches, all kernels but those of queries and keys are larger."""
    block, embedding = initialized(name, block_and_patches, initialization="eva02")
    dim = embedding.kernel.shape[-1]
    query, key, value = np.moveaxis(np.asarray(block.attention.qkv.kernel[...]), 1, 0)
    # q, k and v are one layer in the authors' small models, and three layers in the larger ones.
    outputs = dim if factor > 1 else 3 * dim
    for kernel in (query, key, value / factor):
        assert np.std(kernel) == pytest.approx(np.sqrt(2 / (dim + outputs)), rel=0.01)
    hidden = block.mlp.fc2.kernel.shape[0]
    for kernel, inputs, outputs in (
        (block.attention.out.kernel, dim, dim),
        (block.mlp.fc1.kernel, dim, hidden),
        (block.mlp.fc2.kernel, hidden, dim),
    ):
        assert np.std(kernel[...]) == pytest.approx(
            factor * np.sqrt(2 / (inputs + outputs)), rel=0.01
        )
    patches = np.asarray(embedding.kernel[...])
    assert np.abs(patches).max() == pytest.approx(np.sqrt(6 / (588 + dim)), rel=0.01)


def test_no_two_kernels_have_equal_initial_values():
    model = vit_jax.create_model("ViT-Ti/4", **TINY)
    kernels = [
        getattr(block.mlp, name).kernel[...]
        for block in model.blocks.values()
        for name in ("fc1", "fc2")
    ]
    first = {float(kernel[0, 0]) for kernel in kernels}
    assert len(first) == len(kernels)


def test_compiled_and_eager_initialization_give_equal_values():
    build = model_factory("ViT-Ti/4", **TINY)
    eager = nnx.state(build(rngs=nnx.Rngs(0)))
    jax.tree.map(
        np.testing.assert_array_equal, eager, jax.jit(lambda: nnx.state(build(rngs=nnx.Rngs(0))))()
    )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (dict(image_size=(9, 12)), "patch size 4 does not divide the image of 9x12"),
        (dict(heads=3), "3 heads do not divide the width 16"),
        (dict(pooling="max"), "pooling is 'max' and must be cls or gap or cls_gap or map"),
        (dict(gelu="relu"), "gelu is 'relu' and must be tanh or erf"),
    ],
)
def test_errors_about_sizes_name_them(overrides, message):
    with pytest.raises(UserError, match=message):
        vit_jax.create_model("ViT-Ti/4", **(TINY | overrides))


@pytest.mark.parametrize("name", ["ViT-X/16", "vit_b16", "ViT-B", "ViT-B/0", ""])
def test_the_error_about_an_unknown_model_names_it(name):
    with pytest.raises(UserError, match=f"unknown model {name!r}"):
        vit_jax.create_model(name)
