r"""Object detection with ViTDet's backbone and a DETR head (2203.16527, 2010.04159).

    python -m vit_jax.main --config=configs/detect.py --config.data.path=DIR --workdir=RUN
    python -m vit_jax.main --config=configs/detect.py:backbone=CHECKPOINT,size=512 \
        --config.data.path=DIR --workdir=RUN

DIR is a data set with a COCO file (`data.source=coco`). During training COCO's AP and AP50 are
computed on test images that are resized to fit into a square of `size` pixels.

`backbone` is a checkpoint, a workdir, or the name of a model, whose published weights are used if
there are any. The default is MAE's ViT-B/16 from the Hub, as in ViTDet. With `window=14`, which is
the default for this backbone, attention is limited to windows in all layers except four. The run
has 100 epochs; `steps=2000` makes it shorter.
"""

from vit_jax.config import choose, named_values
from vit_jax.recipes import backbone_values, detection

DEFAULT = "hf://timm/vit_base_patch16_224.mae"


def get_config(argument=None):
    given = dict(backbone=DEFAULT, size="1024", window="", steps="")
    values, argument = named_values(argument, **given)
    backbone = values["backbone"]
    window = values["window"] or ("14" if backbone == DEFAULT else "0")
    config = detection(int(values["size"]), int(window), int(values["steps"] or 0))
    if backbone == DEFAULT and argument == "smoke":
        backbone = "ViT-B/16"
    config.update_from_flattened_dict(backbone_values(backbone, smoke=argument == "smoke"))
    return choose(config, argument)
