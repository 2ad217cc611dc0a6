"""Every value a training job can set, and how a config is made from them.

A file in `configs/` starts from `base_config()`, changes what its job needs and returns it
through `choose(config, argument)`. Everything here is read somewhere; a key that is not here
is an error.
"""

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from vit_jax.errors import UserError, nearest

# What may differ between the start of a run and its continuation: nothing that the training sees.
OPERATIONAL = {
    "log_every",
    "checkpoint.every",
    "checkpoint.keep_last",
    "checkpoint.keep_every",
    "checkpoint.keep_best",
    "hang_seconds",
    "data.workers",
    "data.threads",
    "data.max_unreadable",
    "max_skipped_steps",
    "mesh.data",
    "mesh.fsdp",
    "mesh.tensor",
    "model.remat",
    "model.scan",
    "profile",
}

AUGREG_LEVELS = ("none", "light1", "light2", "medium1", "medium2", "strong1", "strong2")


def base_config() -> ConfigDict:
    """The defaults: the paper's pre-training (section 4.1, table 3), on the embedded digits."""
    config = ConfigDict()
    config.seed = 0
    config.batch_size = 4096  # Of all devices together.
    config.micro_batches = 1  # The batch is cut into so many; their gradients are averaged.
    config.epochs = placeholder(float)
    config.steps = placeholder(int)  # If given, the length of the run, whatever the epochs.

    # Arguments of the model (`ViT`, `BiT` in vit_jax/models): None leaves it to the name.
    config.model = ConfigDict()
    config.model.name = "ViT-B/16"
    for size in ("patch_size", "dim", "depth", "hidden", "heads", "registers"):
        config.model[size] = placeholder(int)
    config.model.resnet_blocks = placeholder(tuple)  # Units in each stage, of a hybrid or a BiT.
    config.model.resnet_width = placeholder(int)
    config.model.resnet_epsilons = placeholder(str)  # google, timm.
    config.model.pooling = placeholder(str)  # cls, gap, map.
    config.model.distillation = placeholder(str)  # none, token, heads.
    config.model.position = placeholder(str)  # 1d, 2d, relative, sincos2d, none.
    config.model.position_at = placeholder(str)  # stem, every, shared.
    config.model.rope = placeholder(bool)
    config.model.rope_grid = placeholder(tuple)
    config.model.attention = placeholder(str)  # full, axial.
    config.model.axial = placeholder(bool)  # Of a BiT.
    config.model.mlp = placeholder(str)  # gelu, swiglu.
    config.model.gelu = placeholder(str)  # tanh, erf.
    config.model.qk_norm = placeholder(bool)
    config.model.layer_scale = placeholder(float)
    config.model.pre_logits = placeholder(bool)  # The pre-training head's hidden tanh layer.
    config.model.dropout = placeholder(float)
    config.model.stochastic_depth = placeholder(float)
    config.model.head_bias = placeholder(float)
    config.model.norm_epsilon = placeholder(float)
    config.model.remat = "none"  # Or dots, full: what the backward pass computes anew to save memory.
    config.model.scan = placeholder(bool)  # Compile one encoder layer for all.
    config.model.dtype = "float32"  # Or bfloat16: of the computation; parameters are float32.

    config.data = ConfigDict()
    config.data.source = "digits"  # Or folder, tfds, vtab, array_record, mixture, synthetic.
    config.data.path = ""  # The folder, TFDS's `name` or `name:data_dir`, or a pattern of files.
    config.data.parts = placeholder(tuple)  # Of a mixture: ("tfds:imagenet2012", "folder:/data/pets").
    config.data.weights = placeholder(tuple)  # Shares of the parts; None: every image counts the same.
    config.data.train_split = "train"
    config.data.test_split = "test"
    config.data.label_key = "label"  # The TFDS feature with the label or the labels.
    config.data.classes = placeholder(tuple)  # Only images of these, by name; None: all.
    config.data.num_classes = placeholder(int)  # Width of the head, where not the data set's own.
    config.data.image_size = 224
    config.data.decode = "fast"  # Or exact: whole images, by Pillow.
    config.data.crop = "inception"  # Or square, short_side (a random crop after a resize), none.
    config.data.crop_area = (0.05, 1.0)  # Inception crop: share of the image's area,
    config.data.crop_aspect = (3 / 4, 4 / 3)  # and width over height.
    config.data.crop_resize = placeholder(int)  # For the crops square and short_side: 448 for 384.
    config.data.flip = True
    config.data.test_crop = "short_side"  # Or square: what is resized before the central crop.
    config.data.test_resize = 256  # Size before the central crop.
    config.data.workers = 0  # Processes that decode, for each host; 0: the training process does.
    config.data.threads = 1  # Of each process that decodes.
    config.data.max_unreadable = 100  # Image files skipped before the run gives up.

    config.augment = ConfigDict()
    config.augment.level = "none"  # AugReg's: light1, light2, medium1, medium2, strong1, strong2.
    config.augment.randaugment = placeholder(tuple)  # Layers, magnitude; None leaves it to the level.
    config.augment.mixup = placeholder(float)  # Alpha; 0: off; None leaves it to the level.
    config.augment.cutmix = 0.0  # Alpha; 0: off.
    config.augment.cutmix_share = 0.5  # Of the batches, where mixup is on too.
    config.augment.erasing = 0.0  # Probability for each image.
    config.augment.color_jitter = (0.0, 0.0, 0.0)  # Of brightness, contrast, saturation: factor 1 +- x.

    # All devices, on three axes. A batch is divided over data x fsdp, parameters and what the optimizer
    # keeps over fsdp, heads and hidden units over tensor. None for one axis: all the rest.
    config.mesh = ConfigDict()
    config.mesh.data = placeholder(int)
    config.mesh.fsdp = 1
    config.mesh.tensor = 1

    # Where the parameters come from, and which of them are trained.
    config.finetune = ConfigDict()
    config.finetune.checkpoint = placeholder(str)  # What `load_model` takes; None: random parameters.
    config.finetune.head = "new"  # Zeros. Or kept: the checkpoint's, if the classes are the same.
    config.finetune.train = "all"  # Or head: all else is frozen; or lora: the head and low-rank changes.
    config.finetune.lora_rank = 8

    config.objective = ConfigDict()
    config.objective.name = "classification"  # Or masked_patch, mae: without labels, and without a head.
    config.objective.mask_ratio = placeholder(float)  # Of the patches; None: 0.5, and 0.75 for mae.
    config.objective.target = "color"  # Of masked_patch; or cells, pixels.
    config.objective.decoder_dim = 512  # Of mae, as are the next.
    config.objective.decoder_depth = 8
    config.objective.decoder_heads = 16
    config.objective.normalize_targets = True  # To each patch's mean and deviation.

    config.loss = ConfigDict()  # Of a classification.
    config.loss.name = "softmax"  # Or sigmoid: summed over the classes.
    config.loss.label_smoothing = 0.0

    config.optimizer = ConfigDict()
    config.optimizer.name = "adam"  # Or adafactor, sgd.
    config.optimizer.learning_rate = 1e-3
    config.optimizer.end_learning_rate = 0.0
    config.optimizer.schedule = "cosine"  # Or linear, constant.
    config.optimizer.warmup_steps = 10_000
    config.optimizer.beta1 = 0.9  # Momentum, for sgd.
    config.optimizer.beta2 = 0.999
    config.optimizer.epsilon = 1e-8
    config.optimizer.moment_dtype = "float32"  # Or bfloat16: of the first moment, or momentum.
    config.optimizer.weight_decay = 0.1  # Decoupled: times the learning rate.
    config.optimizer.decay = "kernels"  # Or all parameters.
    config.optimizer.clip_norm = 1.0  # Global norm of the gradient; 0: off.
    config.optimizer.layer_decay = 1.0  # Factor on the learning rate for each layer below the head.
    config.optimizer.average = 0.0  # Polyak's factor: the average of the parameters is evaluated; 0: off.
    config.optimizer.average_from = "zero"  # Corrected for its start. Or weights: starts at the first ones.

    # Of `python -m vit_jax.sweep`: the rates are compared on training images that were held out.
    config.sweep = ConfigDict()
    config.sweep.rates = (1e-3, 3e-3, 1e-2, 3e-2)
    config.sweep.train_split = "train[:90%]"
    config.sweep.dev_split = "train[90%:]"
    config.sweep.seeds = (0, 1, 2)  # Of the runs at the best rate, on all training images.

    config.max_skipped_steps = 10  # In a row, whose loss or gradient is not finite, before the run gives up.
    config.profile = ""  # `steps:10-15` writes a trace of these steps into the workdir.
    config.log_every = 50  # All in steps.
    config.evaluate_every = 1000
    config.hang_seconds = 1200.0  # With no step and no batch of an evaluation done; see watchdog.py.

    # Few-shot linear evaluation of the frozen network, beside the evaluation of the test split.
    config.fewshot = ConfigDict()
    config.fewshot.every = 0  # Steps, a multiple of evaluate_every, and at the end; 0: never.
    config.fewshot.sets = ()  # ("tfds:cifar100", "folder:/data/pets@train,val"); see `data_set`.
    config.fewshot.shots = (1, 5, 10, 25)  # Training images of each class.
    config.fewshot.seeds = (0, 1, 2)  # Of the choice of images; accuracies are averaged over them.
    config.fewshot.penalty = 1024.0  # Of least squares.

    config.checkpoint = ConfigDict()
    config.checkpoint.every = 1000  # Steps.
    config.checkpoint.keep_last = 2  # So many are kept, the newest;
    config.checkpoint.keep_every = placeholder(int)  # those at multiples of so many steps;
    config.checkpoint.keep_best = 0  # and so many of the best: by test accuracy, else by test loss.
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
    config.update(dict(steps=2, batch_size=16, log_every=1, evaluate_every=2))
    config.model.name = config.model.name or "ViT-B/16"
    config.checkpoint.every = 2
    config.fewshot.every = 0  # Its data sets may not be here.
    kind, _, number = config.model.name.partition("/")
    stride = config.model.patch_size or int(number or 16)
    if "ViT" in kind:
        config.model.update(dict(dim=64, depth=2, hidden=128, heads=2))
    if kind.startswith(("R50", "R26")):
        config.model.resnet_blocks = (1, 1, 1) if stride == 16 else (1, 1, 1, 1)
    elif "ViT" not in kind:
        config.model.update(dict(resnet_blocks=(1, 1), resnet_width=1))
    config.data.update(dict(source="synthetic", workers=0, image_size=4 * stride, test_resize=5 * stride))
    config.data.num_classes = 10
    config.objective.update(dict(decoder_dim=32, decoder_depth=1, decoder_heads=2))
    config.optimizer.warmup_steps = 1
    return config


