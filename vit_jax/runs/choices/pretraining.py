"""Automatic settings for self-supervised training on custom images, each with its reason.

A ViT starts from the parameters of a checkpoint, and is trained with DINOv2's losses (2304.07193)
at a low learning rate. A model without patch tokens is trained only with DINO's loss.
"""

import math
import os
from collections.abc import Collection
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from vit_jax.config import VALUES, unread
from vit_jax.data.sources import open_source
from vit_jax.data.sources.base import Source
from vit_jax.errors import UserError
from vit_jax.interop.adapting import fit
from vit_jax.interop.checkpoint import Checkpoint, sketch
from vit_jax.interop.open import open_checkpoint
from vit_jax.models import count_multiply_adds, family_of, model_options
from vit_jax.models.image_model import TokenModel, height_and_width
from vit_jax.options.data import INTERPOLATIONS, SPLIT_KEYS
from vit_jax.options.model import ImageOptions
from vit_jax.options.run import RunOptions
from vit_jax.published.weights import checkpoint_of
from vit_jax.runs.choices.choice import Choice, Settings
from vit_jax.runs.choices.data_at import (
    check_files,
    check_no_run,
    choices_of,
    data_at,
    folder_of_splits,
    folders_of_images,
    of_kind,
)
from vit_jax.runs.choices.device import available_seconds, flops_per_second, on_cpu
from vit_jax.runs.choices.finetuning import (
    DEFAULT_CHECKPOINT,
    LARGE_CHECKPOINT,
    open_default,
    splits_of,
)
from vit_jax.runs.choices.image_sizes import largest_size, short_sides
from vit_jax.runs.choices.micro_batches import choose_micro_batches
from vit_jax.training.program import model_arguments

FEWEST = 4  # Minimum number of images: two for training and two for evaluation.
SCRATCH = "scratch"  # Value of `--from` for random parameters instead of a checkpoint.
# Share of a run's time for training steps. Compilation, evaluation and checkpoints take the other
# half.
TRAINED = 0.5
MOST_STEPS, LEAST_STEPS, PASSES = 1000, 10, 50
LARGE_SIDE, SMALLEST_SIDE = 224, 8  # Side of a large crop in pixels; its minimum side in patches.
LOCAL_SIDE = 98 / 224  # Ratio of a local crop's side to a large crop's.
EVALUATIONS = 4
MOST_COMPARED = 500  # Maximum number of k-NN's query images, and of its reference images.
NEIGHBOURS = 10


class Start(NamedTuple):
    """The model from which a run starts."""

    options: ImageOptions  # Options of the model.
    # Checkpoint with the initial parameters; None: random parameters.
    checkpoint: Checkpoint | None

    def multiply_adds(self, size: int) -> int:
        """Returns the multiply-adds of the forward pass of an image with the side `size`."""
        if self.checkpoint is not None:
            options, _, _ = fit(
                self.checkpoint, {"image_size": size, "num_classes": 0}, new_head=True
            )
        else:
            options = replace(self.options, image_size=(size, size), num_classes=0)
        return count_multiply_adds(sketch(options))


def start_values(name: str | None, model: str | None) -> dict[str, str]:
    """Returns the config values, by dotted key, that set the model from which a run starts.

    Args:
      name: a checkpoint, the name of a published model or `scratch`; None: the default checkpoint.
      model: the config's `model.name`. With `scratch`, this model is trained. None or empty: not
        set, and with `scratch` a small ViT is trained.
    """
    if name == SCRATCH:
        return {"model.name": model or ("ViT-Ti/16" if on_cpu() else "ViT-S/16")}
    return {} if name is None else {"finetune.checkpoint": checkpoint_of(name)}


def choose(settings: Settings) -> None:
    """Adds the automatic settings of a self-supervised run to options with `data.path`.

    Raises:
      UserError: images or the checkpoint do not exist, or not even a small batch fits into memory.
    """
    user_keys = settings.user_keys
    settings.add(_data(settings.options, user_keys))
    train, choices = _splits(settings.options, user_keys)
    settings.add(choices)
    start, choices = _start(settings.options)
    settings.add(choices)
    settings.add(_method(start, len(train)))
    settings.add(_crops(settings.options, start, train))
    settings.add(_length(settings.options, user_keys, start, len(train)))
    settings.add(_comparison(settings.options, train))
    needless = [key for key in unread(settings.options) if key not in user_keys]
    settings.choices = [one for one in settings.choices if one.key not in needless]
    reason = "the other values need none"
    settings.add([Choice(key, VALUES[key].default, reason) for key in needless])
    settings.add(choose_micro_batches(settings.options, user_keys, least=2))


def _data(config: RunOptions, user_keys: Collection[str]) -> list[Choice]:
    path = config.data.path
    if not path:
        raise UserError("name the images: vit-jax pretrain PHOTOS, or --config.data.path=PHOTOS")
    if "data.source" in user_keys:
        return []
    check_no_run(path)
    if "://" in path or (
        os.path.isdir(path) and not os.path.isfile(os.path.join(path, "dataset_info.json"))
    ):
        return [Choice("data.source", "folder", "a folder of images, nested in any way")]
    if not os.path.exists(path) and ":" not in path:
        raise UserError(f"there is no {path}: give a folder of images, nested in any way")
    return choices_of(data_at(path), path)


