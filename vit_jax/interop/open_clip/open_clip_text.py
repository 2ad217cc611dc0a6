"""Text towers in open_clip's files: those of CLIP, SigLIP and EVA-CLIP."""

from collections.abc import Mapping
from typing import Any

from vit_jax.errors import UserError
from vit_jax.interop.layout import Rule, torch_dense, torch_norm
from vit_jax.interop.library import Tensors, TextFormat
from vit_jax.interop.open_clip.open_clip_vit import LAYER_RULES
from vit_jax.options.text import TextOptions

# open_clip's defaults of the entries of `text_cfg`.
_DEFAULTS: dict[str, Any] = dict(
    context_length=77,
    vocab_size=49408,
    width=512,
    heads=8,
    layers=12,
    no_causal_mask=False,
    pool_type="argmax",
    proj_bias=False,
    proj_type="linear",
    text_arch="clip",
    eos_id=2,
)
# Entries of `text_cfg` that are read here or by the tokenizer, or that do not change the
# embeddings.
_READ = {"context_length", "vocab_size", "width", "heads", "layers", "no_causal_mask", "pool_type"}
_READ |= {"proj_bias", "mlp_ratio", "norm_kwargs", "act_kwargs", "eos_id", "bos_id", "pad_id"}
_READ |= {"hf_tokenizer_name", "tokenizer_kwargs", "tokenizer_mode", "tokenizer_type"}
_READ |= {"output_tokens", "tiktoken_name"}
_POOLINGS = {"argmax": "highest", "last": "last", "eos": "end"}
_TOWER = "text."  # Prefix of the text tower's tensors in models with `custom_text`.
_PARTS = ("token_embedding.", "positional_embedding", "transformer.", "ln_final.")
_PARTS += ("text_projection",)


def read_text_tower(config: Mapping, tensors: Tensors) -> TextFormat:
    """Reads the text tower from the content of an `open_clip_config.json` and the tensors.

    Raises:
      UserError: the model has no text tower, or its text tower is unsupported.
    """
    model = config["model_cfg"]
    text: dict[str, Any] = _DEFAULTS | model["text_cfg"]
    _check(model, text)
    tower_tensors = _tower(tensors)
    biased = "text_projection.bias" in tower_tensors
    projection = tower_tensors.get("text_projection.weight" if biased else "text_projection")
    if projection is None:
        raise UserError("the checkpoint has no text tower: there is no text_projection")
    options = TextOptions(
        vocabulary=text["vocab_size"],
        length=text["context_length"],
        dim=text["width"],
        depth=text["layers"],
        heads=text["heads"],
        mlp_dim=tower_tensors["transformer.resblocks.0.mlp.c_fc.weight"].shape[0],
        output_dim=projection.shape[0] if biased else projection.shape[1],
        causal=not text["no_causal_mask"],
        pooling=_POOLINGS[text["pool_type"]],
        end=(text["eos_id"] or 0) if text["pool_type"] == "eos" else 0,
        head_bias=biased,
        gelu=_gelu(model, text),
        dtype="float32",
        norm_epsilon=(text.get("norm_kwargs") or {}).get("eps", 1e-5),
    )
    sigmoid = "logit_bias" in tensors
    return TextFormat(
        "open_clip",
        options,
        text_rules(biased),
        tower_tensors,
        "sigmoid" if sigmoid else "softmax",
        "clip",  # The `open_clip_config.json` in the folder determines the actual cleaning.
        logit_bias="logit_bias" if sigmoid else None,
    )


def _check(model: Mapping, text: Mapping) -> None:
    """Raises UserError if a setting in the config is unsupported."""
    if "multimodal_cfg" in model:
        raise UserError("Unsupported: an open_clip model that generates texts (CoCa)")
    for name, value in text.items():
        if name not in _READ and value not in (None, False, _DEFAULTS.get(name)):
            raise UserError(f"Unsupported: an open_clip text tower with {name}={value!r}")
    if text["pool_type"] not in _POOLINGS:
        raise UserError(
            f"Unsupported: an open_clip text tower with pool_type={text['pool_type']!r}. "
            f"Supported: {', '.join(_POOLINGS)}."
        )


def _tower(tensors: Tensors) -> Tensors:
    """Returns the text tower's tensors; the prefix `text.` is removed from their names."""
    prefix = _TOWER if any(name.startswith(_TOWER) for name in tensors) else ""
    names = {name: name.removeprefix(prefix) for name in tensors if name.startswith(prefix)}
    return {ours: tensors[name] for name, ours in names.items() if ours.startswith(_PARTS)}


def _gelu(model: Mapping, text: Mapping) -> str:
    """Returns the text tower's kind of GELU, such as `quick`.

    Raises:
      UserError: the activation is unsupported.
    """
    arguments = text.get("act_kwargs") or {}
    if model.get("quick_gelu"):
        return "quick"
    kinds = {"none": "erf", "tanh": "tanh"}
    kind = kinds.get(arguments.get("approximate", "none"))
    if kind is None or arguments.keys() - {"approximate"}:
        raise UserError(f"Unsupported: an open_clip text tower with act_kwargs={arguments!r}")
    return kind


def text_config(options: TextOptions) -> dict[str, Any]:
    """Returns the entries of `text_cfg` that describe a text tower, without its tokenizer."""
    pooling = {ours: theirs for theirs, ours in _POOLINGS.items()}[options.pooling]
    config: dict[str, Any] = dict(
        context_length=options.length,
        vocab_size=options.vocabulary,
        width=options.dim,
        heads=options.heads,
        layers=options.depth,
        mlp_ratio=options.mlp_dim / options.dim,
        no_causal_mask=not options.causal,
        pool_type=pooling,
        proj_bias=options.head_bias,
    )
    if pooling == "eos":
        config["eos_id"] = options.end
    if options.norm_epsilon != 1e-5:
        config["norm_kwargs"] = dict(eps=options.norm_epsilon)
    if options.gelu == "tanh":
        config["act_kwargs"] = dict(approximate="tanh")
    return config


def text_rules(biased: bool) -> tuple[Rule, ...]:
    """Returns the rules for the tensor names of a text tower.

    Args:
      biased: True if the final projection is a linear layer with a bias. False if it is a plain
        tensor without a bias, which has the same layout as vit_jax's kernel.
    """
    head = Rule("head/kernel", "text_projection")
    return (
        Rule("token_embedding/embedding", "token_embedding.weight"),
        Rule("position_embedding/embedding", "positional_embedding"),
        *LAYER_RULES,
        *torch_norm("norm", "ln_final"),
        *(torch_dense("head", "text_projection") if biased else (head,)),
    )
