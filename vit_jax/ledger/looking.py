"""Computes attention and position similarity of trained models.

These are shown in figures 6, 7, 11 and 14 of the ViT paper. The models are from our runs, or they
are checkpoints that the user passes with a folder of images.
"""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vit_jax.errors import UserError
from vit_jax.ledger.laptop import config_name
from vit_jax.ledger.stages import grid
from vit_jax.ledger.study import Experiment, Figures, Study
from vit_jax.ledger.tables import markdown_table

MODELS, STEPS = ("ViT-64x4/4", "R14x1/4+ViT-64x4/4"), 3000
RECIPE = {"batch_size": 64, "optimizer__learning_rate": 1e-3, "data__test_split": "test[:2000]"}
FLAGS = {
    "checkpoint": dict(nargs="+", help="for --scale=paper: a ViT, and for figure 11 a hybrid"),
    "images": dict(help="for --scale=paper: a folder of images"),
}
NEEDS = "for --scale=paper alone: --checkpoint=ViT-L_16.npz R50+ViT-L_16.npz and --images=FOLDER"
IMAGES = 128  # Number of images for mean attention distances, as in the paper.


def of_models(
    place: str,
    claim: str,
    read: Callable[[Study], Figures],
    table: Callable[[Figures], str],
    draw: Callable[[Study, Figures], Mapping[str, Any]],
    finding: Callable[[Figures], str],
    runs_of: str = "figure7",
) -> Experiment:
    """Returns an experiment that inspects a ViT and a hybrid.

    At laptop scale the models are trained by the experiment `figure7`, and the other experiments
    use the same runs. At the paper's scale the models are any checkpoints of the user. The
    arguments are fields of `Experiment`.
    """
    shared = dict(read=read, table=table, draw=draw, finding=finding)
    own = {} if runs_of else dict(stages=(TRAINED,), options=FLAGS, minutes=35)
    return Experiment(
        claim,
        place=place,
        paper=Experiment("", **shared),
        needs=NEEDS,
        runs_of=runs_of,
        **own,
        **shared,
    )


def trained(study: Study, model: str, seed: int) -> tuple[str, Mapping[str, Any]]:
    """Returns a training run on images of digits at random positions, with known masks."""
    return config_name(model, "digits", 100_000, STEPS, size=32, source="scattered"), RECIPE


TRAINED = grid("trained", {"model": MODELS}, trained)


class Seen(NamedTuple):
    """A model, some images, and the model's attention on them."""

    model: object  # A TokenModel.
    images: np.ndarray  # uint8 `[images, height, width, 3]`.
    # Masks of the objects whose class is the label, bool `[images, height, width]`; None if
    # unknown.
    masks: np.ndarray | None
    # Attention rollout of patches, `[images, rows, columns]`, with sum 1 per image.
    rollout: np.ndarray
    distance: np.ndarray  # Mean attention distance in pixels, `[layers, heads]`.


def seen_in(study: Study) -> dict[str, Seen]:
    """Returns the attention of each model on some images, by the model's name.

    At laptop scale the models are from the finished runs of the study's stage `trained`, and the
    images are test images of these runs. At the paper's scale the models are the checkpoints of
    `--checkpoint` (with their file names as names), and the images are those in the folder
    `--images`.

    Raises:
      UserError: the checkpoints or the folder are missing; a model has no full attention.
    """
    if study.scale == "laptop":
        return {t.factors["model"]: seen_by(str(t.job.workdir)) for t in study.finished("trained")}
    checkpoints, images = study.options["checkpoint"], study.options["images"]
    if not checkpoints or not images:
        raise UserError("the paper's scale needs --checkpoint=ViT-L_16.npz and --images=FOLDER")
    return {Path(checkpoint).stem: seen_by(checkpoint, images) for checkpoint in checkpoints}


@functools.cache
def seen_by(checkpoint: str, folder: str = "") -> Seen:
    """Returns a checkpoint's attention on the images of a folder.

    If `folder` is empty, the checkpoint is a run, and the images are the run's first test images.

    Raises:
      UserError: the model has no full attention; no image can be read.
    """
    model, images, masks, results = _looked(checkpoint, folder)
    return Seen(model, images, masks, results.rollout[:, -1], results.distance)


def _looked(checkpoint: str, folder: str = "") -> tuple:
    """Returns a checkpoint's model, images, masks (None if unknown) and intermediate results."""
    from vit_jax.checkpoint_crop import checkpoint_crop
    from vit_jax.data.image_files import find_images, read_images
    from vit_jax.inspection.attention_maps import check_attends
    from vit_jax.inspection.intermediates import compute_intermediates
    from vit_jax.interop.open import open_checkpoint
    from vit_jax.load import build_model

    opened = open_checkpoint(checkpoint)
    model = build_model(opened, log=str)
    check_attends(model)
    crop = checkpoint_crop(opened, model.image_size)
    if folder:
        images, masks = read_images(find_images([folder]), crop, IMAGES)[1], None
    else:
        images, masks = test_images(checkpoint, crop)
    return model, images, masks, compute_intermediates(model, images, 16)


@functools.cache
def attention_jaccard(workdir: Path) -> float:
    """Returns how well the class token's attention covers the object, as a mean Jaccard index.

    The index is computed on test images of a run, as in DINO (2104.14294, section 4.2.2). In each
    head of the last layer, the patches with the highest attention are selected until the sum of
    their attention is 0.6. These patches are compared with the mask of the labelled object. The
    result is the index of the best head of each image, averaged over the images.
    """
    _, _, masks, results = _looked(str(workdir))
    return float(np.mean(best_jaccard(results.attention[:, -1], masks, 0.6)))


