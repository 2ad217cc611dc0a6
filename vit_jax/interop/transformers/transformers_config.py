"""Common code for several model types of Transformers: `config.json` and tensor names."""

from collections.abc import Callable, Sequence

from vit_jax.errors import UserError
from vit_jax.interop.layout import BLOCK, FLAT, LINEAR, SAME, Layout, Rule, names_of, torch_dense
from vit_jax.interop.library import ObjectiveFormat, read_image_size, write_image_size
from vit_jax.interop.objective_files import MASK

# Transformers' defaults of the entries of a ViT's `config.json` that `read_sizes` and `read_gelu`
# read. Each model type overrides some of them.
DEFAULTS = dict(
    image_size=224,
    patch_size=16,
    hidden_size=768,
    num_hidden_layers=12,
    intermediate_size=3072,
    num_attention_heads=12,
    hidden_act="gelu",
    layer_norm_eps=1e-12,
)
_GELUS = {"gelu": "erf", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "quick_gelu": "quick"}
# Maps the model's argument `qkv_bias` to the indices of the projections with a bias, where 0 is the
# query, 1 the key and 2 the value.
_BIASED = {"all": (0, 1, 2), "qv": (0, 2), "none": ()}


def count_classes(tensors: dict, config: dict, start: str) -> int:
    """Returns the number of classes, which is the size of the classifier's bias; 0: no classifier.

    The names of Transformers' Python classes begin with `start`, such as ViT.

    Raises:
      UserError: the Python class or the number of classes in the config contradicts the tensors.
    """
    biases = ("classifier.bias", "classifier.1.bias", "cls_classifier.bias")
    found = [tensors[name].shape[0] for name in biases if name in tensors]
    classes = found[0] if found else 0
    _refuse_contradictions(config, start, classes, "distillation_classifier.bias" in tensors)
    return classes


def _refuse_contradictions(config: dict, start: str, num_classes: int, two_heads: bool) -> None:
    """Raises UserError if the Python class or number of classes in a config contradicts tensors."""
    classifier = f"{start}ForImageClassification"
    labels = config.get("id2label")
    if num_classes:
        known = [f"{classifier}WithTeacher" if two_heads else classifier]
    else:
        known = [f"{start}Model", f"{start}Backbone"] + ([classifier] if labels == {} else [])
    for name in config.get("architectures") or ():
        if name not in known:
            raise UserError(
                f"config.json contradicts the tensors: they are not of its architecture {name!r}, "
                f"but of {known[0]}"
            )
    if num_classes and labels is not None and len(labels) != num_classes:
        raise UserError(
            f"config.json contradicts the tensors: it has {len(labels):,} classes (id2label), "
            f"but the head has {num_classes:,}"
        )


def require_always(config: dict, always: dict) -> None:
    """Raises UserError if an entry of a config has another value than in `always`."""
    for option, only in always.items():
        if config.get(option, only) != only:
            raise UserError(
                f"a Transformers model with {option}={config[option]!r} is unsupported; "
                f"supported: {only!r}"
            )


def require_class(config: dict, *known: str) -> None:
    """Raises UserError if the Python class in a config is not one of `known`."""
    for name in config.get("architectures") or ():
        if name not in known:
            raise UserError(
                f"a Transformers model of class {name} is unsupported; supported: "
                f"{', '.join(known)}"
            )


def read_gelu(config: dict) -> str:
    """Returns the kind of GELU in a config.

    Raises:
      UserError: the config has another activation.
    """
    if config["hidden_act"] not in _GELUS:
        raise UserError(
            f"the activation {config['hidden_act']!r} is unsupported; supported: "
            f"{', '.join(_GELUS)}"
        )
    return _GELUS[config["hidden_act"]]


def read_sizes(config: dict) -> dict:
    """Returns the arguments of a ViT that most model types store under the same names."""
    return dict(
        image_size=read_image_size(config["image_size"]),
        patch_size=config["patch_size"],
        channels=config.get("num_channels", 3),
        dim=config["hidden_size"],
        depth=config["num_hidden_layers"],
        mlp_dim=config["intermediate_size"],
        heads=config["num_attention_heads"],
        norm_epsilon=config["layer_norm_eps"],
    )


def write_sizes(values: dict) -> dict:
    """Returns the entries that `read_sizes` and `read_gelu` read, except the number of channels."""
    return dict(
        image_size=write_image_size(values),
        patch_size=values["patch_size"],
        hidden_size=values["dim"],
        num_hidden_layers=values["depth"],
        intermediate_size=values["mlp_dim"],
        num_attention_heads=values["heads"],
        layer_norm_eps=values["norm_epsilon"],
        hidden_act=write_gelu(values["gelu"]),
    )


