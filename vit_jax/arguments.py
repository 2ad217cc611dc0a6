"""What each argument of a model may be: the table that `ViT`, `BiT`, configs and checkpoints are checked by.

The models themselves say which arguments fit together.
"""

from typing import Any

from vit_jax.bounds import either, flag, number, one_of, several, whole
from vit_jax.errors import UserError

_SIDE = whole(1, 2**16)
# Of pixels in [0, 1]; checkpoints whose pixels are scaled otherwise have others.
_MEAN, _DEVIATION = number(least=-1e3, most=1e3), number(above=0, most=1e3)
_MOST_LAYERS = 1000  # Each takes time when a model is made, before anything can say that memory is short.
_UNITS = several(whole(1, _MOST_LAYERS))

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
    "resnet_width": whole(1, 1024),
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
