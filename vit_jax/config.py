"""Every value a training job can set, with its bounds and its meaning, and how a config is made from them.

A file in `configs/` starts from `base_config()`, changes what its job needs and returns it
through `choose(config, argument)`. Everything here is read somewhere; a key that is not here
is an error.
"""

import difflib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from vit_jax.arguments import ARGUMENTS
from vit_jax.bounds import Rule, either, flag, number, one_of, several, text, whole
from vit_jax.data.sources import SOURCES, data_set
from vit_jax.errors import UserError, nearest


class Value(NamedTuple):
    """One value of a config.

    Attributes:
      default: that of the paper's pre-training (section 4.1, table 3) on the embedded digits. Where it is
        None, None is allowed.
      rule: its type and bounds.
      about: what it means.
      operational: a run may go on with another one, since training does not see it.
      optional: None is allowed although the default is another.
    """

    default: Any
    rule: Rule
    about: str
    operational: bool = False
    optional: bool = False


AUGREG_LEVELS = ("none", "light1", "light2", "medium1", "medium2", "strong1", "strong2")

INTERPOLATIONS = ("bilinear", "bilinear_antialias", "bicubic", "lanczos", "area")

_SHARE = number(least=0, most=1)
_RATE = number(least=0, below=1)
_SLICE = text(r"\S.*", "a split such as 'train' or 'train[:90%]'")

