r"""Semantic segmentation: a head on any backbone, by recipes of papers for ADE20K.

    python -m vit_jax.main --config=configs/segment.py:backbone=DINOv3-B/16,head=linear \
        --config.data.path=PHOTOS --workdir=DIR
    python -m vit_jax.main --config=configs/segment.py:backbone=DINOv3-L/16,head=eomt \
        --config.data.path=PHOTOS --workdir=DIR
    python -m vit_jax.main --config=configs/segment.py:backbone=Swin-T,head=upernet \
        --config.data.path=PHOTOS --workdir=DIR

PHOTOS is a folder with images and masks, or the folder of ADE20K, VOC or Cityscapes
(`data.source=masks`). `backbone` is a checkpoint, a workdir, or the name of a model, whose
published weights are used if there are any.

`head=linear` is DINOv3's linear probe of frozen features; it needs few images. `head=eomt` trains
the whole ViT by EoMT's recipe for DINOv3. `head=upernet` trains the whole Swin or ConvNeXt by
Swin's recipe. The authors train these heads on 20,210 images for 31, 16 and 126 epochs;
`steps=2000` shortens the run and its warm-up.
"""

from vit_jax.config import choose, named_values
from vit_jax.errors import UserError, nearest
from vit_jax.recipes import SEGMENTATION, backbone_values, segmentation


def get_config(argument=None):
    values, argument = named_values(argument, backbone="", head="linear", steps="")
    head, backbone = values["head"], values["backbone"]
    if head not in SEGMENTATION:
        raise UserError(f"no head={head}; {nearest(head, SEGMENTATION)}")
    backbone = backbone or SEGMENTATION[head].backbone
    config = segmentation(head, int(values["steps"] or 0))
    config.update_from_flattened_dict(backbone_values(backbone, smoke=argument == "smoke"))
    if backbone.endswith("/14"):
        config.data.image_size = config.data.test_resize = 518  # A multiple of the patch size.
    return choose(config, argument)
