"""Options of objectives: the section `objective`, and a section for each objective."""

import operator
from collections.abc import Callable
from typing import Any

from vit_jax.options.option import only_with, option, options, unless
from vit_jax.options.rules import RATE, SHARE, Rule, flag, number, one_of, several, text, whole

# Names of training objectives. Each is a module of vit_jax/training/objectives that defines
# `OBJECTIVE`.
OBJECTIVE_NAMES = (
    "classification",
    "masked_patch",
    "mae",
    "fcmae",
    "dino",
    "distillation",
    "eva",
    "dvae",
    "beit",
    "vqkd",
    "beitv2",
    "contrastive",
    "depth",
    "detection",
    "segmentation",
)
# Targets of masked_patch that predict mean colours: the number of cells along each side of a patch.
CELLS = {"color": 1, "cells": 4}
TARGETS = (*CELLS, "pixels")
THRESHOLD = 128  # Solarization inverts pixel values at or above this threshold.
STRENGTHS = several(number(least=0, most=100), count=4)
SHARES = several(SHARE, count=3, words="3 numbers from 0 to 1")


def only_with_objective(*names: str) -> Callable[[Any], str]:
    """Returns an `Option.requires` for these objectives and for a program's own objective."""

    def missing(config: Any) -> str:
        if config.objective.name not in OBJECTIVE_NAMES:
            return ""
        return only_with("objective.name", *names)(config)

    return missing


def _sees_whole_batch(config: Any) -> bool:
    return config.micro_batches == 1 and config.optimizer.sum_gradients == "as_computed"


def _sees_whole_groups(config: Any) -> bool:
    """Returns True if no group of KoLeo is split over micro-batches."""
    group = config.dino.koleo_group
    whole = group is not None and config.batch_size % (config.micro_batches * group) == 0
    return whole and config.optimizer.sum_gradients == "as_computed"


def _mask_ratio(default: float) -> Any:
    """Returns the field for the share of masked patches."""
    return option(default, RATE, "Share of masked patches.")


def _normalize_targets() -> Any:
    """Returns the field for the normalization of predicted pixels."""
    return option(
        True,
        flag(),
        "Normalizes the pixels of each target patch by their mean and standard deviation.",
    )


@options
class ObjectiveOptions:
    """Training objective and its frozen teacher"""

    name: str = option(
        "classification",
        text("\\w+"),
        "Objective: classification, distillation from a teacher, or one without labels, such as "
        "masked_patch, mae or dino.",
        validate=lambda value, config: unless(
            value in OBJECTIVE_NAMES, " or ".join(OBJECTIVE_NAMES)
        ),
    )
    teacher: str | None = option(
        None,
        text(".+", "a checkpoint"),
        "Checkpoint of the frozen teacher of distillation, eva, vqkd and optionally dino; for "
        "beit and beitv2 the tokenizer. Anything `load_model` accepts; 'random': a small untrained "
        "one, for `:smoke`.",
        operational=True,
    )
    teacher_dtype: str | None = option(
        None,
        one_of("float32", "bfloat16"),
        "Dtype of the frozen teacher's parameters and computation; None: its checkpoint's.",
        requires=only_with_objective("dino", "distillation", "eva", "vqkd", "beit", "beitv2"),
    )
    teacher_size: int | None = option(
        None,
        whole(1, 2**14),
        "Image size of the frozen teacher (eva, vqkd, beit, beitv2), in pixels, with as many "
        "patches or codes as the model has patches; None: the model's.",
        requires=only_with_objective("eva", "vqkd", "beit", "beitv2"),
    )
    teacher_features: str = option(
        "tokens",
        one_of("tokens", "head"),
        "Target of eva and vqkd for each patch: the teacher's last normalized tokens, or its "
        "head's outputs for them (CLIP's projection).",
        requires=only_with_objective("eva", "vqkd"),
    )


