"""Models exported as ONNX graphs equal the models; ONNX Runtime runs them."""

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import onnxruntime
import pytest
from flax import nnx

import vit_jax
from vit_jax.interop.onnx import convert

SMALL = dict(dim=32, depth=2, mlp_dim=64, heads=4, num_classes=5, image_size=32)
RESNET = dict(num_classes=5, image_size=32)
# The windows are shifted. They do not divide the map of the case "swin".
SWIN = dict(dim=8, blocks=(2, 1), stage_heads=(2, 4), window=2, num_classes=5)
MODELS = {
    "plain": ("ViT-S/16", SMALL),
    "options": (
        "ViT-S/16",
        SMALL | dict(pooling="gap", gelu="erf", layer_scale=1.0, qk_norm=True, position="sincos2d"),
    ),
    "other means": (
        "ViT-S/16",
        SMALL | dict(mean=(0.49, 0.46, 0.41), std=(0.23, 0.22, 0.225)),
    ),
    "map pooling": ("ViT-S/16", SMALL | dict(pooling="map", position="2d")),
    "axial": ("Axial-ViT-B/16", SMALL | dict(image_size=(32, 48))),
    "relative": ("ViT-S/16", SMALL | dict(position="relative", registers=2, mlp="swiglu")),
    "rotary": (
        "ViT-S/16",
        SMALL | dict(position="none", rope="eva02", distillation="heads", pre_logits=True),
    ),
    "positions in every layer": (
        "ViT-S/16",
        SMALL | dict(position_at="every", registers=1, depth=1),
    ),
    "computed again": ("ViT-S/16", SMALL | dict(remat="full")),
    "features": ("ViT-S/16", SMALL | dict(num_classes=0, channels=1)),
    "hybrid": ("R50+ViT-B/16", SMALL | dict(resnet_blocks=(1, 1), patch_size=4)),
    "bit": ("BiT-R50x1", RESNET | dict(resnet_blocks=(1, 2, 1), image_size=(32, 40))),
    "timm's bit": ("BiT-R50x1", RESNET | dict(resnet_blocks=(1,), resnet_epsilons="timm")),
    "convnext": (
        "ConvNeXtV2-Atto",
        dict(blocks=(1, 1), widths=(8, 16), num_classes=5, image_size=(32, 40)),
    ),
    "swin": ("Swin-T", SWIN | dict(image_size=(20, 28), position="1d")),
    "swin v2": ("SwinV2-T/w8", SWIN | dict(pretrained_windows=(3, 2), image_size=32)),
    "windows": (
        "ViT-S/16",
        SMALL
        | dict(attention="windows", window=2, global_layers=1, image_size=(48, 80), pooling="gap"),
    ),
    "axial bit": ("AxialResNet50", RESNET | dict(resnet_blocks=(1, 1))),
}
HALVES = {
    name: (MODELS[name][0], MODELS[name][1] | dict(dtype="float16")) for name in ("plain", "bit")
}


def model_of(name, values):
    """Returns a model with noise added to all parameters, also to the zeros of a new head."""
    model, rng = vit_jax.create_model(name, **values), np.random.default_rng(0)
    state = nnx.state(model)
    drawn = jax.tree.map(
        lambda x: (
            x + jnp.asarray(rng.normal(size=x.shape) * (0.05 if x.ndim > 1 else 0.3), x.dtype)
        ),
        state,
    )
    nnx.update(model, drawn)
    return model


def of_any_batch(model, dtype):
    (batch,) = jax.export.symbolic_shape("batch")
    return jax.ShapeDtypeStruct((batch, *model.image_size, model.channels), dtype)


def session_of(written):
    onnx.checker.check_model(written, full_check=True)
    return onnxruntime.InferenceSession(
        written.SerializeToString(), providers=["CPUExecutionProvider"]
    )


def function_of(model):
    graphdef, params = nnx.split(model)
    return lambda images: nnx.merge(graphdef, params)(images)


def check(model, tolerance):
    """Asserts that ONNX Runtime computes the model's logits, for any number of images."""
    written = convert(
        function_of(model), of_any_batch(model, np.float32), ("images", "logits"), 2**30
    )
    assert written.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"
    session = session_of(written)
    shape = (3, *model.image_size, model.channels)
    images = np.random.default_rng(1).uniform(-1, 1, shape).astype(np.float32)
    wanted = np.asarray(jax.jit(function_of(model))(images))
    assert wanted.std() > 0.05
    for batch in (1, 3):
        (logits,) = session.run(None, {"images": images[:batch]})
        np.testing.assert_allclose(
            logits, wanted[:batch], atol=tolerance * np.abs(wanted).max(), rtol=0
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_onnx_runtime_computes_the_logits_of_every_family(name):
    check(model_of(*MODELS[name]), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", HALVES)
def test_onnx_runtime_computes_the_logits_of_models_in_float16(name):
    check(model_of(*HALVES[name]), 5e-3)


def test_weights_are_written_once_and_in_the_dtype_of_the_computation():
    sizes = []
    for dtype in ("float32", "float16"):
        model = vit_jax.create_model(
            "ViT-S/16", **(SMALL | dict(position_at="shared", dtype=dtype))
        )
        written = convert(
            function_of(model), of_any_batch(model, np.float32), ("images", "logits"), 2**30
        )
        sizes.append(sum(len(tensor.raw_data) for tensor in written.graph.initializer))
    parameters = sum(x.size for x in jax.tree.leaves(nnx.state(model)))
    assert 4 * parameters <= sizes[0] < 4 * parameters + 4_000
    assert sizes[1] < 0.6 * sizes[0]


def test_a_sum_over_an_image_is_as_exact_as_jaxs():
    images = (np.random.default_rng(0).normal(size=(2, 256, 256, 3)) + 100).astype(np.float32)
    argument = jax.ShapeDtypeStruct(images.shape, np.float32)
    session = session_of(convert(lambda x: x.sum((1, 2, 3)), argument, ("images", "sum"), 2**20))
    (total,) = session.run(None, {"images": images})
    np.testing.assert_allclose(total, images.astype(np.float64).sum((1, 2, 3)), rtol=1e-6)


@pytest.mark.parametrize(
    "function, words",
    [
        (
            lambda x: jnp.sort(x),
            "the ONNX export does not support 'sort', which the model computes",
        ),
        (lambda x: jnp.eye(8)[:, x.astype(int)], "looks up computed indices"),
        (lambda x: x @ jnp.ones((8, 1000)), "exceed the 0.0 GB that an ONNX file can store"),
    ],
)
def test_errors_about_unsupported_operations_are_one_line(function, words):
    (batch,) = jax.export.symbolic_shape("batch")
    with pytest.raises(vit_jax.UserError, match=words):
        convert(function, jax.ShapeDtypeStruct((batch, 8), np.float32), ("x", "y"), 4_000)