def check(config: ConfigDict) -> None:
    """Raises UserError for keys and values that no run could use."""
    known, given = dict(leaves(base_config())), dict(leaves(config))
    for key in given.keys() - known.keys():
        raise UserError(f"unknown config key {key!r}; {nearest(key, known)}")
    for key in known.keys() - given.keys():
        raise UserError(f"config key {key!r} is missing: start the config from vit_jax.config.base_config()")
    if config.steps is None and config.epochs is None:
        raise UserError("give config.epochs or config.steps")
    for key in ("epochs", "steps"):
        _require(given[key] is None or given[key] > 0, key, given[key], "above 0")
    for key in (
        "batch_size",
        "micro_batches",
        "data.image_size",
        "data.threads",
        "log_every",
        "evaluate_every",
        "finetune.lora_rank",
        "objective.decoder_dim",
        "objective.decoder_depth",
        "objective.decoder_heads",
    ):
        _require(given[key] >= 1, key, given[key], "at least 1")
    _require(
        0 < config.optimizer.layer_decay <= 1,
        "optimizer.layer_decay",
        config.optimizer.layer_decay,
        "above 0 and at most 1",
    )
    _require(
        bool(config.model.name or config.finetune.checkpoint),
        "model.name",
        config.model.name,
        "a model such as 'ViT-B/16' where there is no config.finetune.checkpoint",
    )
    for key in ("mesh.data", "mesh.fsdp", "mesh.tensor"):
        _require(given[key] is None or given[key] >= 1, key, given[key], "at least 1")
    _require(config.max_skipped_steps >= 0, "max_skipped_steps", config.max_skipped_steps, "0 or above")
    _require(
        not config.profile or profiled_steps(config) is not None, "profile", config.profile, "as steps:10-15"
    )
    for key in ("checkpoint.every", "checkpoint.keep_last", "data.threads"):
        _require(given[key] >= 1, key, given[key], "at least 1")
    _require(given["hang_seconds"] > 0, "hang_seconds", given["hang_seconds"], "above 0")
    every, keep_every = config.checkpoint.every, config.checkpoint.keep_every
    _require(
        keep_every is None or (keep_every >= 1 and keep_every % every == 0),
        "checkpoint.keep_every",
        keep_every,
        f"a multiple of checkpoint.every = {every}",
    )
    keep_best = config.checkpoint.keep_best
    _require(keep_best >= 0, "checkpoint.keep_best", keep_best, "0 or above")
    _require(
        keep_best == 0 or config.evaluate_every % every == 0,
        "evaluate_every",
        config.evaluate_every,
        f"a multiple of checkpoint.every = {every} for checkpoint.keep_best",
    )
    _check_fewshot(config)
    for key in ("model.dropout", "model.stochastic_depth", "optimizer.average", "objective.mask_ratio"):
        _require(given[key] is None or 0 <= given[key] < 1, key, given[key], "from 0 to below 1")
    _require(
        config.data.test_resize >= config.data.image_size,
        "data.test_resize",
        config.data.test_resize,
        f"at least data.image_size = {config.data.image_size}",
    )
    for key in ("augment.cutmix", "augment.mixup"):
        _require(given[key] is None or given[key] >= 0, key, given[key], "0 or above")
    for key in ("augment.cutmix_share", "augment.erasing"):
        _require(0 <= given[key] <= 1, key, given[key], "from 0 to 1")
    for key, length in {"augment.randaugment": 2, "augment.color_jitter": 3}.items():
        value = given[key]
        holds = value is None or (len(value) == length and min(value) >= 0)
        _require(holds, key, value, f"{length} numbers of 0 or above")
    _require(
        given["augment.level"] in AUGREG_LEVELS,
        "augment.level",
        given["augment.level"],
        f"a level of AugReg; {nearest(given['augment.level'], AUGREG_LEVELS)}",
    )
    if config.data.crop in ("square", "short_side"):
        _require(
            (config.data.crop_resize or 0) >= config.data.image_size,
            "data.crop_resize",
            config.data.crop_resize,
            f"at least data.image_size = {config.data.image_size} for the crop {config.data.crop!r}",
        )
    for key, values in {
        "data.decode": ("fast", "exact"),
        "data.crop": ("inception", "square", "short_side", "none"),
        "data.test_crop": ("short_side", "square"),
        "objective.name": ("classification", "masked_patch", "mae"),
        "objective.target": ("color", "cells", "pixels"),
        "loss.name": ("softmax", "sigmoid"),
        "optimizer.name": ("adam", "adafactor", "sgd"),
        "optimizer.moment_dtype": ("float32", "bfloat16"),
        "optimizer.schedule": ("linear", "cosine", "constant"),
        "optimizer.decay": ("kernels", "all"),
        "optimizer.average_from": ("zero", "weights"),
        "finetune.head": ("new", "kept"),
        "finetune.train": ("all", "head", "lora"),
        "model.dtype": ("float32", "bfloat16"),
    }.items():
        _require(given[key] in values, key, given[key], " or ".join(values))