@options
class MaskedPatchOptions:
    """Masked patch prediction (appendix B.1.2)"""

    mask_ratio: float = _mask_ratio(0.5)
    target: str = option(
        "color",
        one_of(*TARGETS),
        "Target: the mean colour of a patch, the mean colours of its 4 x 4 cells, or its pixels.",
    )


@options
class MAEOptions:
    """Masked autoencoder (He et al., 2022)"""

    mask_ratio: float = _mask_ratio(0.75)
    normalize_targets: bool = _normalize_targets()
    decoder_dim: int = option(512, whole(1, 2**20), "Width of the decoder.", smoke=32)
    decoder_depth: int = option(8, whole(1, 10000), "Layers of the decoder.", smoke=1)
    decoder_heads: int = option(16, whole(1, 2**16), "Attention heads of the decoder.", smoke=2)
    decoder_position: str = option(
        "sincos2d_mae",
        one_of("sincos2d", "sincos2d_mae"),
        "Fixed position embedding of the decoder.",
    )


@options
class FCMAEOptions:
    """Masked autoencoder of ConvNeXt V2 (Woo et al., 2023)"""

    mask_ratio: float = _mask_ratio(0.6)
    normalize_targets: bool = _normalize_targets()
    decoder_dim: int = option(512, whole(1, 2**20), "Width of the decoder.", smoke=32)
    decoder_blocks: int = option(1, whole(1, 10000), "ConvNeXt V2 blocks of the decoder.")


_PATCHES = only_with("dino.patch_weight")
_GRAM = only_with("dino.gram")
_LOCAL_CROPS = only_with("dino.local_crops")


