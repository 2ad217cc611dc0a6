"""Arguments of models, by family, and the section `model` of a config."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from vit_jax.errors import UserError, nearest
from vit_jax.options.option import Option, option, options, options_of, unless
from vit_jax.options.rules import Rule, either, flag, number, one_of, or_none, several, text, whole

Kind = TypeVar("Kind", bound="ImageOptions")
Statistic = float | tuple[float, ...]  # One value for all channels, or one per channel.

SIDE = whole(1, 2**16)  # Rule for the side of an image or a patch, in pixels.
# Maximum number of layers. Without a limit, a wrong number would be detected only when memory runs
# out, after a long time.
MOST_LAYERS = 1000
POSITION_RESIZES = ("linear", "bicubic", "bicubic_offset", "bicubic_antialias")
ROPES = ("eva02", "pe", "axial", "dinov3")
INITIALIZATIONS = ("flax", "mae", "deit", "deit3", "dinov2", "beit", "eva", "vqkd", "eva02")

_WIDTH = whole(1, 2**20)
_DROPOUT = number(least=0, below=1)


def _stages(rule: Rule, words: str, least: int = 1) -> Rule:
    """Returns the rule for a tuple with a value for each of at most 8 stages."""
    values = several(rule, least=least)
    return values._replace(words=words, holds=lambda x: values.holds(x) and len(x) <= 8)


def _statistic(rule: Rule, words: str) -> Rule:
    return either(several(rule, least=1), rule)._replace(words=words)


def required(rule: Rule, help: str, **properties: Any) -> Any:
    """Returns a dataclass field without a default."""
    declared = option(None, rule, help, **properties)
    return dataclasses.field(metadata=declared.metadata)


def check_options(made: Any) -> None:
    """Raises UserError if an option of a model has a wrong type or is out of bounds."""
    for name, declared in options_of(type(made)).items():
        value = getattr(made, name)
        if not declared.rule.holds(value):
            raise UserError(f"{name} is {value!r} and must be {declared.rule.words} (model.{name})")


@options
class ImageOptions:
    """Arguments of all models."""

    image_size: int | tuple[int, int] = required(
        either(SIDE, several(SIDE, count=2))._replace(
            words="pixels above 0, at most 65,536, or (height, width)"
        ),
        "Height and width in pixels, or one number for squares.",
    )
    num_classes: int = required(
        whole(0, 2**24), "Width of the linear head; 0: no head, the model returns features."
    )
    channels: int = option(3, whole(1, 2**16), "Channels of the images.")
    mean: Statistic = option(
        0.5,
        _statistic(
            number(least=-1e3, most=1e3), "a number from -1,000 to 1,000, or one for each channel"
        ),
        "Mean of pixels in [0, 1] for normalization, for each channel or (0.5,) for all.",
    )
    std: Statistic = option(
        0.5,
        _statistic(
            number(above=0, most=1e3), "a number above 0, at most 1,000, or one for each channel"
        ),
        "Standard deviation of pixels in [0, 1] for normalization, as mean.",
    )
    remat: str = option(
        "none",
        one_of("none", "dots", "full"),
        "Rematerialization in the backward pass: none; dots, keep outputs of products with "
        "parameters; full, keep inputs of layers (Chen et al., 2016).",
        operational=True,
    )
    dtype: str = option(
        "float32",
        one_of("float32", "bfloat16", "float16"),
        "Dtype of the computation; parameters, normalization statistics, softmax and logits are "
        "float32.",
    )

    def __post_init__(self) -> None:
        """Checks the values, and converts equal values to one form.

        Lists become tuples, `image_size` a pair, and `mean` and `std` one number if all channels
        have the same.

        Raises:
          UserError: a value has a wrong type or is out of bounds.
        """
        check_options(self)
        for name in options_of(type(self)):
            if isinstance(value := getattr(self, name), list):
                object.__setattr__(self, name, tuple(value))
        if not isinstance(self.image_size, tuple):
            object.__setattr__(self, "image_size", (int(self.image_size),) * 2)
        for name in ("mean", "std"):
            value = getattr(self, name)
            if isinstance(value, tuple) and len(value) not in (1, self.channels):
                raise UserError(
                    f"{name} is {value!r} and must be one number, or {self.channels} (model.{name})"
                )
            object.__setattr__(self, name, _plain_statistic(value))


def _plain_statistic(value: Statistic) -> Statistic:
    """Returns one number if all channels have the same."""
    if not isinstance(value, tuple):
        return float(value)
    return float(value[0]) if len(set(value)) == 1 else tuple(map(float, value))


@options
class HeadOptions(ImageOptions):
    """Arguments of models with a linear classifier."""

    head_bias: float = option(
        0.0,
        number(),
        "Initial value of the head's biases; -10 for pre-training with the sigmoid loss.",
    )
    head_std: float = option(
        0.0,
        number(least=0, most=1),
        "Standard deviation of the head's initial kernel; 0: zeros. DeiT's is 0.02, and LAMB "
        "needs one.",
    )


@options
class ResNetOptions(HeadOptions):
    """Arguments of the ResNet in a hybrid or a BiT."""

    resnet_blocks: tuple[int, ...] | None = option(
        None,
        or_none(
            _stages(
                whole(1, MOST_LAYERS),
                f"a tuple of units in each stage, 1 to {MOST_LAYERS:,}, in at most 8 stages",
                least=0,
            )
        ),
        "Units in each stage of the ResNet; in a ViT None means no ResNet and () its stem alone.",
    )
    resnet_width: float = option(
        1,
        number(above=0, most=1024)._replace(
            words="a multiple of 1/32, above 0, at most 1,024",
            holds=lambda x: number(above=0, most=1024).holds(x) and 32 * x % 1 == 0,
        ),
        "Factor on the ResNet's channels.",
    )
    resnet_stem: str = option(
        "large",
        one_of("large", "small"),
        "Stem of the ResNet: large divides height and width by 4; small, for images of about 32 "
        "pixels, keeps them.",
    )
    resnet_epsilons: str = option(
        "google", one_of("google", "timm"), "Epsilons of the ResNet's norms: Google's or timm's."
    )


@options
class BiTOptions(ResNetOptions):
    """Arguments of a BiT."""

    resnet_blocks: tuple[int, ...] = option(
        (3, 4, 6, 3),
        options_of(ResNetOptions)["resnet_blocks"].rule,
        "Units in each stage of the ResNet.",
    )
    axial: bool = option(
        False, flag(), "Axial attention instead of 3x3 convolutions in a BiT (appendix D.6)."
    )


@options
class ViTOptions(ResNetOptions):
    """Arguments of a ViT."""

    patch_size: int = required(
        SIDE, "Patch size in pixels; in a hybrid in positions of the ResNet's features."
    )
    dim: int = required(_WIDTH, "Hidden size D: width of a token.")
    depth: int = required(whole(1, MOST_LAYERS), "Number of encoder layers.")
    mlp_dim: int = required(_WIDTH, "Hidden width of the MLP.")
    heads: int = required(whole(1, 2**16), "Attention heads.")
    pooling: str = option(
        "cls",
        one_of("cls", "gap", "cls_gap", "map"),
        "Pooling: class token, average of the patches, both concatenated (DINOv2), or attention "
        "with a learned query (appendix D.3).",
    )
    cls_token: bool = option(
        False,
        flag(),
        "Keeps a class token with the pooling gap or map, which do not read it (timm, MAE's "
        "fine-tuning).",
    )
    pool_all: bool = option(False, flag(), "Pools the class token and registers with the patches.")
    pool_heads: int | None = option(
        None, or_none(whole(1, 2**16)), "Heads of attention pooling; None: the encoder's."
    )
    fc_norm: bool = option(
        False, flag(), "Normalizes after pooling instead of before (timm, MAE's fine-tuning)."
    )
    final_norm: bool = option(True, flag(), "Normalizes the encoder's output.")
    stem_norm: str = option(
        "none",
        one_of("none", "patches", "tokens"),
        "Normalization before the encoder: of patch embeddings (AIMv2; Fini et al., 2024), or of "
        "tokens with positions, and patch embeddings without bias (CLIP; Radford et al., 2021).",
    )
    distillation: str = option(
        "none",
        one_of("none", "token", "heads"),
        "DeiT's distillation token, and a head on it whose logits are averaged with the class "
        "token's (Touvron et al., 2021).",
    )
    position: str = option(
        "1d",
        one_of("1d", "2d", "relative", "bias", "sincos2d", "sincos2d_mae", "none"),
        "Position embedding: learned for each token (1d), for each row and column (2d), or for "
        "each offset (relative; appendix D.4); a bias for each offset, head and layer (BEiT; Bao "
        "et al., 2022); fixed with the frequencies of big_vision (sincos2d) or MAE "
        "(sincos2d_mae); or none.",
    )
    position_at: str = option(
        "stem",
        one_of("stem", "every", "shared"),
        "Where position embeddings are added: once in the stem, or before every layer, with "
        "separate embeddings (every) or the same ones (shared).",
    )
    position_resize: str = option(
        "linear",
        one_of(*POSITION_RESIZES),
        "Interpolation of learned position embeddings for another image size: linear as in the "
        "paper's code, bicubic as in other libraries.",
    )
    rope: str = option(
        "none",
        one_of("none", *ROPES, "mixed"),
        "Rotary position embedding of queries and keys; mixed learns frequencies (Heo et al., "
        "2024).",
    )
    rope_grid: tuple[int, int] | None = option(
        None,
        or_none(several(SIDE, count=2)),
        "Pre-training grid, to which the coordinates of rope='eva02' or 'pe' refer; None: the "
        "model's.",
    )
    rope_rescale: float = option(
        1.0,
        number(least=1, most=1e3),
        "Maximum factor on the coordinates of rope in training; each step draws one between its "
        "inverse and itself, log-uniform (DINOv3).",
    )
    registers: int = option(0, whole(0, 2**16), "Register tokens (Darcet et al., 2024).")
    attention: str = option(
        "full",
        one_of("full", "axial", "windows"),
        "Attention among all tokens, within rows and then columns (appendix D.6), or within square "
        "windows of patches, except in some layers (ViTDet).",
    )
    window: int = option(
        14, whole(1, 2**16), "Patches along each side of a window of attention='windows'."
    )
    global_layers: int = option(
        4,
        whole(0, 10000),
        "Layers of attention='windows' that attend to all patches, evenly spaced, the last layer "
        "among them; of a model with fewer layers, all.",
    )
    mlp: str = option("gelu", one_of("gelu", "swiglu"), "MLP: GELU, or SwiGLU with a gate.")
    gelu: str = option(
        "tanh",
        one_of("tanh", "erf", "quick"),
        "GELU: tanh approximation (Flax, the paper), exact (erf), or OpenAI CLIP's (quick).",
    )
    norm: str = option(
        "layer", one_of("layer", "rms"), "LayerNorm or RMSNorm (Zhang and Sennrich, 2019)."
    )
    norm_at: str = option(
        "before", one_of("before", "after"), "Pre-norm, or normalization of each branch's output."
    )
    sub_norm: str = option(
        "none",
        one_of("none", "mlp", "both"),
        "Sub-LN: normalizes the MLP's hidden values, or also the heads' outputs (Wang et al., "
        "2022).",
    )
    qk_norm: bool = option(False, flag(), "Normalizes queries and keys.")
    qkv_bias: str = option(
        "all",
        one_of("all", "qv", "none"),
        "Biases of queries, keys and values; BEiT has them in q and v.",
    )
    bias: bool = option(True, flag(), "Biases of the encoder's other dense layers.")
    layer_scale: float | None = option(
        None, or_none(number()), "Initial value of LayerScale; None: without LayerScale."
    )
    pre_logits: bool = option(
        False,
        flag(),
        "Hidden tanh layer of the pre-training head before the linear one (section 3.1).",
    )
    dropout: float = option(
        0.0, _DROPOUT, "Dropout rate after dense layers (not q, k, v) and position embeddings."
    )
    attention_dropout: float = option(0.0, _DROPOUT, "Dropout rate of attention weights.")
    stochastic_depth: float = option(
        0.0, _DROPOUT, "Stochastic depth rate of the last layer; it rises linearly from 0."
    )
    uniform_depth: bool = option(False, flag(), "The same stochastic depth rate in all layers.")
    depth_by: str = option(
        "image",
        one_of("image", "subset"),
        "Stochastic depth drops images at random, or computes each branch for a random subset "
        "(DINOv2): a fixed number in each group of consecutive images, see dropout.subset_sizes.",
    )
    initialization: str = option(
        "flax",
        one_of(*INITIALIZATIONS),
        "Initial parameters: as in the paper's code (flax), or in the named model's PyTorch code; "
        "deit is DINO's, too.",
    )
    norm_epsilon: float = option(1e-6, number(above=0, most=1), "Epsilon of the layer norms.")
    scan: bool = option(
        False,
        flag(),
        "Runs the encoder with `lax.scan` over layers: compiles faster, uses more memory.",
        operational=True,
    )
    merge_tokens: int = option(
        0,
        whole(0, 10000),
        "Patches that each layer merges with similar ones in evaluation, for speed (ToMe; Bolya et "
        "al., 2023); 0: none.",
    )


@options
class ConvNeXtOptions(HeadOptions):
    """Arguments of a ConvNeXt."""

    blocks: tuple[int, ...] = option(
        (3, 3, 9, 3),
        _stages(
            whole(1, MOST_LAYERS),
            f"a tuple of blocks in each stage, 1 to {MOST_LAYERS:,}, in 1 to 8 stages",
        ),
        "Blocks in each stage.",
    )
    widths: tuple[int, ...] = option(
        (96, 192, 384, 768),
        several(whole(1, 2**16), least=1),
        "Channels in each stage of a ConvNeXt or DVAE.",
    )
    grn: bool = option(False, flag(), "ConvNeXt V2's global response normalization.")
    layer_scale: float | None = option(
        1e-6, or_none(number()), "Initial value of LayerScale; None: without, as in V2."
    )
    stem: str = option(
        "patches",
        one_of("patches", "overlapping", "tiered", "activated"),
        "Stem of a ConvNeXt: a 4x4 convolution; two 3x3 convolutions of stride 2 (overlapping), "
        "the first with half the channels (tiered), with a GELU between them (activated; timm).",
    )
    norm_first: bool = option(
        False, flag(), "Normalizes a ConvNeXt's features before averaging instead of after (timm)."
    )
    head_hidden: int | None = option(
        None,
        or_none(_WIDTH),
        "Width of a GELU layer before a ConvNeXt's linear head; None: without (timm, OpenCLIP).",
    )
    gelu: str = option("erf", one_of("tanh", "erf", "quick"), "GELU: exact (erf), tanh, or quick.")
    stochastic_depth: float = option(
        0.0, _DROPOUT, "Stochastic depth rate of the last block; it rises linearly from 0."
    )
    norm_epsilon: float = option(1e-6, number(above=0, most=1), "Epsilon of the layer norms.")
    centred_norm: bool = option(
        True,
        flag(),
        "A ConvNeXt's norms subtract the mean and have biases; False: division only (timm).",
    )
    head_epsilon: float | None = option(
        None,
        or_none(number(above=0, most=1)),
        "Epsilon of the norm before a ConvNeXt's head; None: norm_epsilon (Transformers).",
    )


@options
class SwinOptions(HeadOptions):
    """Arguments of a Swin Transformer."""

    dim: int = option(96, _WIDTH, "Width of the first stage; each later stage is twice as wide.")
    blocks: tuple[int, ...] = option(
        (2, 2, 6, 2), options_of(ConvNeXtOptions)["blocks"].rule, "Blocks in each stage."
    )
    stage_heads: tuple[int, ...] = option(
        (3, 6, 12, 24),
        several(whole(1, 2**16), least=1)._replace(
            words="a tuple of attention heads in each stage, 1 to 65,536"
        ),
        "Attention heads in each stage of a Swin.",
    )
    window: int | tuple[int, ...] = option(
        7,
        either(SIDE, several(SIDE, least=1))._replace(
            words="a whole number of positions from 1 to 65,536, or one for each stage"
        ),
        "Window size of a Swin in positions, or for each stage. A window larger than the feature "
        "map is the map, without shift; incomplete windows are padded with zeros.",
    )
    version: int = option(1, whole(1, 2), "Swin or Swin V2.")
    pretrained_windows: tuple[int, ...] | None = option(
        None,
        or_none(several(whole(1, 2**16), least=1)),
        "Window size of each stage in pre-training, for Swin V2's offsets; None: the model's own.",
    )
    patch_size: int = option(4, SIDE, "Patch size in pixels.")
    position: str = option(
        "none", one_of("1d", "none"), "Learned position embedding of patches, or none."
    )
    dropout: float = option(
        0.0, _DROPOUT, "Dropout rate after dense layers (not q, k, v) and position embeddings."
    )
    stochastic_depth: float = option(
        0.0, _DROPOUT, "Stochastic depth rate of the last block; it rises linearly from 0."
    )


@options
class DVAEOptions(ImageOptions):
    """Arguments of the encoder of DALL-E's discrete autoencoder."""

    blocks: tuple[int, ...] = option(
        (2, 2, 2, 2), options_of(ConvNeXtOptions)["blocks"].rule, "Blocks in each stage."
    )
    widths: tuple[int, ...] = option(
        (256, 512, 1024, 2048),
        several(whole(1, 2**16), least=1)._replace(
            words="a tuple of multiples of 4 above 0, one for each stage",
            holds=lambda x: (
                several(whole(1, 2**16), least=1).holds(x) and all(width % 4 == 0 for width in x)
            ),
        ),
        "Channels in each stage.",
    )
    # Mean and std map a pixel u in [0, 1] to 0.8 u + 0.1.
    mean: Statistic = option(
        -0.125, options_of(ImageOptions)["mean"].rule, options_of(ImageOptions)["mean"].help
    )
    std: Statistic = option(
        1.25, options_of(ImageOptions)["std"].rule, options_of(ImageOptions)["std"].help
    )


