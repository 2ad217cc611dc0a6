"""The bounds of the arguments of models, by which models, configs and checkpoints are checked.

Here are those that all families or several have. A family's own stand in the file of its model, with the
options by which a config sets them; the models themselves say which arguments fit together.
"""

from collections.abc import Mapping
from typing import Any

from vit_jax.errors import UserError
from vit_jax.options import Option, Rule, either, number, one_of, several, text, unless, whole

SIDE = whole(1, 2**16)  # In pixels.
MOST_LAYERS = 1000  # Each takes time when a model is made, before anything can say that memory is short.
_COUNTS = several(whole(1, MOST_LAYERS), least=1)
# Of pixels in [0, 1]; checkpoints whose pixels are scaled otherwise have others.
_MEAN, _DEVIATION = number(least=-1e3, most=1e3), number(above=0, most=1e3)


def or_none(rule: Rule) -> Rule:
    """The rule of an argument that may be None too, which is: without."""
    return rule._replace(holds=lambda x: x is None or rule.holds(x))


ARGUMENTS = {
    "image_size": either(SIDE, several(SIDE, count=2))._replace(
        words="pixels above 0, at most 65,536, or (height, width)"
    ),
    "num_classes": whole(0, 2**24),
    "channels": whole(1, 2**16),
    "mean": either(several(_MEAN, least=1), _MEAN)._replace(
        words="a number from -1,000 to 1,000, or one for each channel"
    ),
    "deviation": either(several(_DEVIATION, least=1), _DEVIATION)._replace(
        words="a number above 0, at most 1,000, or one for each channel"
    ),
    "blocks": _COUNTS._replace(
        words=f"a tuple of blocks in each stage, 1 to {MOST_LAYERS:,}, in 1 to 8 stages",
        holds=lambda x: _COUNTS.holds(x) and len(x) <= 8,
    ),
    "gelu": one_of("tanh", "erf", "quick"),
    "layer_scale": or_none(number()),
    "norm_epsilon": number(above=0, most=1),
    "stochastic_depth": number(least=0, below=1),
    "head_bias": number(),
    "head_deviation": number(least=0, most=1),
    "remat": one_of("none", "dots", "full"),
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
            bool(value or config.finetune.checkpoint) or config.auto != "none",
            "a model such as 'ViT-B/16' where there is no config.finetune.checkpoint",
        ),
    ),
    "model.mean": Option(
        None,
        ARGUMENTS["mean"],
        "Mean of pixels in [0, 1] by which the model normalises, of each channel or (0.5,) of all.",
    ),
    "model.deviation": Option(None, ARGUMENTS["deviation"], "Deviation of pixels in [0, 1], as the mean."),
    "model.blocks": Option(None, ARGUMENTS["blocks"], "Blocks in each stage of a model of several."),
    "model.gelu": Option(None, ARGUMENTS["gelu"], "The exact GELU, or an approximation."),
    "model.layer_scale": Option(None, ARGUMENTS["layer_scale"], "Initial value of LayerScale."),
    "model.norm_epsilon": Option(None, ARGUMENTS["norm_epsilon"], "Small constant of the layer norms."),
    "model.stochastic_depth": Option(
        None, ARGUMENTS["stochastic_depth"], "Rate of skipped branches in the last layer."
    ),
    "model.head_bias": Option(None, ARGUMENTS["head_bias"], "Initial value of the head's biases."),
    "model.head_deviation": Option(
        None,
        ARGUMENTS["head_deviation"],
        "Deviation of the head's first kernel; 0: zeros. DeiT's is 0.02, and LAMB needs one.",
    ),
    "model.remat": Option(
        "none",
        ARGUMENTS["remat"],
        "What the backward pass computes anew to save memory.",
        operational=True,
    ),
    "model.dtype": Option(
        "float32", one_of("float32", "bfloat16"), "Type of the computation; parameters are float32."
    ),
}


def check_arguments(given: Mapping[str, Any], own: Mapping[str, Rule]) -> None:
    """Looks at each argument of a model, by name; what has no rule, such as `rngs`, is left alone.

    Args:
      own: the rules of arguments that not all families have, as `ImageModel.arguments`.

    Raises:
      UserError: one is of another type or out of its bounds.
    """
    for name, rule in {**ARGUMENTS, **own}.items():
        if name in given and not rule.holds(given[name]):
            raise UserError(f"{name} is {given[name]!r} and must be {rule.words} (model.{name})")