@options
class DINOOptions:
    """Self-distillation: DINO, iBOT, DINOv2 and DINOv3"""

    # Options of the views.
    global_crops: int = option(
        2,
        whole(1, 2),
        "Global crops of an image; 1: the student predicts the teacher's output from local crops "
        "only (SILC).",
        validate=lambda value, config: unless(
            value == 2 or config.dino.local_crops > 0, "2 with dino.local_crops=0"
        ),
    )
    jitter: tuple[float, ...] = option(
        (0.4, 0.4, 0.2, 0.1),
        Rule(
            tuple,
            "4 numbers from 0 to 100, of which the last, the hue's, is at most 0.5",
            lambda x: STRENGTHS.holds(x) and x[3] <= 0.5,
        ),
        "Colour jitter: strengths of brightness, contrast, saturation and hue, in random order.",
    )
    jitter_probability: float = option(0.8, SHARE, "Probability of colour jitter, for each view.")
    grey: float = option(0.2, SHARE, "Probability of converting a view to grey.")
    blur: tuple[float, ...] = option(
        (1.0, 0.1, 0.5),
        SHARES,
        "Probability of Gaussian blur for the first global crop, the second one, and each "
        "local crop.",
    )
    solarize: tuple[float, ...] = option(
        (0.0, 0.2, 0.0),
        SHARES,
        f"Probability of solarization, inverting values of {THRESHOLD} and above, for the same "
        "three kinds of crops.",
    )
    local_crops: int = option(
        8,
        whole(0, 64),
        "Local crops of an image, inputs of the student in addition to the global crops.",
        validate=lambda value, config: unless(
            not value
            or config.objective.name == "contrastive"  # Its crops are always random_resized.
            or config.data.crop in ("inception", "random_resized"),
            f"0 with data.crop={config.data.crop!r}, which draws no area; 'random_resized' does",
        ),
    )
    local_size: int = option(
        96,
        whole(1, 2**14),
        "Height and width of a local crop, in pixels.",
        requires=_LOCAL_CROPS,
        validate=lambda value, config: unless(
            not config.dino.local_crops
            or config.auto != "none"  # The image size is chosen later.
            or value <= config.data.image_size,
            f"at most data.image_size = {config.data.image_size}, or give dino.local_crops=0",
        ),
    )
    local_area: tuple[float, ...] = option(
        (0.05, 0.4),
        several(number(above=0, most=1), count=2, ascending=True),
        "Range of a local crop's share of the image's area; data.crop_area is the range for "
        "global crops.",
        requires=_LOCAL_CROPS,
    )

    # Options of the heads and of the teacher.
    head_hidden: int = option(
        2048, whole(1, 2**20), "Hidden width of the MLP of the heads.", smoke=32
    )
    bottleneck: int = option(
        256,
        whole(1, 2**16),
        "Bottleneck width of the heads; its outputs are normalized and compared with the "
        "prototypes.",
    )
    prototypes: int = option(
        65536, whole(2, 2**22), "Prototypes of the head, its output width.", smoke=64
    )
    prototype_lengths: str = option(
        "one",
        one_of("one", "learned", "free"),
        "Norms of the prototypes: all 1, a learned factor for each, or unconstrained (DINOv3).",
    )
    frozen_prototype_steps: int = option(
        0, whole(0), "Number of first steps without updates of the prototypes.", smoke=1
    )
    teacher_momentum: float = option(
        0.996,
        RATE,
        "Initial momentum of the teacher, an exponential moving average of the student.",
    )
    teacher_momentum_end: float = option(
        1.0, SHARE, "Final momentum of the teacher; the schedule is a cosine."
    )
    teacher_temperature: float = option(
        0.04, number(0.001, 100.0), "Initial softmax temperature of the teacher."
    )
    teacher_temperature_end: float | None = option(
        None, number(0.001, 100.0), "Temperature after a linear warm-up; None: constant."
    )
    teacher_temperature_steps: int = option(
        0, whole(0), "Steps of the temperature's warm-up.", smoke=1
    )
    centring: str = option(
        "mean",
        one_of("mean", "sinkhorn", "none"),
        "Centring of the teacher's outputs: by their running mean, by Sinkhorn-Knopp, or none "
        "(collapses).",
        validate=lambda value, config: unless(
            value != "sinkhorn" or _sees_whole_batch(config),
            "'mean' with micro_batches above 1 or optimizer.sum_gradients='float32_once': Sinkhorn-"
            "Knopp needs the whole batch at once",
        ),
    )

    # Options of the terms of the loss.
    patch_weight: float = option(
        0.0, number(least=0), "Weight of iBOT's loss of masked patches; 0: no patch is masked."
    )
    patch_prototypes: int | None = option(
        None,
        whole(2, 2**22),
        "Prototypes of a separate head for patches; None: they share the class token's head.",
        smoke=64,
        requires=_PATCHES,
    )
    patch_bottleneck: int | None = option(
        None,
        whole(1, 2**16),
        "Bottleneck width of the separate head for patches; None: dino.bottleneck.",
        requires=_PATCHES,
    )
    patch_mask_ratios: tuple[float, ...] = option(
        (0.1, 0.5),
        several(number(above=0, below=1), count=2, ascending=True),
        "Range of the mask ratio in one global crop of each image, evenly spread over the images "
        "of a batch.",
        requires=_PATCHES,
    )
    koleo: float = option(
        0.0,
        number(least=0),
        "Weight of the KoLeo regularizer, which keeps the class tokens of different images apart.",
        validate=lambda value, config: unless(
            not value or _sees_whole_batch(config) or _sees_whole_groups(config),
            "0 with micro_batches above 1 or optimizer.sum_gradients='float32_once': KoLeo "
            "compares the images of a batch; micro_batches may be above 1 with a "
            "dino.koleo_group that divides one",
        ),
    )
    koleo_group: int | None = option(
        None,
        whole(2),
        "Number of images in a group for KoLeo's nearest neighbours; None: the whole batch.",
        validate=lambda value, config: unless(
            value is None or config.batch_size % value == 0,
            f"a divisor of batch_size = {config.batch_size}",
        ),
        smoke=8,
        requires=only_with("dino.koleo"),
    )
    gram: float = option(
        0.0,
        number(least=0),
        "Weight of DINOv3's Gram anchoring to the patch similarities of an earlier teacher.",
        validate=lambda value, config: unless(
            not value
            or (
                config.dino.patch_weight > 0
                and config.objective.teacher is None
                and config.objective.name != "contrastive"
            ),
            "0 with dino.patch_weight=0, objective.teacher or objective.name='contrastive'",
        ),
    )
    gram_from: int = option(
        0, whole(0), "Step after which the Gram teacher is first saved.", requires=_GRAM
    )
    gram_every: int = option(
        10000, whole(1), "Steps between updates of the Gram teacher.", requires=_GRAM
    )
    gram_times: int = option(
        3, whole(0), "Maximum number of updates of the Gram teacher.", requires=_GRAM
    )
    gram_size: int | None = option(
        None,
        whole(1, 2**14),
        "Image size of the Gram teacher's crops, in pixels; None: the size of the global crops.",
        requires=_GRAM,
    )


