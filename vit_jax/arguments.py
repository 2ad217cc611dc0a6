"""The bounds of each argument of a model, by which `ViT`, `BiT`, configs and checkpoints are checked.

The models themselves say which arguments fit together.
"""

from typing import Any

from vit_jax.errors import UserError
from vit_jax.options import Option, either, flag, number, one_of, several, text, unless, whole

_SIDE = whole(1, 2**16)
# Of pixels in [0, 1]; checkpoints whose pixels are scaled otherwise have others.
_MEAN, _DEVIATION = number(least=-1e3, most=1e3), number(above=0, most=1e3)
_MOST_LAYERS = 1000  # Each takes time when a model is made, before anything can say that memory is short.
_UNITS, _WIDTH = several(whole(1, _MOST_LAYERS)), number(above=0, most=1024)

ARGUMENTS = {
    "image_size": either(_SIDE, several(_SIDE, count=2))._replace(
        words="pixels above 0, at most 65,536, or (height, width)"
    ),
    "num_classes": whole(0, 2**24),
    "patch_size": _SIDE,
    "channels": whole(1, 2**16),
    "mean": either(several(_MEAN, least=1), _MEAN)._replace(
        words="a number from -1,000 to 1,000, or one for each channel"
    ),
    "deviation": either(several(_DEVIATION, least=1), _DEVIATION)._replace(
        words="a number above 0, at most 1,000, or one for each channel"
    ),
    "dim": whole(1, 2**20),
    "depth": whole(1, _MOST_LAYERS),
    "hidden": whole(1, 2**20),
    "heads": whole(1, 2**16),
    "registers": whole(0, 2**16),
    "resnet_blocks": _UNITS._replace(
        words=f"a tuple of units in each stage, 1 to {_MOST_LAYERS:,}, in at most 8 stages",
        holds=lambda x: _UNITS.holds(x) and len(x) <= 8,
    ),
    # An even number of channels, of 64 at width 1: group norms have groups of two or more.
    "resnet_width": _WIDTH._replace(
        words="a multiple of 1/32, above 0, at most 1,024",
        holds=lambda x: _WIDTH.holds(x) and 32 * x % 1 == 0,
    ),
    "resnet_stem": one_of("large", "small"),
    "resnet_epsilons": one_of("google", "timm"),
    "cls_token": flag(),
    "fc_norm": flag(),
    "pooling": one_of("cls", "gap", "map"),
    "distillation": one_of("none", "token", "heads"),
    "position": one_of("1d", "2d", "relative", "sincos2d", "sincos2d_mae", "none"),
    "position_at": one_of("stem", "every", "shared"),
    "rope": flag(),
    "rope_grid": several(_SIDE, count=2),
    "attention": one_of("full", "axial"),
    "axial": flag(),
    "mlp": one_of("gelu", "swiglu"),
    "gelu": one_of("tanh", "erf"),
    "qk_norm": flag(),
    "layer_scale": number(),
    "pre_logits": flag(),
    "dropout": number(least=0, below=1),
    "stochastic_depth": number(least=0, below=1),
    "head_bias": number(),
    "initialization": one_of("flax", "mae"),
    "norm_epsilon": number(above=0, most=1),
    "remat": one_of("none", "dots", "full"),
    "scan": flag(),
    "dtype": one_of("float32", "bfloat16", "float16"),
}