def write_gelu(gelu: str) -> str:
    """Returns the value of `hidden_act` for a kind of GELU, such as `quick_gelu`."""
    return dict(erf="gelu", tanh="gelu_pytorch_tanh", quick="quick_gelu")[gelu]


def require_square(title: str, values: dict) -> None:
    """Raises UserError if the images are not square.

    The position embeddings of some models in Transformers support square images only.
    """
    height, width = values["image_size"]
    if height != width:
        raise UserError(f"{title} has positions for square images, not for {height}x{width} pixels")


def vit_type(values: dict) -> str:
    """Returns Transformers' model type, such as `dinov2`, for a ViT with these arguments."""
    if values["resnet_blocks"] is not None:
        return "vit"  # The format for this type then raises an error: hybrids are unsupported.
    if values["rope"] == "dinov3":
        return "dinov3_vit"
    if values["position"] == "bias" or values["qkv_bias"] == "qv":
        return "beit"
    if values["stem_norm"] == "tokens":
        return "clip"
    if values["pooling"] == "map":
        return "siglip"
    if values["position"] == "sincos2d_mae":
        return "vit_mae"
    return "vit" if values["layer_scale"] is None else "dinov2"


def projections(prefixes: Sequence[str], qkv_bias: str = "all") -> tuple[Rule, Rule]:
    """Returns the rules for the projections to queries, keys and values.

    They are three tensors in Transformers, and one tensor in vit_jax.

    Args:
      prefixes: prefixes of the names of queries, keys and values.
      qkv_bias: the projections with a bias, `all`, `qv` or `none`, as in the model's arguments.
    """
    biases = tuple(f"{prefixes[part]}.bias" for part in _BIASED[qkv_bias])
    return (
        Rule(
            BLOCK + "attention/qkv/kernel",
            tuple(f"{part}.weight" for part in prefixes),
            LINEAR,
            axis=1,
        ),
        Rule(BLOCK + "attention/qkv/bias", biases, FLAT, axis=0),
    )


def with_classifier(
    prefix: str,
    rules: Sequence[Rule],
    values: dict,
    heads: Sequence[Rule] = torch_dense("head", "classifier"),
) -> Sequence[Rule]:
    """Returns the rules of a model, including the rules of its classifier, if it has classes.

    In Transformers' models with a classifier, the names of all other tensors start with `prefix`,
    such as `vit`.
    """
    return [*_below(prefix, rules), *heads] if values["num_classes"] else rules


def _below(prefix: str, rules: Sequence[Rule]) -> list[Rule]:
    """Adds a prefix to the tensor names of all rules."""
    return [
        rule._replace(names=tuple(f"{prefix}.{name}" for name in names_of(rule))) for rule in rules
    ]


def class_name(start: str, values: dict) -> str:
    """Returns the name of a Python class of Transformers, such as `ViTForImageClassification`."""
    return start + ("ForImageClassification" if values["num_classes"] else "Model")


def mask_format(
    start: Callable[[dict], str], entries: dict | None, layout: Layout = SAME
) -> ObjectiveFormat:
    """Returns the format for training objectives whose only parameter is the mask token.

    Args:
      start: called with the model's arguments; returns the prefix of the tensor names.
      entries: entries of `config.json` for a model with a mask token. None: the token is not
        written, because Transformers' class has none.
      layout: layout of the token.
    """

    def rules(values):
        named = [Rule("mask", "embeddings.mask_token", layout)]
        return _below(start(values), named) if values["num_classes"] else named

    return ObjectiveFormat(
        name=MASK,
        owns=r"(\w+\.)?embeddings\.mask_token$",
        values=lambda tensors, config: {},
        rename=lambda tensors, config: tensors,
        rules=rules,
        describe=None if entries is None else lambda values, objective_values: entries,
        shapes=lambda values: {"mask": (1, 1, values["dim"])},
    )


def common_config(values: dict) -> dict:
    """Returns the entries of a `config.json` that describe channels, dtype and class names."""
    classes = values["num_classes"]
    labels = dict(
        id2label={str(i): f"LABEL_{i}" for i in range(classes)},
        label2id={f"LABEL_{i}": i for i in range(classes)},
    )
    return dict(num_channels=values["channels"], dtype="float32") | (labels if classes else {})