@options
class DistillationOptions:
    """Distillation from a classifier (Touvron et al., 2021)"""

    kind: str = option(
        "soft",
        one_of("soft", "hard"),
        "Distillation from the teacher's probabilities (soft), or from its most probable class "
        "(hard).",
    )
    teacher_weight: float = option(
        0.5, SHARE, "Weight of the teacher's loss; the rest is the weight of the labels' loss."
    )
    temperature: float = option(
        1.0,
        number(0.001, 1000.0),
        "Softmax temperature of student and teacher in soft distillation.",
        requires=only_with("distillation.kind", "soft"),
    )


@options
class EVAOptions:
    """Prediction of a teacher's features of masked patches (Fang et al., 2023)"""

    mask_ratio: float = _mask_ratio(0.41)  # 105 of 256 patches, as in the authors' code.
    embedding_gradient: float = option(
        1.0,
        number(least=0, most=1),
        "Factor on the gradient of the patch embedding; 0.1 in EVA-02.",
    )


@options
class DVAEOptions:
    """Discrete autoencoder of DALL-E (Ramesh et al., 2021)"""

    codes: int = option(8192, whole(2, 2**20), "Size of the codebook.", smoke=32)
    temperature: float = option(
        1.0, number(above=0, most=100), "Initial temperature of the relaxed codes."
    )
    temperature_end: float = option(
        1 / 16,
        number(above=0, most=100),
        "Final temperature of the relaxed codes; the schedule is a cosine.",
    )
    temperature_steps: int = option(150000, whole(0), "Steps over which the temperature falls.")
    kl_weight: float = option(
        6.6,
        number(least=0),
        "Weight of the KL divergence from uniform codes, summed over positions; the "
        "reconstruction loss is summed over pixels.",
    )
    kl_steps: int = option(
        5000, whole(0), "Steps over which kl_weight rises from 0; the schedule is a cosine."
    )


@options
class BEiTOptions:
    """Prediction of a tokenizer's codes of masked patches (Bao et al., 2022)"""

    mask_ratio: float = _mask_ratio(75 / 196)  # As many patches as in the authors' code.


@options
class VQKDOptions:
    """Tokenizer trained by vector-quantized knowledge distillation (Peng et al., 2022)"""

    codes: int = option(8192, whole(2, 2**20), "Size of the codebook.", smoke=32)
    code_dim: int = option(32, whole(1, 2**16), "Width of the codes.")
    code_momentum: float = option(
        0.99, RATE, "Momentum of the codes, which are exponential moving averages of their patches."
    )
    commitment: float = option(
        1.0,
        number(least=0),
        "Weight of the commitment loss, the distance of patches from their codes.",
    )
    revive_below: float = option(
        0.0,
        RATE,
        "Usage of a code, as a share of uniform usage, below which it is replaced by a patch of "
        "the batch; 0: never.",
    )
    decoder_dim: int = option(768, whole(1, 2**20), "Width of the decoder.", smoke=32)
    decoder_depth: int = option(3, whole(1, 10000), "Layers of the decoder.", smoke=1)
    decoder_heads: int = option(12, whole(1, 2**16), "Attention heads of the decoder.", smoke=2)