# None leaves a value of `model` to the model's name or to the checkpoint that a run starts from.
VALUES = {
    "seed": Value(0, whole(0), "Everything random follows from it."),
    "batch_size": Value(4096, whole(1, 2**24), "Images in a step, of all devices together."),
    "micro_batches": Value(
        1, whole(1, 2**20), "The batch is cut into so many; their gradients are averaged."
    ),
    "epochs": Value(
        None, number(above=0, most=1e9), "Length of the run, in passes over the training images."
    ),
    "steps": Value(None, whole(1), "If given, the length of the run, whatever the epochs."),
    # Arguments of the model (`ViT`, `BiT` in vit_jax/models).
    "model.name": Value(
        "ViT-B/16", text(), "A name of vit_jax.list_models(); empty: the checkpoint's.", optional=True
    ),
    "model.mean": Value(
        None,
        ARGUMENTS["mean"],
        "Mean of pixels in [0, 1] by which the model normalises, of each channel or (0.5,) of all.",
    ),
    "model.deviation": Value(None, ARGUMENTS["deviation"], "Deviation of pixels in [0, 1], as the mean."),
    "model.patch_size": Value(None, ARGUMENTS["patch_size"], "Side of a patch in pixels."),
    "model.dim": Value(None, ARGUMENTS["dim"], "Width of a token."),
    "model.depth": Value(None, ARGUMENTS["depth"], "Number of encoder layers."),
    "model.hidden": Value(None, ARGUMENTS["hidden"], "Width of the MLP."),
    "model.heads": Value(None, ARGUMENTS["heads"], "Attention heads."),
    "model.registers": Value(None, ARGUMENTS["registers"], "Learned tokens without a meaning of their own."),
    "model.resnet_blocks": Value(
        None, ARGUMENTS["resnet_blocks"], "Units in each stage of the ResNet, of a hybrid or a BiT."
    ),
    "model.resnet_width": Value(None, ARGUMENTS["resnet_width"], "Factor on the ResNet's channels."),
    "model.resnet_epsilons": Value(
        None, ARGUMENTS["resnet_epsilons"], "Whose small constants in the ResNet's norms."
    ),
    "model.pooling": Value(None, ARGUMENTS["pooling"], "What the head reads of the tokens."),
    "model.cls_token": Value(
        None, ARGUMENTS["cls_token"], "Keep a class token beside the pooling gap or map."
    ),
    "model.fc_norm": Value(None, ARGUMENTS["fc_norm"], "Normalise behind the pooling, in place of before."),
    "model.distillation": Value(None, ARGUMENTS["distillation"], "DeiT's distillation token, and its head."),
    "model.position": Value(None, ARGUMENTS["position"], "Kind of position embedding (appendix D.4)."),
    "model.position_at": Value(
        None, ARGUMENTS["position_at"], "Where positions are added: once, or before each layer."
    ),
    "model.rope": Value(None, ARGUMENTS["rope"], "Turn queries and keys by their row and column."),
    "model.rope_grid": Value(None, ARGUMENTS["rope_grid"], "The grid in which rope counts."),
    "model.attention": Value(None, ARGUMENTS["attention"], "Between all tokens, or within rows and columns."),
    "model.axial": Value(None, ARGUMENTS["axial"], "Axial attention in a BiT."),
    "model.mlp": Value(None, ARGUMENTS["mlp"], "Kind of MLP."),
    "model.gelu": Value(None, ARGUMENTS["gelu"], "The approximation, or the exact GELU."),
    "model.qk_norm": Value(None, ARGUMENTS["qk_norm"], "Normalise queries and keys."),
    "model.layer_scale": Value(None, ARGUMENTS["layer_scale"], "Initial value of LayerScale."),
    "model.pre_logits": Value(None, ARGUMENTS["pre_logits"], "The pre-training head's hidden tanh layer."),
    "model.dropout": Value(None, ARGUMENTS["dropout"], "Rate after dense layers and position embeddings."),
    "model.stochastic_depth": Value(
        None, ARGUMENTS["stochastic_depth"], "Rate of skipped branches in the last layer."
    ),
    "model.head_bias": Value(None, ARGUMENTS["head_bias"], "Initial value of the head's biases."),
    "model.initialization": Value(
        None,
        ARGUMENTS["initialization"],
        "How kernels and biases start: as the paper's, or as masked autoencoders'.",
    ),
    "model.norm_epsilon": Value(None, ARGUMENTS["norm_epsilon"], "Small constant of the layer norms."),
    "model.remat": Value(
        "none",
        ARGUMENTS["remat"],
        "What the backward pass computes anew to save memory.",
        operational=True,
    ),
    "model.scan": Value(None, ARGUMENTS["scan"], "Compile one encoder layer for all.", operational=True),
    "model.dtype": Value(
        "float32", one_of("float32", "bfloat16"), "Type of the computation; parameters are float32."
    ),
    "data.source": Value("digits", text(r"\w+"), f"Kind of data: {', '.join(SOURCES)}."),
    "data.path": Value("", text(), "The folder, TFDS's `name` or `name:data_dir`, or a pattern of files."),
    "data.parts": Value(
        None, several(text()), "Parts of a mixture: ('tfds:imagenet2012', 'folder:/data/pets')."
    ),
    "data.weights": Value(
        None, several(number(above=0)), "Shares of a mixture's parts; None: every image counts the same."
    ),
    "data.train_split": Value("train", _SLICE, "The images to train on."),
    "data.dev_split": Value(
        None, _SLICE, "Images to evaluate on and choose by during training; None: the test images."
    ),
    "data.test_split": Value(
        "test", _SLICE, "The images to evaluate on: at the end alone, with a dev_split."
    ),
    "data.label_key": Value("label", text(), "The TFDS feature with the label or the labels."),
    "data.classes": Value(
        None, several(either(text(), whole(0)), least=1), "Only images of these classes, by name; None: all."
    ),
    "data.num_classes": Value(None, whole(1, 2**24), "Width of the head, where not the data set's own."),
    "data.image_size": Value(224, whole(1, 2**14), "Height and width in pixels."),
    "data.decode": Value("fast", one_of("fast", "exact"), "By rectangles, or whole images by Pillow."),
    "data.crop": Value(
        "inception",
        one_of("inception", "random_resized", "square", "short_side", "none"),
        "What training sees of an image: TensorFlow's random part, torchvision's, one after a resize, all.",
    ),
    "data.crop_area": Value(
        (0.05, 1.0),
        several(number(above=0, most=1), count=2, ascending=True),
        "Inception and random_resized: share of the image's area.",
    ),
    "data.crop_aspect": Value(
        (3 / 4, 4 / 3),
        several(number(above=0, most=1e3), count=2, ascending=True),
        "Inception and random_resized: width over height.",
    ),
    "data.crop_resize": Value(
        None, whole(1, 2**15), "Size before the crops square and short_side: 448 for 384."
    ),
    "data.interpolation": Value(
        None,
        one_of(*INTERPOLATIONS),
        "How crops are resized: TensorFlow's bilinear, Pillow's filters, OpenCV's area; None: as the "
        "checkpoint's were that the run starts from, else bilinear.",
    ),
    "data.test_interpolation": Value(
        None, one_of(*INTERPOLATIONS), "How test crops are resized; None: as data.interpolation says."
    ),
    "data.background": Value(
        "white",
        one_of("white", "black", "grey", "none"),
        "What transparent images are put on; none: the colours under their transparency are seen.",
    ),
    "data.flip": Value(True, flag(), "Mirror half of the training images."),
    "data.test_crop": Value(
        "short_side",
        one_of("short_side", "square"),
        "What is resized before the central crop of a test image.",
    ),
    "data.test_resize": Value(256, whole(1, 2**15), "Size before the central crop."),
    "data.workers": Value(
        None,
        whole(0, 1024),
        "Processes that decode, for each host; 0: the training process; None: by cores and images.",
        operational=True,
    ),
    "data.threads": Value(
        None, whole(1, 1024), "Threads of each process that decodes; None: by cores.", operational=True
    ),
    "data.max_unreadable": Value(
        100, whole(0), "Image files skipped before the run gives up.", operational=True
    ),
    "augment.level": Value("none", one_of(*AUGREG_LEVELS), "AugReg's level of RandAugment and mixup."),
    "augment.randaugment": Value(
        None,
        several(number(least=0, most=100), count=2, words="2 numbers from 0 to 100, such as (2, 15)"),
        "Layers and magnitude; None leaves it to the level.",
    ),
    "augment.policy": Value(
        None,
        Rule(
            str,
            "timm's RandAugment, such as 'rand-m9-mstd0.5-inc1': m of 0 to 10 (whole), n of 1 to 99, "
            "p from 0 to 1, mstd from 0 to 100, inc 0 or 1",
            lambda x: isinstance(x, str) and rand_policy(x) is not None,
        ),
        "timm's RandAugment in place of AugReg's, as timm spells it; None: none.",
    ),
    "augment.mixup": Value(None, number(least=0, most=1e3), "Alpha; 0: off; None leaves it to the level."),
    "augment.cutmix": Value(0.0, number(least=0, most=1e3), "Alpha; 0: off."),
    "augment.cutmix_share": Value(0.5, _SHARE, "Share of the batches with CutMix, where mixup is on too."),
    "augment.erasing": Value(0.0, _SHARE, "Probability for each image of random erasing."),
    "augment.color_jitter": Value(
        (0.0, 0.0, 0.0),
        several(number(least=0, most=100), count=3, words="3 numbers from 0 to 100"),
        "Brightness, contrast, saturation: each times a factor in 1 +- x.",
    ),
    # All devices, on three axes. A batch is divided over data x fsdp, parameters and what the optimizer
    # keeps over fsdp, heads and hidden units over tensor. None for one axis: all the rest.
    "mesh.data": Value(
        None, whole(1, 2**20), "Devices that take parts of the batch; None: all the rest.", operational=True
    ),
    "mesh.fsdp": Value(
        1, whole(1, 2**20), "Devices over which parameters are divided.", operational=True, optional=True
    ),
    "mesh.tensor": Value(
        1, whole(1, 2**20), "Devices over which heads and hidden units are.", operational=True, optional=True
    ),
    "finetune.checkpoint": Value(
        None, text(), "Where the parameters come from: what `load_model` takes; None: random ones."
    ),
    "finetune.head": Value(
        "new", one_of("new", "kept"), "Zeros, or the checkpoint's head where the classes are the same."
    ),
    "finetune.train": Value(
        "all", one_of("all", "head", "lora"), "What is trained: all, the head, or it and low-rank changes."
    ),
    "finetune.lora_rank": Value(8, whole(1, 2**16), "Rank of the low-rank changes."),
    "objective.name": Value(
        "classification",
        one_of("classification", "masked_patch", "mae", "dino"),
        "What is learned; all but the first without labels, and without a head.",
    ),
    "objective.mask_ratio": Value(None, _RATE, "Share of the patches; None: 0.5, and 0.75 for mae."),
    "objective.target": Value(
        "color", one_of("color", "cells", "pixels"), "What masked_patch predicts of a patch."
    ),
    "objective.decoder_dim": Value(512, whole(1, 2**20), "Width of mae's decoder."),
    "objective.decoder_depth": Value(8, whole(1, 10_000), "Layers of mae's decoder."),
    "objective.decoder_heads": Value(16, whole(1, 2**16), "Heads of mae's decoder."),
    "objective.decoder_position": Value(
        "sincos2d_mae", one_of("sincos2d", "sincos2d_mae"), "Fixed positions of mae's decoder."
    ),
    "objective.normalize_targets": Value(True, flag(), "To each patch's mean and deviation."),
    "objective.head_hidden": Value(2048, whole(1, 2**20), "Width of the MLP of dino's head."),
    "objective.prototypes": Value(65_536, whole(2, 2**22), "Directions that dino's head tells apart."),
    "objective.teacher_momentum": Value(0.996, _RATE, "Of dino's teacher at first; it rises to 1."),
    "objective.teacher_temperature": Value(0.04, number(1e-3, 100.0), "Of dino's teacher."),
    "loss.name": Value(
        "softmax", one_of("softmax", "sigmoid"), "Loss of a classification; sigmoid is summed."
    ),
    "loss.label_smoothing": Value(0.0, _SHARE, "Share of the target that all classes share alike."),
    "optimizer.name": Value("adam", one_of("adam", "adafactor", "sgd"), "The optimizer."),
    "optimizer.learning_rate": Value(1e-3, number(least=0), "The highest rate, after the warm-up."),
    "optimizer.end_learning_rate": Value(0.0, number(least=0), "The rate of the last update."),
    "optimizer.schedule": Value(
        "cosine", one_of("linear", "cosine", "constant", "stairs"), "How the rate falls."
    ),
    "optimizer.stairs": Value(
        (0.3, 0.6, 0.9),
        several(number(above=0, below=1), least=1, ascending=True),
        "Shares of the run after which the rate of stairs falls; BiT's are these.",
    ),
    "optimizer.stair_factor": Value(0.1, number(above=0, most=1), "Factor on the rate at each stair."),
    "optimizer.count_from": Value(
        1, whole(0, 1), "Number of the first update in the schedule; 0 in big_vision, Optax and others."
    ),
    "optimizer.warmup_steps": Value(10_000, whole(0), "Steps in which the rate rises linearly."),
    "optimizer.beta1": Value(0.9, _RATE, "Decay of the first moment; momentum, for sgd."),
    "optimizer.beta2": Value(0.999, _RATE, "Decay of the second moment."),
    "optimizer.epsilon": Value(1e-8, number(least=0, most=1), "Added to the root of the second moment."),
    "optimizer.moment_dtype": Value(
        "float32", one_of("float32", "bfloat16"), "Type of the first moment, or momentum."
    ),
    "optimizer.clip_update": Value(
        0.0, number(least=0), "Adafactor: highest RMS of a kernel's update before momentum; 0: off."
    ),
    "optimizer.clip_update_of": Value(
        "projection",
        one_of("projection", "array"),
        "That of q, k and v apart, or of the array that they lie in.",
    ),
    "optimizer.weight_decay": Value(0.1, number(least=0), "Times the learning rate and the parameter."),
    "optimizer.coupled_decay": Value(
        False,
        flag(),
        "Decay the gradient, as BiT does: with momentum 0.9 ten times as strong.",
    ),
    "optimizer.decay": Value(
        "kernels",
        one_of("kernels", "matrices", "all"),
        "Which parameters decay; matrices are all but biases and scales.",
    ),
    "optimizer.clip_norm": Value(1.0, number(least=0), "Global norm of the gradient; 0: off."),
    "optimizer.sum_gradients": Value(
        "as_computed",
        one_of("as_computed", "float32_once"),
        "Over devices: each as it is computed, in model.dtype, or all at the end of a step, in float32.",
        operational=True,
    ),
    "optimizer.layer_decay": Value(
        1.0, number(above=0, most=1), "Factor on the learning rate for each layer below the head."
    ),
    "optimizer.average": Value(
        0.0, _RATE, "Polyak's factor: the average of the parameters is evaluated; 0: off."
    ),
    "optimizer.average_from": Value(
        "zero", one_of("zero", "weights"), "Corrected for its start, or started at the first parameters."
    ),
    # Of `python -m vit_jax.sweep`, whose runs do not see them: rates are compared on training images that
    # were held out.
    "sweep.rates": Value(
        (1e-3, 3e-3, 1e-2, 3e-2),
        several(number(above=0), different=True),
        "The learning rates that are compared.",
        operational=True,
    ),
    "sweep.resnet_rates": Value(
        (), several(number(above=0), different=True), "Rates more where the model is a BiT or a hybrid."
    ),
    "sweep.train_split": Value(
        "[:90%]",
        _SLICE,
        "What a rate is trained on: a split, or a slice of data.train_split.",
        operational=True,
    ),
    "sweep.dev_split": Value(
        "[90%:]",
        _SLICE,
        "What rates are compared on: a split, or a slice of data.train_split.",
        operational=True,
    ),
    "sweep.seeds": Value(
        (0, 1, 2),
        several(whole(0), different=True),
        "Seeds of the runs at the best rate, on all training images.",
        operational=True,
    ),
    "max_skipped_steps": Value(
        10,
        whole(0),
        "Steps in a row whose loss or gradient is not finite, before the run gives up.",
        operational=True,
    ),
    "profile": Value(
        "",
        text(r"(steps:\d+-\d+)?", "as steps:10-15"),
        "`steps:10-15` writes a trace of these steps into the workdir.",
        operational=True,
    ),
    "log_every": Value(50, whole(1), "Steps between lines of the log.", operational=True),
    "evaluate_every": Value(1000, whole(1), "Steps between evaluations."),
    "hang_seconds": Value(
        1200.0,
        number(least=0.1, most=1e7),
        "With nothing done for so long all stacks are written; see watchdog.py.",
        operational=True,
    ),
    # Few-shot linear evaluation of the frozen network, beside the evaluation of the test split.
    "fewshot.every": Value(0, whole(0), "Steps, a multiple of evaluate_every, and at the end; 0: never."),
    "fewshot.sets": Value(
        (), several(text()), "('tfds:cifar100', 'folder:/data/pets@train,val'); see `data_set`."
    ),
    "fewshot.shots": Value(
        (1, 5, 10, 25),
        several(whole(1), least=1, different=True, words="different whole numbers, 1 or above"),
        "Training images of each class.",
    ),
    "fewshot.seeds": Value(
        (0, 1, 2),
        several(whole(0), least=1, different=True, words="different whole numbers, 0 or above"),
        "Seeds of the choice of images; accuracies are averaged over them.",
    ),
    "fewshot.penalty": Value(1024.0, number(least=0), "Penalty of least squares."),
    "checkpoint.every": Value(1000, whole(1), "Steps between checkpoints.", operational=True),
    "checkpoint.keep_last": Value(2, whole(1), "So many are kept, the newest;", operational=True),
    "checkpoint.keep_every": Value(None, whole(1), "those at multiples of so many steps;", operational=True),
    "checkpoint.keep_best": Value(
        0,
        whole(0),
        "and so many of the best: by accuracy on data.dev_split (else test), or loss.",
        operational=True,
    ),
}

