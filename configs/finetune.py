r"""Fine-tuning as in the paper (section 4.1, table 4), from any checkpoint of `load_model`.

    python -m vit_jax.main --config=configs/finetune.py:dataset=cifar10 --workdir=DIR \
        --config.finetune.checkpoint=ViT-B_16.npz

Data sets: imagenet2012, cifar10, cifar100, oxford_iiit_pet, oxford_flowers102, folder with
--config.data.path=DIR, and vtab/TASK (vtab/clevr-count). `python -m vit_jax.sweep` with the same
flags finds the learning rate on validation images from the training set and then trains on all of
them. `model=ViT-B/16` is required without a checkpoint; with one, it checks that the checkpoint is
of this model. `size=512` sets another image size than 384. Table 2's ImageNet results also use
--config.optimizer.average=0.9999. For H/14 use size=378 instead of 384, the part that its patches
cover.
"""

from vit_jax.config import choose, named_values
from vit_jax.recipes import finetune


def get_config(argument=None):
    values, argument = named_values(argument, dataset="cifar10", model="", size="384")
    return choose(finetune(values["dataset"], values["model"], int(values["size"])), argument)
