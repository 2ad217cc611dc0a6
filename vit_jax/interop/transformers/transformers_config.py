"""Parts of Transformers' `config.json` that do not depend on a model's family."""

from collections.abc import Sequence

from vit_jax.errors import UserError
from vit_jax.interop.layout import Rule


def count_classes(tensors: dict, config: dict, start: str) -> int:
    """The number of classes by the classifier's bias; 0 without one.

    Args:
      start: of the classes' names in Transformers, such as ViT.

    Raises:
      UserError: a config names another class, or other classes, than the tensors are of.
    """
    biases = ("classifier.bias", "classifier.1.bias", "cls_classifier.bias")
    found = [tensors[name].shape[0] for name in biases if name in tensors]
    classes = found[0] if found else 0
    _refuse_contradictions(config, start, classes, "distillation_classifier.bias" in tensors)
    return classes


def _refuse_contradictions(config: dict, start: str, num_classes: int, two_heads: bool) -> None:
    """Raises UserError where a config names another class, or other classes, than the tensors are of."""
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
            f"config.json contradicts the tensors: it names {len(labels):,} classes (id2label), but the "
            f"head has {num_classes:,}"
        )


def require_always(config: dict, always: dict) -> None:
    """Raises UserError where a config departs from what models here always are."""
    for option, only in always.items():
        if config.get(option, only) != only:
            raise UserError(
                f"a Transformers model with {option}={config[option]!r} is not read, but {only!r}"
            )


def has_scaled_layers(values: dict) -> bool:
    """True for a ViT with LayerScale, which is written as a DINOv2, and not for a hybrid."""
    return values["layer_scale"] is not None and values["resnet_blocks"] is None


def below(prefix: str, rules: Sequence[Rule]) -> list[Rule]:
    """The same rules with a prefix before all names, as classes with a classifier have them."""

    def lower(names):
        return f"{prefix}.{names}" if isinstance(names, str) else tuple(f"{prefix}.{name}" for name in names)

    return [rule._replace(names=lower(rule.names)) for rule in rules]


def common_config(values: dict) -> dict:
    """The part of a `config.json` on a model's channels, type and names of classes."""
    classes = values["num_classes"]
    labels = dict(
        id2label={str(i): f"LABEL_{i}" for i in range(classes)},
        label2id={f"LABEL_{i}": i for i in range(classes)},
    )
    return dict(num_channels=values["channels"], dtype="float32") | (labels if classes else {})