# What may differ between the start of a run and its continuation: nothing that the training sees.
OPERATIONAL = {key for key, value in VALUES.items() if value.operational}


def base_config() -> ConfigDict:
    """The config of all defaults, with no value but these; locked."""
    config = ConfigDict()
    for key, value in VALUES.items():
        *parts, name = key.split(".")
        part = config
        for inner in parts:
            if inner not in part:
                part[inner] = ConfigDict()
            part = part[inner]
        part[name] = placeholder(value.rule.kind) if value.default is None else value.default
    return config.lock()


def named_values(argument: str | None, **defaults: str) -> tuple[dict[str, str], str]:
    """Takes `name=value` out of a config's argument, such as `model=ViT-S/16,smoke`.

    Args:
      defaults: every name there is, and its value where the argument has none.

    Returns:
      The values by name, and the rest of the argument, which is for `choose`.
    """
    values, rest = dict(defaults), []
    for part in (argument or "").split(","):
        name, equals, value = part.partition("=")
        if not equals:
            rest.append(part)
        elif name not in defaults:
            raise UserError(f"unknown config argument {name!r}; {nearest(name, defaults)}")
        else:
            values[name] = value
    return values, ",".join(rest)


def choose(config: ConfigDict, argument: str | None) -> ConfigDict:
    """The config itself, or with the argument `smoke` its two-step version on synthetic images."""
    if not argument:
        return config
    if argument != "smoke":
        raise UserError(f"unknown config argument {argument!r}; there is: smoke")
    from vit_jax.models import parse_name  # JAX comes with it, which no `--help` should wait for.

    config.update(dict(steps=2, batch_size=16, log_every=1, evaluate_every=2))
    config.model.name = config.model.name or "ViT-B/16"
    config.checkpoint.every = 2
    config.fewshot.every = 0  # Its data sets may not be here.
    family, values = parse_name(config.model.name)
    chosen = {name: value for name, value in config.model.items() if value is not None and name != "name"}
    small = family.smallest(values | chosen)
    size = small.pop("image_size")
    config.model.update(small)
    config.data.update(dict(source="synthetic", image_size=size, test_resize=size * 5 // 4))
    config.data.update(
        dict(train_split="train", test_split="test", dev_split=config.data.dev_split and "dev")
    )
    config.data.num_classes = 10
    config.objective.update(dict(decoder_dim=32, decoder_depth=1, decoder_heads=2))
    config.objective.update(dict(head_hidden=32, prototypes=64))
    config.optimizer.warmup_steps = 1
    return config


def unknown_key(key: str) -> str:
    """The error for a key that no config has: `optimizer.lr`, or its last part alone."""
    section, _, name = key.rpartition(".")
    inside = [known.rpartition(".")[2] for known in VALUES if section and known.startswith(f"{section}.")]
    if inside:
        return f"unknown config key {key!r}; in config.{section}: {nearest(name, inside)}"
    close = difflib.get_close_matches(key, [*VALUES, *(known.rpartition(".")[2] for known in VALUES)], n=1)
    return f"unknown config key {key!r}; " + (
        f"did you mean {close[0]!r}?" if close else "vit_jax/config.py lists all of them"
    )


def check_values(given: Mapping[str, Any]) -> None:
    """Raises UserError unless there is each value, by its dotted key, and no other, within its bounds."""
    for key in given.keys() - VALUES.keys():
        raise UserError(unknown_key(key))
    for key in VALUES.keys() - given.keys():
        raise UserError(f"config key {key!r} is missing: start the config from vit_jax.config.base_config()")
    for key, value in VALUES.items():
        if given[key] is None:
            _require(value.default is None or value.optional, key, None, value.rule.words)
        else:
            _require(value.rule.holds(given[key]), key, given[key], value.rule.words)


def check(config: ConfigDict) -> None:
    """Raises UserError for keys and values that no run could use."""
    check_values(dict(leaves(config)))
    if config.steps is None and config.epochs is None:
        raise UserError("give config.epochs or config.steps")
    _require(
        bool(config.model.name or config.finetune.checkpoint),
        "model.name",
        config.model.name,
        "a model such as 'ViT-B/16' where there is no config.finetune.checkpoint",
    )
    in_order = not config.profile or profiled_steps(config) is not None
    _require(in_order, "profile", config.profile, "as steps:10-15")
    every, keep_every = config.checkpoint.every, config.checkpoint.keep_every
    _require(
        keep_every is None or keep_every % every == 0,
        "checkpoint.keep_every",
        keep_every,
        f"a multiple of checkpoint.every = {every}",
    )
    _require(
        config.checkpoint.keep_best == 0 or config.evaluate_every % every == 0,
        "evaluate_every",
        config.evaluate_every,
        f"a multiple of checkpoint.every = {every} for checkpoint.keep_best",
    )
    _check_fewshot(config)
    _require(
        config.data.test_resize >= config.data.image_size,
        "data.test_resize",
        config.data.test_resize,
        f"at least data.image_size = {config.data.image_size}",
    )
    check_policy(config)
    if config.data.crop in ("square", "short_side"):
        _require(
            (config.data.crop_resize or 0) >= config.data.image_size,
            "data.crop_resize",
            config.data.crop_resize,
            f"at least data.image_size = {config.data.image_size} for the crop {config.data.crop!r}",
        )


def check_policy(config: ConfigDict) -> None:
    """Raises UserError for timm's RandAugment beside AugReg's, or with an interpolation that it has not."""
    augregs = config.augment.level != "none" or config.augment.randaugment is not None
    _require(
        config.augment.policy is None or not augregs,
        "augment.policy",
        config.augment.policy,
        "None beside AugReg's augment.level and augment.randaugment: either is a RandAugment",
    )
    _require(
        config.augment.policy is None or config.data.interpolation not in ("lanczos", "area"),
        "data.interpolation",
        config.data.interpolation,
        "bilinear, bilinear_antialias or bicubic with augment.policy, which turns and shears by it too",
    )


def _check_fewshot(config: ConfigDict) -> None:
    values = config.fewshot
    _require(
        values.every % config.evaluate_every == 0,
        "fewshot.every",
        values.every,
        f"a multiple of evaluate_every = {config.evaluate_every}, or 0",
    )
    _require(
        values.every == 0 or len(values.sets) > 0, "fewshot.sets", values.sets, "such as ('tfds:cifar100',)"
    )
    names = [data_set(text).name for text in values.sets]
    holds = len(names) == len(set(names))
    _require(holds, "fewshot.sets", values.sets, f"of different names; these are {', '.join(names)}")


def profiled_steps(config: ConfigDict) -> range | None:
    """The steps that `config.profile` names, or None."""
    found = re.fullmatch(r"steps:(\d+)-(\d+)", config.profile)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        return None
    return range(int(found[1]), int(found[2]) + 1)


def rand_policy(text: str) -> dict[str, Any] | None:
    """What timm's name of a RandAugment says, or None where it is none: `rand-m9-mstd0.5-inc1`.

    Its parts, in any order and each at most once: `m` the magnitude, from 0 to 10, else 10; `n` the number of
    layers, else 2; `p` the probability of each, else 0.5; `mstd` the magnitude's deviation, else 0; `inc1`:
    operations change more as the magnitude rises.
    """
    kind, *parts = text.split("-")
    patterns = dict(
        magnitude=r"m(\d|10)",
        layers=r"n([1-9]\d?)",
        probability=r"p(0(?:\.\d+)?|1(?:\.0+)?)",
        deviation=r"mstd(\d?\d(?:\.\d+)?|100)",
        increasing=r"inc([01])",
    )
    read = dict(layers=int, increasing=lambda digit: digit == "1")
    values = {}
    for name, pattern in patterns.items():
        found = [match[1] for part in parts if (match := re.fullmatch(pattern, part))]
        if found:
            values[name] = read.get(name, float)(found[0])
    return values if kind == "rand" and len(values) == len(parts) else None


def leaves(config: ConfigDict, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """All (dotted key, value) of a config."""
    for key, value in config.items():
        if isinstance(value, ConfigDict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def to_json(config: ConfigDict) -> str:
    """Text that `from_json` reads back; the order of keys is kept."""
    return json.dumps(config.to_dict(), indent=2)


def from_json(text: str) -> ConfigDict:
    """The config that `to_json` wrote."""
    config = base_config()
    config.unlock().update(json.loads(text))
    return config.lock()


def differences(saved: str, config: ConfigDict) -> list[str]:
    """What keeps a run of `config` from continuing one of the saved config: `key: saved -> new`."""
    # What did not exist when it was saved is as it was then: the default.
    texts = to_json(from_json(saved)), to_json(config)
    old, new = (dict(leaves(ConfigDict(json.loads(text)))) for text in texts)
    return [
        f"{key}: {old.get(key)} -> {new.get(key)}"
        for key in sorted(old.keys() | new.keys())
        if key not in OPERATIONAL and old.get(key) != new.get(key)
    ]


def _require(holds: bool, key: str, value: Any, what: str) -> None:
    if not holds:
        raise UserError(f"config.{key} is {value!r} and must be {what}")