@options
class BEiTv2Options:
    """Prediction of VQ-KD's codes of masked patches (Peng et al., 2022)"""

    mask_ratio: float = _mask_ratio(75 / 196)  # As many patches as in the authors' code.
    aggregate_from: int | None = option(
        None,
        whole(1, 10000),
        "Layer, counted from 1, whose patches patch aggregation reads; None: the third before "
        "the last.",
        requires=only_with("beitv2.aggregate_layers"),
    )
    aggregate_layers: int = option(
        2, whole(0, 100), "Layers of patch aggregation; 0: none.", smoke=1
    )


@options
class ContrastiveOptions:
    """Contrastive learning from image-text pairs (Radford et al., 2021; Zhai et al., 2023)"""

    loss: str = option(
        "sigmoid",
        one_of("sigmoid", "softmax"),
        "Loss of each image-text pair (SigLIP), or of each image and text in the batch (CLIP).",
        validate=lambda value, config: unless(
            _sees_whole_batch(config),
            "used with micro_batches=1 and optimizer.sum_gradients='as_computed': each image is "
            "compared with all texts of the batch",
        ),
    )
    tokenizer: str = option(
        "bytes",
        text(".+", "a folder, or 'bytes'"),
        "Folder with the tokenizer: tokenizer.json, spiece.model, or vocab.json and merges.txt; "
        "'bytes': the bytes of UTF-8. A run resumes only with the same files.",
        operational=True,
    )
    text_tower: str = option(
        "siglip",
        one_of("siglip", "clip"),
        "Text tower: SigLIP's, without a mask, which reads the last token, or CLIP's, which is "
        "causal and reads the end of the text.",
    )
    text_cleaning: str | None = option(
        None,
        one_of("clip", "siglip", "big_vision"),
        "Changes of texts before the tokenizer: none (clip), lower case and with spiece.model no "
        "punctuation (siglip), or ASCII letters in lower case (big_vision); None: as text_tower. A "
        "folder with open_clip_config.json describes its own.",
    )
    text_length: int = option(64, whole(1, 2**16), "Tokens of a text; longer texts are truncated.")
    text_dim: int = option(768, whole(1, 2**20), "Width of the text tower.", smoke=32)
    text_depth: int = option(12, whole(1, 10000), "Layers of the text tower.", smoke=1)
    text_heads: int = option(12, whole(1, 2**16), "Attention heads of the text tower.", smoke=2)
    text_mlp_dim: int | None = option(
        None, whole(1, 2**20), "Hidden width of the text tower's MLP; None: 4 text_dim."
    )
    text_gelu: str | None = option(
        None,
        one_of("tanh", "erf", "quick"),
        "GELU of the text tower; None: tanh in SigLIP's, quick in CLIP's.",
    )
    vocabulary: int | None = option(
        None,
        whole(1, 2**24),
        "Size of the text tower's vocabulary; None: the number of the tokenizer's tokens.",
    )
    text_frozen: bool = option(
        False,
        flag(),
        "Trains the image tower only, with the text tower of finetune.checkpoint.",
        requires=only_with("finetune.checkpoint"),
        validate=lambda value, config: unless(
            not value or config.finetune.objective == "kept",
            "False with finetune.objective='new', which draws a random text tower",
        ),
    )
    embedding_dim: int | None = option(
        None,
        whole(1, 2**20),
        "Width of the embeddings after a linear projection of the image tower's features (CLIP); "
        "None: the features themselves (SigLIP).",
    )
    patch_dropout: float = option(
        0.0,
        RATE,
        "Share of the patches that the image tower leaves out in training, at random (FLIP).",
        validate=lambda value, config: unless(
            not value or config.finetune.train == "all",
            "0 with a frozen image tower, finetune.train='head'",
        ),
    )
    captioning: float = option(
        0.0, number(least=0), "Weight of the loss of a caption decoder (LocCa, SigLIP 2)."
    )
    decoder_depth: int | None = option(
        None,
        whole(1, 10000),
        "Layers of the caption decoder; None: half of text_depth.",
        requires=only_with("contrastive.captioning"),
    )
    parallel_captions: float = option(
        0.5,
        SHARE,
        "Share of captions whose tokens the decoder predicts in parallel, and not one by one.",
        requires=only_with("contrastive.captioning"),
    )
    self_distillation: float = option(
        0.0,
        number(least=0),
        "Weight of self-distillation with the options of the section dino (SigLIP 2).",
        validate=lambda value, config: unless(
            not value or config.finetune.train == "all",
            "0 with a frozen image tower, finetune.train='head'",
        ),
    )
    self_distillation_from: float = option(
        0.8,
        RATE,
        "Share of the run after which self-distillation starts.",
        smoke=0.1,
        requires=only_with("contrastive.self_distillation"),
    )
    initial_scale: float = option(
        10.0, number(above=0, most=1000), "Initial factor of the cosine similarities."
    )
    max_scale: float | None = option(
        None, number(above=0), "Maximum factor of the cosine similarities (CLIP: 100); None: none."
    )
    initial_bias: float = option(
        -10.0,
        number(least=-1000, most=1000),
        "Initial offset of the logits.",
        requires=only_with("contrastive.loss", "sigmoid"),
    )