# Names of arguments in timm, and our names.
TIMM_ARGUMENTS = {
    "attn_drop_rate": "attention_dropout",
    "depths": "blocks",
    "drop_path_rate": "stochastic_depth",
    "drop_rate": "dropout",
    "embed_dim": "dim",
    "global_pool": "pooling",
    "img_size": "image_size",
    "in_chans": "channels",
    "init_values": "layer_scale",
    "num_heads": "heads",
    "reg_tokens": "registers",
    "window_size": "window",
}


def argument_hint(name: str, known: Collection[str]) -> str:
    """Returns a hint for an unknown argument of a model: the argument that is probably meant."""
    if name == "pretrained":
        return "load_model(NAME, pretrained=TAG) loads published weights"
    if (ours := TIMM_ARGUMENTS.get(name)) in known:
        return f"did you mean {ours!r}?"
    return nearest(name, known)


def make_options(kind: type[Kind], values: Mapping[str, Any]) -> Kind:
    """Returns a model's options with these values; raises UserError if one is invalid."""
    known, model = options_of(kind), kind.__name__.removesuffix("Options")
    for name in values:
        if name not in known:
            raise UserError(
                f"a {model} has no argument {name!r} (model.{name}); {argument_hint(name, known)}"
            )
    for field in dataclasses.fields(kind):
        if field.default is dataclasses.MISSING and field.name not in values:
            raise UserError(f"a {model} needs the argument {field.name!r}")
    return kind(**values)


