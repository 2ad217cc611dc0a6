r"""Object detection by a set of boxes: ViTDet's backbone and a DETR (2203.16527, 2010.04159).

    python -m vit_jax.main --config=configs/detect.py --config.data.path=DIR --workdir=RUN
    python -m vit_jax.main --config=configs/detect.py:backbone=CHECKPOINT,size=512 \
        --config.data.path=DIR --workdir=RUN

DIR is a data set in COCO's layout. `backbone` is the name of a model, which is trained from
scratch, or any checkpoint that `vit_jax.load_model` accepts. Metrics are COCO's AP and AP50 of the
test images, each within a square of `size` pixels.
"""

from vit_jax.config import choose, named_values
from vit_jax.recipes import detection


def get_config(argument=None):
    values, argument = named_values(argument, backbone="ViT-B/16", size="1024")
    return choose(detection(values["backbone"], int(values["size"])), argument)
