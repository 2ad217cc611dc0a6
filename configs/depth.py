r"""Depth estimation: a head on a frozen backbone, by recipes of DINOv3 and DINOv2 for NYU Depth v2.

    python -m vit_jax.main --config=configs/depth.py:backbone=DINOv2-S/14,head=linear \
        --config.data.path=DIR --workdir=RUN
    python -m vit_jax.main --config=configs/depth.py:backbone=DINOv2-S/14,head=dpt,steps=2000 \
        --config.data.path=DIR --config.depth.max_depth=80 --workdir=RUN

DIR is a folder with images and depth maps (`data.source=depth`). Depths are in metres. Pixels with
a depth above `depth.max_depth` (default 10, as in NYU Depth v2) are ignored. The unit of 16-bit
PNGs is a millimetre, or `data.depth_scale` metres. `backbone` is a checkpoint, a workdir, or the
name of a model, whose published weights are used if there are any.

`linear` is DINOv3's probe of the last layer, `linear4` is DINOv2's probe of four layers and class
tokens, and `dpt` is DPT's decoder. The authors train on NYU Depth v2 for 38,400 steps of 16 images;
`steps=2000` shortens the run and its warm-up. `--config.finetune.train=all` also trains the
backbone.
"""

from vit_jax.config import choose, named_values
from vit_jax.errors import UserError, nearest
from vit_jax.recipes import DEPTH, backbone_values, depth


def get_config(argument=None):
    values, argument = named_values(argument, backbone="DINOv2-S/14", head="linear", steps="")
    head, backbone = values["head"], values["backbone"]
    if head not in DEPTH:
        raise UserError(f"no head={head}; {nearest(head, DEPTH)}")
    size = 420 if backbone.endswith("/14") else 416  # Multiples of the patch size.
    config = depth(head, size, int(values["steps"] or 0))
    config.update_from_flattened_dict(backbone_values(backbone, smoke=argument == "smoke"))
    return choose(config, argument)
