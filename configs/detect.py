r"""Object detection by a set of boxes: ViTDet's backbone and a DETR (2203.16527, 2010.04159).

    python -m vit_jax.main --config=configs/detect.py --config.data.path=DIR --workdir=RUN
    python -m vit_jax.main --config=configs/detect.py:backbone=CHECKPOINT,size=512 \
        --config.data.path=DIR --workdir=RUN

DIR is a data set with a COCO file (`data.source=coco`). Metrics are COCO's AP and AP50 of the test
images, each within a square of `size` pixels.

`backbone` is any checkpoint that `vit_jax.load_model` accepts, by default MAE's ViT-B/16 of the Hub
as in ViTDet, or the name of a model, which is trained from scratch. With `window=14` the layers of
a ViT attend within windows, except for four of them; the default backbone has it. `steps=2000`
shortens the run of 100 epochs.
"""

from vit_jax.config import choose, named_values
from vit_jax.recipes import detection

DEFAULT = "hf://timm/vit_base_patch16_224.mae"


def get_config(argument=None):
    given = dict(backbone=DEFAULT, size="1024", window="", steps="")
    values, argument = named_values(argument, **given)
    backbone, smoke = values["backbone"], argument == "smoke"
    window = values["window"] or ("14" if backbone == DEFAULT else "0")
    config = detection(int(values["size"]), int(window), int(values["steps"] or 0))
    if backbone == DEFAULT and smoke:
        config.model.name = "ViT-B/16"
    elif "://" in backbone or not _is_name(backbone):
        config.finetune.checkpoint = backbone
    else:
        config.model.name = backbone
    return choose(config, argument)


def _is_name(backbone):
    from vit_jax.errors import UserError
    from vit_jax.models import parse_name  # It imports JAX.

    try:
        return bool(parse_name(backbone))
    except UserError:
        return False
