r"""Object detection with ViTDet's backbone and a DETR head (2203.16527, 2010.04159).

    python -m vit_jax.main --config=configs/detect.py --config.data.path=DIR --workdir=RUN
    python -m vit_jax.main --config=configs/detect.py:backbone=CHECKPOINT,size=512 \
        --config.data.path=DIR --workdir=RUN

DIR is a data set with a COCO file (`data.source=coco`). Metrics are COCO's AP and AP50 of the test
images, each within a square of `size` pixels.

`backbone` is a checkpoint, a workdir, or the name of a model, with published weights if there are
any. The default is MAE's ViT-B/16 from the Hub, as in ViTDet. With `window=14`, the default for
this backbone, all layers of a ViT but four attend within windows. `steps=2000` shortens the run of
100 epochs.
"""

from vit_jax.config import choose, named_values
from vit_jax.recipes import detection, set_backbone

DEFAULT = "hf://timm/vit_base_patch16_224.mae"


def get_config(argument=None):
    given = dict(backbone=DEFAULT, size="1024", window="", steps="")
    values, argument = named_values(argument, **given)
    backbone = values["backbone"]
    window = values["window"] or ("14" if backbone == DEFAULT else "0")
    config = detection(int(values["size"]), int(window), int(values["steps"] or 0))
    if backbone == DEFAULT and argument == "smoke":
        backbone = "ViT-B/16"
    set_backbone(config, backbone, smoke=argument == "smoke")
    return choose(config, argument)