_EOMT = only_with("segmentation.head", "eomt")
_UPERNET = only_with("segmentation.head", "upernet")


@options
class DepthOptions:
    """Depth: the distance of each pixel in metres"""

    head: str = option(
        "linear",
        one_of("linear", "dpt"),
        "Head: a linear layer on the tokens (linear), or DPT's decoder of four layers of a ViT "
        "(dpt).",
    )
    layers: int = option(
        1,
        Rule(int, "1 or 4", lambda x: type(x) is int and x in (1, 4)),
        "Layers that the linear head reads: the last one, or four at equal distances.",
        requires=only_with("depth.head", "linear"),
    )
    class_token: bool = option(
        False, flag(), "The head also reads the class token, together with each patch."
    )
    normalize: bool = option(
        True,
        flag(),
        "Normalizes tokens by the model's last layer norm and patches by batch norm (DINOv3); "
        "False: neither (DINOv2).",
    )
    upsample: int = option(
        1,
        whole(1, 32),
        "Factor by which the linear head's scores are upsampled before they become a depth.",
        requires=only_with("depth.head", "linear"),
    )
    dim: int = option(
        256, whole(2, 2**16), "Channels of DPT.", smoke=16, requires=only_with("depth.head", "dpt")
    )
    bins: int = option(
        256,
        whole(1, 2**16),
        "Bins of depths, uniform in their range; 1: the head predicts the depth itself (DINOv2's "
        "DPT).",
        smoke=16,
    )
    min_depth: float = option(
        0.001, number(above=0, most=6000), "Least predicted depth in metres: NYU's by default."
    )
    max_depth: float = option(
        10.0,
        number(above=0, most=6000),
        "Greatest depth in metres, 80 for KITTI; pixels beyond it count as unknown.",
        validate=lambda value, config: unless(
            value > config.depth.min_depth, f"above depth.min_depth = {config.depth.min_depth:g}"
        ),
    )
    gradient_weight: float = option(
        0.0, number(least=0), "Weight of the loss of the gradients of the logarithm of depth."
    )
    scale_steps: int = option(
        100,
        whole(0),
        "First steps, in which only the mean error of the logarithm of depth is trained, without "
        "its variance.",
        smoke=1,
    )


