"""Every option of models and training works in float32 and bfloat16, with and without scan."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from vit_jax.config import base_config
from vit_jax.models import abstract, model_factory
from vit_jax.models.layers import REMAT, placing
from vit_jax.models.vit import FAMILY as VIT
from vit_jax.options.model import ViTOptions
from vit_jax.parallel.mesh import make_mesh
from vit_jax.parallel.sharding import path_name
from vit_jax.training.optimizer import layer_of
from vit_jax.training.program import abstract_batch, make_program

TINY = dict(dim=16, depth=2, mlp_dim=32, heads=2)
RANDOM = dict(dropout=0.1, stochastic_depth=0.2)

# A few models that together use every option of a ViT.
MODELS = {
    "class token": dict(
        distillation="token",
        registers=2,
        layer_scale=0.1,
        qk_norm=True,
        rope="eva02",
        rope_rescale=2.0,
        pre_logits=True,
        uniform_depth=True,
        depth_by="subset",
    ),
    "two heads": dict(distillation="heads", mlp="swiglu", position="2d", position_at="every"),
    "average": dict(
        pooling="gap",
        fc_norm=True,
        cls_token=True,
        gelu="erf",
        position_at="shared",
        initialization="mae",
    ),
    "attention pooling": dict(
        pooling="map",
        pool_all=True,
        pool_heads=4,
        position="relative",
        mean=(0.485, 0.456, 0.406),
        std=(0.229, 0.224, 0.225),
    ),
    "biases": dict(
        position="bias", qkv_bias="qv", bias=False, norm="rms", sub_norm="both", stem_norm="patches"
    ),
    "norms behind": dict(
        norm_at="after", final_norm=False, stem_norm="tokens", attention_dropout=0.1
    ),
    "learned frequencies": dict(rope="mixed", position="none"),
    "axial": dict(pooling="gap", attention="axial", position="sincos2d"),
    "windows": dict(pooling="gap", attention="windows", window=2, global_layers=0),
    "no positions": dict(position="none"),
    "hybrid": dict(resnet_blocks=(1, 1), resnet_stem="small", patch_size=2),
}
TYPES, SCANS = ("float32", "bfloat16"), (False, True)

# Config values for each kind of training, in addition to the model's.
TRAINING = {
    "micro-batches": {"micro_batches": 2},
    "augmentation": {"augment.mixup": 0.5, "augment.cutmix": 1.0, "augment.erasing": 0.5},
    "sigmoid": {"loss.name": "sigmoid", "loss.label_smoothing": 0.1},
    "binary": {"loss.name": "binary", "augment.mixup": 0.5},
    "lamb": {"optimizer.name": "lamb", "optimizer.moment_dtype": "bfloat16"},
    "adafactor": {"optimizer.name": "adafactor", "optimizer.moment_dtype": "bfloat16"},
    "sgd": {"optimizer.name": "sgd", "optimizer.moment_dtype": "bfloat16"},
    "muon": {"optimizer.name": "muon", "optimizer.moment_dtype": "bfloat16"},
    "muon of low-rank changes": {"optimizer.name": "muon", "finetune.train": "lora"},
    "average": {"optimizer.average": 0.99},
    "layer decay": {"optimizer.layer_decay": 0.7},
    "rate of the patch embedding": {
        "optimizer.embedding_rate": 0.2,
        "optimizer.weight_decay_end": 0.4,
    },
    "clipped apart": {"optimizer.clip": "module", "objective.name": "mae"},
    "clipped by array": {"optimizer.clip": "tensor", "finetune.train": "lora"},
    "low-rank changes": {"finetune.train": "lora"},
    "head": {"finetune.train": "head"},
    "masked patches": {"objective.name": "masked_patch"},
    "masked autoencoder": {"objective.name": "mae"},
}


def training_loss(name: str, **options):
    """Returns a tiny model's factory, its training loss and its abstract parameters.

    The loss is a function of parameters and images.
    """
    values = dict(num_classes=5, image_size=8) | TINY | RANDOM | MODELS[name] | options
    build = model_factory("ViT-Ti/4", **values)
    graphdef, params = nnx.split(abstract(build))

    def loss(params, images):
        return jnp.square(
            nnx.merge(graphdef, params)(images, nnx.Rngs(dropout=jax.random.key(1)))
        ).mean()

    return build, loss, params


def test_the_models_have_every_option():
    used = {option for model in MODELS.values() for option in model} | RANDOM.keys()
    numbers = {"channels", "resnet_width", "resnet_epsilons", "rope_grid", "norm_epsilon"}
    # These affect only initialization and resizing.
    numbers |= {"head_bias", "head_std", "position_resize"}
    numbers |= {"merge_tokens"}  # This affects only evaluation.
    crossed = {"dtype", "scan", "remat"}
    fields = dataclasses.fields(ViTOptions)
    known = {field.name for field in fields if field.default is not dataclasses.MISSING}
    assert known - numbers - crossed == used - {"patch_size"}


def test_only_parameters_after_the_encoder_have_an_infinite_layer_number():
    behind = {"norm", "fc_norm", "pre_logits", "attention_pooling", "head", "distillation_head"}
    for name in MODELS:
        for path, _ in jax.tree.leaves_with_path(nnx.to_pure_dict(training_loss(name)[2])):
            first, layer = (
                path_name(path).split("/")[0],
                layer_of(VIT.layer(None), "params/" + path_name(path)),
            )
            assert (first in behind) == (layer == math.inf), (name, path)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_activations_keep_their_dtype_in_training(name):
    # Stochastic depth skips one or two of the 8 images.
    images = jax.ShapeDtypeStruct((8, 8, 8, 3), jnp.float32)
    for dtype, scan, remat in itertools.product(TYPES, SCANS, REMAT):
        types = set()

        def record(_, x, types=types):
            types.add(x.dtype.name)
            return x

        _, loss, params = training_loss(name, dtype=dtype, scan=scan, remat=remat)
        with placing(record, "cpu"):
            # In float32 only the loss is traced: activations and gradients have no lower type to
            # fall to, and tracing gradients costs twice as much as tracing the loss.
            results = jax.eval_shape(
                loss if dtype == "float32" else jax.value_and_grad(loss), params, images
            )
        assert types == {dtype}, (dtype, scan, remat)
        assert {x.dtype.name for x in jax.tree.leaves(results)} == {"float32"}


@pytest.mark.slow
def test_scanned_layers_have_the_loss_of_unrolled_layers():
    images = np.random.default_rng(0).uniform(-1, 1, (4, 8, 8, 3)).astype(np.float32)
    losses = []
    for scan in SCANS:
        build, loss, _ = training_loss("average", dtype="bfloat16", scan=scan)
        params = nnx.state(build(rngs=nnx.Rngs(0)))
        params["head"]["kernel"] = nnx.Param(jax.random.normal(jax.random.key(2), (16, 5)))
        losses.append(float(jax.jit(loss)(params, images)))
    # Activations in bfloat16 have 8 bits of precision, and the compiler rounds in other places of a
    # scan.
    np.testing.assert_allclose(*losses, rtol=2e-2)


@pytest.mark.one_variant
@pytest.mark.parametrize("name", TRAINING)
@pytest.mark.parametrize("scan", SCANS)
def test_a_step_of_every_kind_of_training_is_traced_in_bfloat16(name, scan):
    config = base_config()
    config.batch_size = 8
    config.data.image_size = 8
    config.optimizer.warmup_steps = 0
    model = dict(name="ViT-Ti/4", dtype="bfloat16", scan=scan, remat="full" if scan else "none")
    config.model.update(TINY | RANDOM | model)
    config.mae.update(dict(decoder_dim=16, decoder_depth=2, decoder_heads=2))
    config.update_from_flattened_dict(TRAINING[name])
    classes = 0 if config.objective.name != "classification" else 5
    program = make_program(config, num_classes=classes, steps=10, mesh=make_mesh(config.mesh))
    state, _ = jax.eval_shape(
        program.train_step, program.state, program.metrics, abstract_batch(config, program.mesh)
    )
    before, after = (jax.tree.map(lambda x: (x.shape, x.dtype), x) for x in (program.state, state))
    assert before == after
