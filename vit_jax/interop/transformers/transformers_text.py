"""Text towers of CLIP and SigLIP in Hugging Face Transformers."""

from collections.abc import Mapping
from typing import Any

from vit_jax.errors import UserError
from vit_jax.interop.layout import Rule, torch_dense, torch_norm
from vit_jax.interop.library import Tensors, TextFormat
from vit_jax.interop.transformers.transformers_clip import layer_rules
from vit_jax.interop.transformers.transformers_config import read_gelu, write_gelu
from vit_jax.options.text import TextOptions

# Transformers' defaults of the entries of `text_config`.
_DEFAULTS = {
    "clip": dict(
        vocab_size=49408,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=8,
        max_position_embeddings=77,
        hidden_act="quick_gelu",
        layer_norm_eps=1e-5,
        eos_token_id=49407,
    ),
    "siglip": dict(
        vocab_size=32000,
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=12,
        num_attention_heads=12,
        max_position_embeddings=64,
        hidden_act="gelu_pytorch_tanh",
        layer_norm_eps=1e-6,
    ),
}
_TITLES = {"clip": "CLIP", "siglip": "SigLIP"}
_TOWER = "text_model."
_PROJECTIONS = {"clip": "text_projection", "siglip": _TOWER + "head"}
# The files of early CLIPs contain this wrong `eos_token_id`. For this value, Transformers pools the
# token with the highest id.
_OLD_END = 2


def read_text_tower(config: Mapping, tensors: Tensors) -> TextFormat:
    """Reads the text tower from the content of a `config.json` and the tensors.

    Raises:
      UserError: the model has no text tower, or its text tower is unsupported.
    """
    kind = config.get("model_type")
    if kind not in _DEFAULTS:
        raise UserError(
            f"Unsupported: a text tower of model_type={kind!r}. Supported: "
            f"{', '.join(_DEFAULTS)}, a whole model of images and texts."
        )
    values: dict[str, Any] = _DEFAULTS[kind] | (config.get("text_config") or {})
    projection = _PROJECTIONS[kind]
    if (kernel := tensors.get(f"{projection}.weight")) is None:
        raise UserError(f"the checkpoint has no text tower: there is no {projection}.weight")
    end: int = values["eos_token_id"] if kind == "clip" else 0
    pooling = {"clip": "highest" if end == _OLD_END else "end", "siglip": "last"}[kind]
    options = TextOptions(
        vocabulary=values["vocab_size"],
        length=values["max_position_embeddings"],
        dim=values["hidden_size"],
        depth=values["num_hidden_layers"],
        heads=values["num_attention_heads"],
        mlp_dim=values["intermediate_size"],
        output_dim=kernel.shape[0],
        causal=kind == "clip",
        pooling=pooling,
        end=end,
        head_bias=kind == "siglip",
        gelu=read_gelu(values),
        dtype="float32",
        norm_epsilon=values["layer_norm_eps"],
    )
    return TextFormat(
        "Transformers",
        options,
        text_rules(kind),
        _tower(tensors, projection),
        "softmax" if kind == "clip" else "sigmoid",
        kind,
        logit_bias=None if kind == "clip" else "logit_bias",
    )


def _tower(tensors: Tensors, projection: str) -> Tensors:
    """Returns the text tower's tensors by name."""
    return {
        name: tensor
        for name, tensor in tensors.items()
        if name.startswith((_TOWER, projection)) and not name.endswith("position_ids")
    }


def describe_text_tower(options: TextOptions, probabilities: str) -> tuple[str, dict[str, Any]]:
    """Returns the model type of Transformers for a text tower, and the `text_config`.

    Raises:
      UserError: Transformers has no text tower with these arguments.
    """
    kind = "clip" if options.causal else "siglip"
    fixed = {
        "clip": dict(probabilities="softmax", head_bias=False, pooling=("end", "highest")),
        "siglip": dict(probabilities="sigmoid", head_bias=True, pooling=("last",)),
    }[kind]
    text_args = dict(
        probabilities=probabilities, head_bias=options.head_bias, pooling=options.pooling
    )
    for name, value in text_args.items():
        if value != fixed[name] and value not in (fixed["pooling"] if name == "pooling" else ()):
            raise UserError(
                f"Transformers' {_TITLES[kind]}, whose text tower has causal={options.causal}, has "
                f"no {name}={value!r}"
            )
    config: dict[str, Any] = dict(
        model_type=f"{kind}_text_model",
        vocab_size=options.vocabulary,
        hidden_size=options.dim,
        intermediate_size=options.mlp_dim,
        num_hidden_layers=options.depth,
        num_attention_heads=options.heads,
        max_position_embeddings=options.length,
        hidden_act=write_gelu(options.gelu),
        layer_norm_eps=options.norm_epsilon,
    )
    if kind == "clip":
        end = _OLD_END if options.pooling == "highest" else options.end
        return kind, config | dict(projection_dim=options.output_dim, eos_token_id=end)
    return kind, config | dict(projection_size=options.output_dim)


def text_rules(kind: str) -> tuple[Rule, ...]:
    """Returns the rules for the tensor names of a text tower, in a model of the type `kind`."""
    return (
        Rule("token_embedding/embedding", _TOWER + "embeddings.token_embedding.weight"),
        Rule("position_embedding/embedding", _TOWER + "embeddings.position_embedding.weight"),
        *layer_rules(_TOWER),
        *torch_norm("norm", _TOWER + "final_layer_norm"),
        *torch_dense("head", _PROJECTIONS[kind]),
    )