def _check_fewshot(config: ConfigDict) -> None:
    values = config.fewshot
    _require(
        values.every >= 0 and values.every % config.evaluate_every == 0,
        "fewshot.every",
        values.every,
        f"a multiple of evaluate_every = {config.evaluate_every}, or 0",
    )
    _require(
        values.every == 0 or len(values.sets) > 0, "fewshot.sets", values.sets, "such as ('tfds:cifar100',)"
    )
    for key, least in dict(shots=1, seeds=0).items():
        given = values[key]
        whole = all(isinstance(number, int) and number >= least for number in given)
        holds = whole and 0 < len(given) == len(set(given))
        _require(holds, f"fewshot.{key}", given, f"different whole numbers, {least} or above")
    _require(values.penalty >= 0, "fewshot.penalty", values.penalty, "0 or above")
    names = [data_set(text).name for text in values.sets]
    holds = len(names) == len(set(names))
    _require(holds, "fewshot.sets", values.sets, f"of different names; these are {', '.join(names)}")


class DataSet(NamedTuple):
    """A data set to evaluate on."""

    name: str  # For metrics and tables.
    kind: str
    path: str
    train_split: str
    test_split: str


def data_set(text: str) -> DataSet:
    """Reads `kind:path` or `kind:path@TRAIN_SPLIT,TEST_SPLIT`; without splits they are train and test.

    Kinds and paths are those of `data.source` and `data.path`, and the name is the path's:
    `tfds:uc_merced@train[:1000],train[1000:]` is uc_merced.

    Raises:
      UserError: it is not written so.
    """
    kinds = ("digits", "folder", "tfds", "synthetic")
    found = re.fullmatch(r"(\w+):([^@]*)(?:@([^@,]+),([^@,]+))?", str(text))
    if not found or found[1] not in kinds or (found[1] in ("folder", "tfds") and not found[2]):
        raise UserError(
            f"cannot read the data set {text!r}: write it as tfds:cifar100, folder:/data/pets or "
            f"tfds:uc_merced@train[:1000],train[1000:]; kinds are {', '.join(kinds)}"
        )
    kind, path = found[1], found[2]
    if kind == "tfds" and not path.startswith(("/", ".", "~", "gs://")):
        name = re.split("[:/]", path)[0]
    else:  # The last folder that is not a version's.
        folders = [part for part in path.split("/") if not re.fullmatch(r"[\d.]*", part)]
        name = folders[-1] if folders else kind
    return DataSet(name, kind, path, found[3] or "train", found[4] or "test")


def is_supervised(config: ConfigDict) -> bool:
    """The objective needs labels, and its model a head."""
    return config.objective.name == "classification"


def profiled_steps(config: ConfigDict) -> range | None:
    """The steps that `config.profile` names, or None."""
    found = re.fullmatch(r"steps:(\d+)-(\d+)", config.profile)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        return None
    return range(int(found[1]), int(found[2]) + 1)


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