FAMILY_OPTIONS = (ViTOptions, BiTOptions, ConvNeXtOptions, SwinOptions, DVAEOptions)


def _section_of_families() -> type:
    """Returns the class of the section `model`: arguments of all families, None by default.

    If families share an argument's name, help and rule come from the first family.
    """
    name = option(
        "ViT-B/16",
        text(),
        "A name of vit_jax.list_models(); empty: the checkpoint's.",
        optional=True,
        validate=lambda value, config: unless(
            bool(value or config.finetune.checkpoint) or config.auto != "none",
            "a model such as 'ViT-B/16' unless config.finetune.checkpoint is given",
        ),
    )
    fields: dict[str, Any] = {"name": name}
    for family in FAMILY_OPTIONS:
        for key, declared in options_of(family).items():
            if key not in ("image_size", "num_classes", "channels"):
                fields.setdefault(key, _left_to_name(key, declared))
    made = dataclasses.make_dataclass(
        "ModelOptions",
        [(key, Any, field) for key, field in fields.items()],
        frozen=True,
        kw_only=True,
    )
    made.__doc__ = (
        "Model; None: the value of the model's name, or of the checkpoint that training starts from"
    )
    return made


def _left_to_name(key: str, declared: Option) -> Any:
    """Returns the field in a config for an argument of a family."""
    if key == "remat":
        return option(declared.default, declared.rule, declared.help, operational=True)
    if key == "dtype":
        return option(declared.default, one_of("float32", "bfloat16"), declared.help)
    return option(None, declared.rule, declared.help, operational=declared.operational)


ModelOptions = _section_of_families()