@options
class DetectionOptions:
    """Object detection: boxes with classes"""

    dim: int = option(256, whole(8, 2**16), "Width of the pyramid and of the decoder.", smoke=32)
    depth: int = option(
        6, whole(0, 100), "Layers of the decoder; 0: the proposals are the predictions.", smoke=1
    )
    queries: int = option(300, whole(1, 10000), "Predicted objects of an image.", smoke=20)
    most: int = option(
        100, whole(1, 10000), "True objects of an image; of more, the largest are used.", smoke=10
    )
    masks: bool = option(False, flag(), "Predict the pixels of each object, too.")
    points: int = option(
        12544,
        whole(4, 2**24),
        "Points at which the loss of a mask is computed.",
        smoke=64,
        requires=only_with("detection.masks", True),
    )


@options
class SegmentationOptions:
    """Semantic segmentation: the class of each pixel"""

    head: str = option(
        "linear",
        one_of("linear", "upernet", "eomt"),
        "Head: a linear layer on the last features (linear), UPerNet on the stages of Swin or "
        "ConvNeXt (upernet), or EoMT, queries in the last layers of a ViT (eomt).",
    )
    dropout: float = option(
        0.1,
        RATE,
        "Dropout rate of whole channels before the classifier.",
        requires=only_with("segmentation.head", "linear", "upernet"),
    )
    dim: int = option(512, whole(1, 2**16), "Channels of UPerNet.", smoke=16, requires=_UPERNET)
    auxiliary_dim: int = option(
        256, whole(1, 2**16), "Channels of UPerNet's auxiliary head.", smoke=16, requires=_UPERNET
    )
    auxiliary_weight: float = option(
        0.4, number(least=0), "Weight of the loss of UPerNet's auxiliary head.", requires=_UPERNET
    )
    queries: int = option(
        100, whole(1, 2**14), "Queries of EoMT, masks of an image at most.", smoke=8, requires=_EOMT
    )
    query_layers: int = option(
        4, whole(1, 10000), "Last layers with queries.", smoke=1, requires=_EOMT
    )
    masked_until: tuple[float, ...] = option(
        (0.0, 0.32, 0.48, 0.65),
        several(SHARE),
        "Share of the run, by layer, up to which its queries attend to their own masks only.",
        smoke=(0.0,),
        requires=_EOMT,
        validate=lambda value, config: unless(
            len(value) == config.segmentation.query_layers,
            f"one number for each of segmentation.query_layers = "
            f"{config.segmentation.query_layers}",
        ),
    )
    unmasked_from: tuple[float, ...] = option(
        (0.15, 0.48, 0.65, 0.81),
        several(SHARE),
        "Share of the run, by layer, from which its queries attend to the whole image, as in use; "
        "in between, the share of such queries rises.",
        smoke=(0.5,),
        requires=_EOMT,
        validate=lambda value, config: unless(
            len(value) == len(config.segmentation.masked_until)
            and all(map(operator.le, config.segmentation.masked_until, value)),
            "as many numbers as segmentation.masked_until, and none below its own",
        ),
    )
    points: int = option(
        12544,
        whole(4, 2**24),
        "Points at which the loss of a mask is computed.",
        smoke=64,
        requires=_EOMT,
    )
    mask_weight: float = option(
        5.0, number(least=0), "Weight of the cross-entropy of masks.", requires=_EOMT
    )
    dice_weight: float = option(
        5.0, number(least=0), "Weight of the dice loss of masks.", requires=_EOMT
    )
    class_weight: float = option(
        2.0, number(least=0), "Weight of the cross-entropy of classes.", requires=_EOMT
    )
    no_object_weight: float = option(
        0.1,
        number(above=0),
        "Weight of queries without an object within the cross-entropy of classes.",
        requires=_EOMT,
    )
