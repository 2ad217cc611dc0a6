"""Scaling of depth, width, MLP, patches or all: python -m vit_jax.experiment figure8 --out=DIR.

Starting from a base model, depth, width, MLP and patch size are changed one at a time, and all
together. The plot shows few-shot accuracy over the compute relative to the base model. At laptop
scale small ViTs learn seven of scikit-learn's digits and are evaluated on all ten, with one seed.
In the paper the base model has 8 layers of width 1,024, MLPs of width 2,048 and patches of 32
pixels (images have 256 pixels if patches have 64), and is trained on JFT-300M.
"""

from vit_jax.ledger.charts import lines
from vit_jax.ledger.laptop import short_run
from vit_jax.ledger.paper_scale import FIVE_SHOT, FIVE_SHOT_FIGURE
from vit_jax.ledger.stages import grid
from vit_jax.ledger.study import Experiment
from vit_jax.ledger.tables import listing, slopes

# Base models: depth, width, width of the MLP, patch size, and width of a head.
BASES = {"laptop": (4, 64, 128, 4, 16), "paper": (8, 1024, 2048, 32, 64)}
STEPS, LAPTOP = 400, "fewshot/digits/10"
# Changes of the base model, by the changed dimension and the name of the factor: factors of depth,
# width and MLP, and a divisor of the patch size.
SHAPES = {("base", 1): (1, 1, 1, 1), ("all", 0.5): (0.5,) * 4, ("all", 1.5): (1.5, 1.5, 1.5, 2)}
for _factor in (0.5, 2, 4):
    SHAPES |= {("depth", _factor): (_factor, 1, 1, 1), ("width", _factor): (1, _factor, 1, 1)}
    SHAPES |= {("MLP", _factor): (1, 1, _factor, 1)}
    SHAPES |= {("patch", min(_factor, 2)): (1, 1, 1, min(_factor, 2))}
CHANGED = tuple(dict.fromkeys(what for what, _ in SHAPES))


def pretrained(study, changed, factor, seed):
    """Returns config and overrides of the training run of a changed model, at the study's scale."""
    if (changed, factor) not in SHAPES:
        return None
    *base, patch, head = BASES[study.scale]
    *times, finer = SHAPES[changed, factor]
    depth, dim, mlp_dim = (int(size * by) for size, by in zip(base, times, strict=True))
    shape = {"model__name": f"ViT-B/{int(patch / finer)}", "model__depth": depth, "model__dim": dim}
    shape |= {"model__mlp_dim": mlp_dim, "model__heads": dim // head}
    shape |= {"data__image_size": 256, "data__test_resize": 292} if patch / finer == 64 else {}
    return (
        short_run(STEPS, **shape) if study.scale == "laptop" else ("vit_b32_jft", shape | FIVE_SHOT)
    )


def read(study):
    """Returns few-shot accuracy and relative compute of each model.

    The base model is repeated for each changed dimension, because it is a point of each line.
    """
    name = LAPTOP if study.scale == "laptop" else FIVE_SHOT_FIGURE
    points = study.points("pretrained", "accuracy", "exaflops", name)
    if not points or points[0]["changed"] != "base":
        return []
    unit = points[0]["exaflops"][0]
    for point in points:
        point["compute"], point["few-shot"] = point.pop("exaflops")[0] / unit, point.pop(name)
    return [points[0] | {"changed": what} for what in CHANGED[1:]] + points[1:]


SHARED = dict(
    claim="Depth helps most and width least; smaller patches help without more parameters.",
    stages=(grid("pretrained", {"changed": CHANGED, "factor": (1, 0.5, 1.5, 2, 4)}, pretrained),),
    read=read,
    table=lambda figures: listing(
        figures, ("changed", "factor", "compute"), ("few-shot", "accuracy")
    ),
    draw=lambda study, figures: {"figure8": lines(figures, "compute", "few-shot", by=["changed"])},
    finding=lambda figures: slopes(figures, "compute", "few-shot", "changed"),
)
EXPERIMENT = Experiment(**SHARED, place="Figure 8", paper=Experiment(**SHARED), minutes=12)