# None leaves it to the model's name or to the checkpoint that a run starts from.
OPTIONS = {
    "model.name": Option(
        "ViT-B/16",
        text(),
        "A name of vit_jax.list_models(); empty: the checkpoint's.",
        optional=True,
        fits=lambda value, config: unless(
            bool(value or config.finetune.checkpoint),
            "a model such as 'ViT-B/16' where there is no config.finetune.checkpoint",
        ),
    ),
    "model.mean": Option(
        None,
        ARGUMENTS["mean"],
        "Mean of pixels in [0, 1] by which the model normalises, of each channel or (0.5,) of all.",
    ),
    "model.deviation": Option(None, ARGUMENTS["deviation"], "Deviation of pixels in [0, 1], as the mean."),
    "model.patch_size": Option(None, ARGUMENTS["patch_size"], "Side of a patch in pixels."),
    "model.dim": Option(None, ARGUMENTS["dim"], "Width of a token."),
    "model.depth": Option(None, ARGUMENTS["depth"], "Number of encoder layers."),
    "model.hidden": Option(None, ARGUMENTS["hidden"], "Width of the MLP."),
    "model.heads": Option(None, ARGUMENTS["heads"], "Attention heads."),
    "model.registers": Option(None, ARGUMENTS["registers"], "Learned tokens without a meaning of their own."),
    "model.resnet_blocks": Option(
        None, ARGUMENTS["resnet_blocks"], "Units in each stage of the ResNet, of a hybrid or a BiT."
    ),
    "model.resnet_width": Option(None, ARGUMENTS["resnet_width"], "Factor on the ResNet's channels."),
    "model.resnet_stem": Option(
        None,
        ARGUMENTS["resnet_stem"],
        "The ResNet's first layers: for large images, or for those of 32 pixels or so.",
    ),
    "model.resnet_epsilons": Option(
        None, ARGUMENTS["resnet_epsilons"], "Whose small constants in the ResNet's norms."
    ),
    "model.pooling": Option(None, ARGUMENTS["pooling"], "What the head reads of the tokens."),
    "model.cls_token": Option(
        None, ARGUMENTS["cls_token"], "Keep a class token beside the pooling gap or map."
    ),
    "model.fc_norm": Option(None, ARGUMENTS["fc_norm"], "Normalise behind the pooling, in place of before."),
    "model.distillation": Option(None, ARGUMENTS["distillation"], "DeiT's distillation token, and its head."),
    "model.position": Option(None, ARGUMENTS["position"], "Kind of position embedding (appendix D.4)."),
    "model.position_at": Option(
        None, ARGUMENTS["position_at"], "Where positions are added: once, or before each layer."
    ),
    "model.rope": Option(None, ARGUMENTS["rope"], "Turn queries and keys by their row and column."),
    "model.rope_grid": Option(None, ARGUMENTS["rope_grid"], "The grid in which rope counts."),
    "model.attention": Option(None, ARGUMENTS["attention"], "Among all tokens, or within rows and columns."),
    "model.axial": Option(None, ARGUMENTS["axial"], "Axial attention in a BiT."),
    "model.mlp": Option(None, ARGUMENTS["mlp"], "Kind of MLP."),
    "model.gelu": Option(None, ARGUMENTS["gelu"], "The approximation, or the exact GELU."),
    "model.qk_norm": Option(None, ARGUMENTS["qk_norm"], "Normalise queries and keys."),
    "model.layer_scale": Option(None, ARGUMENTS["layer_scale"], "Initial value of LayerScale."),
    "model.pre_logits": Option(None, ARGUMENTS["pre_logits"], "The pre-training head's hidden tanh layer."),
    "model.dropout": Option(None, ARGUMENTS["dropout"], "Rate after dense layers and position embeddings."),
    "model.stochastic_depth": Option(
        None, ARGUMENTS["stochastic_depth"], "Rate of skipped branches in the last layer."
    ),
    "model.head_bias": Option(None, ARGUMENTS["head_bias"], "Initial value of the head's biases."),
    "model.initialization": Option(
        None,
        ARGUMENTS["initialization"],
        "How kernels and biases start: as the paper's, or as masked autoencoders'.",
    ),
    "model.norm_epsilon": Option(None, ARGUMENTS["norm_epsilon"], "Small constant of the layer norms."),
    "model.remat": Option(
        "none",
        ARGUMENTS["remat"],
        "What the backward pass computes anew to save memory.",
        operational=True,
    ),
    "model.scan": Option(None, ARGUMENTS["scan"], "Compile one encoder layer for all.", operational=True),
    "model.dtype": Option(
        "float32", one_of("float32", "bfloat16"), "Type of the computation; parameters are float32."
    ),
}

_OPTIONAL = ("resnet_blocks", "rope_grid", "layer_scale")  # None is: without.


def check_arguments(given: dict[str, Any]) -> None:
    """Looks at each argument of a model, by name; what has no rule, such as `rngs`, is left alone.

    Raises:
      UserError: one is of another type or out of its bounds.
    """
    for name, value in given.items():
        if name not in ARGUMENTS or (value is None and name in _OPTIONAL):
            continue
        if not ARGUMENTS[name].holds(value):
            raise UserError(f"{name} is {value!r} and must be {ARGUMENTS[name].words} (model.{name})")