def _splits(config: RunOptions, user_keys: Collection[str]) -> tuple[Source, list[Choice]]:
    """Opens the images to train on, and chooses the splits for training and evaluation."""
    data, choices = config.data, []
    if not {f"data.{key}" for key in SPLIT_KEYS} & {*user_keys}:
        names = _split_names(config)
        whole = "train" if "train" in names else "all"
        source = _open(config, whole)
        check_files({whole: source})
        count = len(source)
        if count < FEWEST:
            raise UserError(
                f"{data.path} has {count} images; training without labels needs {FEWEST} at least"
            )
        first, second = (90, 95) if count >= 400 else (80, 90) if count >= 40 else (50, 75)
        reason = "without labels"
        if whole == "train":
            reason = "the folder has splits: no other folder is trained on"
        choices = splits_of(
            (f"{whole}[:{first}%]", f"{first} % of {count:,} images, {reason}"),
            (f"{whole}[{first}%:{second}%]", "held out: views are matched among them"),
            (f"{whole}[{second}%:]", "the same, at the end"),
        )
    split = next((one.value for one in choices if one.key == "data.train_split"), data.train_split)
    return _open(config, split), choices


def _split_names(config: RunOptions) -> set[str]:
    data = config.data
    if data.source != "folder":
        return {*of_kind(data.source, data.path).splits}
    if "://" in data.path:
        return {"all"}
    found = folder_of_splits(data.path, folders_of_images(data.path))
    return {*found.splits} if found else {"all"}


def _open(config: RunOptions, split: str, labels: bool = False) -> Source:
    data = config.data
    return open_source(data.source, split, path=data.path, label_key=data.label_key, labels=labels)


def _start(config: RunOptions) -> tuple[Start, list[Choice]]:
    """Returns the model to start from, and settings that depend on it, such as the dtype."""
    choices, name = [], config.finetune.checkpoint
    if name is None and config.model.name:
        start = Start(model_options(**model_arguments(config), num_classes=0), None)
    else:
        if name is None:
            name = DEFAULT_CHECKPOINT if on_cpu() else LARGE_CHECKPOINT
            reason = "DINOv2: few images teach little from scratch"
            choices.append(Choice("finetune.checkpoint", name, reason))
            checkpoint = open_default(name, "; or --from=scratch")
        else:
            checkpoint = open_checkpoint(name)
        start = Start(checkpoint.options, checkpoint)
        seen = checkpoint.preprocessing
        if seen is None or seen.interpolation in INTERPOLATIONS:
            choices.append(Choice("data.interpolation", None, "as the checkpoint's preprocessing"))
    if not on_cpu():
        choices.append(Choice("model.dtype", "bfloat16", "the device computes in it"))
    elif _has_tokens(start.options):
        choices.append(
            Choice("model.scan", True, "compiles one layer for all: a minute less on a CPU")
        )
    return start, choices


def _has_tokens(options: ImageOptions) -> bool:
    """Returns True if a model with these options has patch tokens, as a ViT has."""
    return issubclass(family_of(options).model, TokenModel)


def _method(start: Start, count: int) -> list[Choice]:
    """Chooses the losses and the prototype heads."""
    options, found = start.options, start.checkpoint and start.checkpoint.objective
    masks = _has_tokens(options) and options.pooling == "cls" and options.resnet_blocks is None
    if masks:
        reason = "losses are DINOv2's: views, masked patches, KoLeo"
        choices = [Choice("objective.name", "dino", reason)]
    else:
        reason = "losses are DINO's: the model has no class and patch tokens"
        choices = [
            Choice("objective.name", "dino", reason),
            Choice("dino.patch_weight", 0.0, "no patch tokens to mask"),
        ]
    if found and found.name == "dino":
        choices += [
            Choice(f"dino.{key}", x, "the checkpoint's heads") for key, x in found.values.items()
        ]
    else:
        prototypes = 2 ** min(16, max(8, round(math.log2(max(1, count)))))
        choices.append(
            Choice("dino.prototypes", prototypes, f"about one for each of {count:,} images")
        )
    return choices


