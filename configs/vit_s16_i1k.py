"""ViT-S/16 on ImageNet-1k, "Better plain ViT baselines" (2205.01580), for 90, 150 or 300 epochs.

    python -m vit_jax.main --config=configs/vit_s16_i1k.py:epochs=90 --workdir=DIR

The authors report 76.5, 78.5 and 80.0 % validation accuracy. The values are those of big_vision's config of
the same name. What no value says: it mixes each image with its neighbour on the same device, here in the
whole batch; and it draws images from a buffer of 250,000, here from all.
"""

from vit_jax.config import choose, named_values
from vit_jax.errors import UserError
from vit_jax.recipes import plain_vit


def get_config(argument=None):
    values, argument = named_values(argument, epochs="90")
    if not values["epochs"].isdecimal():
        raise UserError(f"epochs={values['epochs']} must be 90, 150 or 300")
    return choose(plain_vit(int(values["epochs"])), argument)
