r"""Fine-tuning by BiT-HyperRule, without a search (1912.11370, section 3.3).

The size of the data set determines all values. The ViT paper fine-tunes ResNets by this rule and by
its own recipe (configs/finetune.py), and reports the better result.

    python -m vit_jax.main --config=configs/bit_hyperrule.py:dataset=cifar10 --workdir=DIR \
        --config.finetune.checkpoint=BiT-M-R50x1.npz

The data sets are the same as in configs/finetune.py. `folder` needs the number of training images
and, for small images, their side: `dataset=folder,images=4000,side=64`. The model's image size is
128 for images of less than 96x96 pixels, and 384 for larger ones (480 with `model=BiT-R152x4`). The
authors' code uses 480 for all models, as `size=480` does.
"""

from vit_jax.config import choose, named_values
from vit_jax.recipes import bit_hyperrule


def get_config(argument=None):
    values, argument = named_values(
        argument, dataset="cifar10", model="", images="0", side="0", size="0"
    )
    numbers = {name: int(values[name]) for name in ("images", "side", "size")}
    return choose(bit_hyperrule(values["dataset"], values["model"], **numbers), argument)