def _crops(config: RunOptions, start: Start, train: Source) -> list[Choice]:
    """Chooses the sizes and the number of crops for the available time."""
    patch = getattr(start.options, "patch_size", 32)
    seconds, count = available_seconds(config), len(train)
    native = max(height_and_width(start.options.image_size))
    largest = max(patch, min(LARGE_SIDE, native) // patch * patch)
    crops = config.dino.local_crops if seconds is None else 2

    def local_of(size: int) -> int:
        return max(patch, round(size * LOCAL_SIDE / patch) * patch)

    def fits(size: int) -> bool:
        return count * _step_seconds(start, size, local_of(size), crops) <= TRAINED * seconds

    least, minutes = SMALLEST_SIDE * patch, seconds and seconds / 60
    size, reason = largest_size(largest, patch, least, patch, minutes, fits)
    return [
        Choice(
            "data.image_size", size, f"{reason}; the images' shorter sides are {short_sides(train)}"
        ),
        Choice("data.test_resize", round(size * 8 / 7), "its central part is the crop"),
        Choice("dino.local_size", local_of(size), "less than half of it, in small crops"),
        Choice(
            "dino.local_crops", crops, "the authors'" if seconds is None else "few, to save time"
        ),
    ]


def _step_seconds(start: Start, size: int, local: int, crops: int) -> float:
    """Estimates the training time of one image, in seconds, by the sides of its crops in pixels."""
    large, small = start.multiply_adds(size), start.multiply_adds(local)
    return 2 * (2 * 4 * large + 3 * crops * small) / flops_per_second()


def _length(
    config: RunOptions, user_keys: Collection[str], start: Start, count: int
) -> list[Choice]:
    """Chooses batch size, steps, learning rate and the teacher's momentum."""
    seconds, scratch = available_seconds(config), start.checkpoint is None
    batch = min(config.batch_size if seconds is None else 32, 2 ** int(math.log2(max(2, count))))
    batch = config.batch_size if "batch_size" in user_keys else batch
    steps, reason = _steps(config, user_keys, start, count, batch)
    rate = float(f"{(5e-4 if scratch else 1e-5) * math.sqrt(batch / 64):.2g}")
    momentum = round(min(0.9995, max(0.9, 1 - 6 / steps)), 4)
    every = steps if seconds is not None else max(1, steps // EVALUATIONS)
    every = config.evaluate_every if "evaluate_every" in user_keys else every
    return [
        Choice("batch_size", batch, f"{count:,} images to train on"),
        Choice("steps", None, "the epochs") if config.epochs else Choice("steps", steps, reason),
        Choice(
            "optimizer.learning_rate",
            rate,
            "from random parameters" if scratch else "low: features last",
        ),
        Choice(
            "optimizer.warmup_steps",
            math.ceil(steps / 10) if steps > 1 else 0,
            "a tenth of the steps",
        ),
        Choice("dino.teacher_momentum", momentum, "the teacher averages a sixth of the steps"),
        Choice(
            "evaluate_every",
            every,
            "at the end" if every == steps else f"{EVALUATIONS} evaluations",
        ),
        Choice("checkpoint.every", every, "with each evaluation"),
        Choice("log_every", max(1, steps // 10), "ten lines"),
    ]


def _steps(
    config: RunOptions, user_keys: Collection[str], start: Start, count: int, batch: int
) -> tuple[int, str]:
    """Returns the number of steps, and the reason; by default as many as the time allows."""
    if "steps" in user_keys:
        return config.steps, ""
    if config.epochs:
        return math.ceil(config.epochs * count / batch), ""
    seconds = available_seconds(config)
    steps = max(LEAST_STEPS, min(MOST_STEPS, PASSES * count // batch))
    if seconds is not None:
        sizes = config.data.image_size, config.dino.local_size, config.dino.local_crops
        possible = int(TRAINED * seconds / (batch * _step_seconds(start, *sizes)))
        if possible < steps:
            steps = max(LEAST_STEPS, possible)
            return steps, (
                f"{steps * batch / count:.1f} passes over {count:,} images, in {seconds / 60:g} "
                "minutes"
            )
    return steps, (
        f"{steps * batch / count:.0f} passes over {count:,} images, {MOST_STEPS:,} steps at most"
    )


def _comparison(config: RunOptions, train: Source) -> list[Choice]:
    """Chooses settings for k-NN evaluation before and after training, if the images have labels."""
    data = config.data
    whole = data.train_split.partition("[")[0]
    reason = "no k-NN, as there are no labels: compare views matched, before and after"
    none = [Choice("knn.every", 0, reason)]
    if "@" in data.path or "://" in data.path:
        return none
    try:
        source = _open(config, whole, labels=True)
        table = source.known_labels()
    except UserError:
        return none
    if table is None or table.shape[1] != 1 or (table < 0).any() or len(source) < len(train):
        return none
    counts = np.bincount(table[:, 0])
    if len(source.class_names) < 2 or np.median(counts[counts > 0]) < 4:
        return none
    many = min(len(source) // 2, MOST_COMPARED)
    halves = f"{whole}[:{many}],{whole}[{many}:{2 * many}]"
    reason = f"labels of {len(source.class_names)} classes, which are not trained on"
    return [
        Choice("knn.sets", (f"{data.source}:{data.path}@{halves}",), reason),
        Choice("knn.every", config.evaluate_every, "before, and with each evaluation"),
        Choice(
            "knn.neighbours", (min(NEIGHBOURS, many),), f"of {many:,} images, for {many:,} others"
        ),
        Choice("checkpoint.keep_best", 1, "the best by k-NN, if need be the features of the start"),
        Choice("checkpoint.final", "best", "so that no features are kept that became worse"),
    ]