def best_jaccard(heads: np.ndarray, masks: np.ndarray, share: float) -> np.ndarray:
    """Returns the Jaccard index of attention and mask for the best head of each image, `[images]`.

    Args:
      heads: attention, `[images, heads, rows, columns]`, with sum 1 per head.
      masks: bool `[images, height, width]`; height and width are multiples of rows and columns.
      share: the patches with the highest attention are selected until the sum of their attention is
        `share`.
    """
    flat = heads.reshape(*heads.shape[:2], -1)
    order = np.argsort(-flat, axis=-1, kind="stable")
    ordered = np.take_along_axis(flat, order, -1)
    before = np.cumsum(ordered, -1) - ordered
    selected = np.zeros(flat.shape, bool)
    np.put_along_axis(selected, order, before < share, -1)
    selected = selected.reshape(heads.shape)
    for axis, side in ((2, masks.shape[1]), (3, masks.shape[2])):
        selected = selected.repeat(side // selected.shape[axis], axis=axis)
    both, either = selected & masks[:, None], selected | masks[:, None]
    return (both.sum((2, 3)) / np.maximum(either.sum((2, 3)), 1)).max(axis=1)


def test_images(workdir: str | Path, crop) -> tuple[np.ndarray, np.ndarray]:
    """Returns the first test images of a run, and masks of the objects that the labels name.

    The run is on generated images, for which masks are known. The images are uint8 `[images,
    height, width, 3]`, and the masks bool `[images, height, width]`.
    """
    from vit_jax.runs.splits import open_splits
    from vit_jax.runs.workdir import saved_run

    source = open_splits(saved_run(Path(workdir)).config).test
    images = np.stack([crop(source[index].image) for index in range(IMAGES)])
    objects = [source.objects(index) for index in range(IMAGES)]
    return images, np.stack([each.seen == each.main for each in objects])


@functools.cache
def positions_of(workdir: Path) -> np.ndarray:
    """Returns similarities of position embeddings, `[rows, columns, rows, columns]`."""
    import vit_jax
    from vit_jax.inspection.embeddings import position_similarity

    return position_similarity(vit_jax.load_model(workdir, log=str))


# Metrics of the experiments.


def distances(study: Study) -> dict[str, Any]:
    """Returns mean attention distances in pixels.

    Returns:
      Two dicts by model: `distance` contains the mean attention distance of each head,
      `[layers][heads]`. `even` contains the distance that uniform attention would have.
    """
    seen = seen_in(study)
    return {
        "distance": {name: one.distance.tolist() for name, one in seen.items()},
        "even": {name: even_distance(one.model) for name, one in seen.items()},
    }


def distance_table(figures: Figures) -> str:
    """Returns a table of each layer's least and greatest attention distance, by model."""
    layers = max((len(layers) for layers in figures["distance"].values()), default=0)
    lines = [
        [name, *(span(heads) for heads in distance), *[""] * (layers - len(distance))]
        for name, distance in figures["distance"].items()
    ]
    head = [
        "mean attention distance of the heads, pixels",
        *(f"layer {1 + layer}" for layer in range(layers)),
    ]
    return markdown_table(head, lines)


def span(heads: list[float]) -> str:
    """Formats the minimum and maximum of numbers, such as `1.5 to 9.2`."""
    return f"{min(heads):.1f} to {max(heads):.1f}"


def nearness(similarity: np.ndarray) -> dict[str, float]:
    """Returns the mean similarity of position embeddings for three groups of patch pairs.

    The groups are: neighbours; pairs in the same row or column, which include neighbours; and all
    other pairs.

    Args:
      similarity: similarity of two patches, by row and column of the first and of the second patch:
        `[rows, columns, rows, columns]`.
    """
    rows, columns = np.indices(similarity.shape[:2]).reshape(2, -1)
    down, right = (abs(places[:, None] - places[None]) for places in (rows, columns))
    flat = similarity.reshape(len(rows), -1)
    neighbours, line = down + right == 1, (down == 0) ^ (right == 0)
    groups = {
        "neighbours": neighbours,
        "one row or column": line,
        "others": (down > 0) & (right > 0),
    }
    return {name: float(flat[chosen].mean()) for name, chosen in groups.items() if chosen.any()}


def on_objects(seen: Seen) -> dict[str, list[float]] | None:
    """Returns how much of each image's attention rollout is on the object, and the object's area.

    Both are fractions from 0 to 1. The object is the one whose class is the image's label. The
    rollout of a patch is distributed evenly over its pixels.

    Returns:
      A dict of two lists with a value for each image: `weight`, the sum of rollout on the object,
      and `share`, the object's fraction of the image's area. None if masks are unknown.
    """
    if seen.masks is None:
        return None
    count, rows, columns = seen.rollout.shape
    height, width = seen.masks.shape[1] // rows, seen.masks.shape[2] // columns
    covered = seen.masks.reshape(count, rows, height, columns, width).mean((2, 4))
    weight, share = (seen.rollout * covered).sum((1, 2)), seen.masks.mean((1, 2))
    return {"weight": weight.tolist(), "share": share.tolist()}


def even_distance(model) -> float:
    """Returns the attention distance in pixels of a head that attends uniformly to all patches."""
    from vit_jax.inspection.attention_maps import attention_distance

    tokens = model.patch_tokens.stop
    return float(attention_distance(model, [np.ones((1, 1, tokens, tokens))])[0, 0])
